"""Settings of the HTTP server."""

from __future__ import annotations

from dataclasses import dataclass

from weft.config.numbers import MAX_ENGINES, MAX_STREAM_INTERVAL
from weft.config.options import option


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    host: str = option("127.0.0.1", "address to listen on", group="server", everyday=True)
    port: int = option(
        30000,
        "port to listen on; 0 takes a free one",
        group="server",
        everyday=True,
        low=0,
        high=65535,
    )
    served_model_name: str = option(
        "",
        "name in the API; without it, the model's own name",
        group="server",
        everyday=True,
        elsewhere=("alias",),
    )
    any_model_name: bool = option(
        False,
        "answer requests whatever model they name, instead of 404 for another model",
        group="server",
    )
    clamp_max_tokens: bool = option(
        False,
        "cut max_tokens to the rest of the context, instead of refusing more",
        group="server",
    )
    api_key: str = option(
        "",
        "key that requests need, except /health, /ping, /ready and the page itself (better: "
        "WEFT_API_KEY)",
        group="server",
        everyday=True,
    )
    api_key_file: str = option(
        "",
        "file with such keys, one per line, as KEY or @NAME KEY; # begins a comment",
        group="server",
    )
    admin_api_key: str = option(
        "",
        "key of the administration routes; without any key they answer on loopback only",
        group="server",
    )
    admin_api_key_file: str = option(
        "",
        "file with such keys, one per line, as KEY or @NAME KEY; # begins a comment",
        group="server",
    )
    tenant_by: str = option(
        "key",
        "what the policy fair treats as a tenant: each API key, or each user named by the "
        "requests of a key",
        group="server",
        choices=("key", "user"),
    )
    tenant_ttft_ms: str = option(
        "",
        "milliseconds to the first token for requests of tenants, alice=500,bob=2000, unless "
        "they have ttft_ms",
        group="server",
        judge="weft.config.pairs:why_no_ttft",
    )
    isolate_cache_by_key: bool = option(
        False,
        "requests find only cached prefixes of their own API key, so that cached_tokens shows "
        "nothing of others",
        group="server",
    )
    open_metrics: bool = option(False, "allow reading /metrics without a key", group="server")
    cors_origins: str = option(
        "",
        "origins whose pages may use this server, separated by commas; * for all",
        group="server",
        elsewhere=("allowed_origins",),
    )
    allowed_hosts: str = option(
        "",
        "host names that a server without keys answers to, besides localhost, addresses and its "
        "own, separated by commas: weft.example.com, .example.com for all below, * for all",
        group="server",
    )
    page: bool = option(
        True,
        "show the live page to browsers at /: the engine at work, and a chat",
        group="server",
    )
    page_mcp_origins: str = option(
        "",
        "origins of MCP servers whose tools the chat of the live page may call, separated by "
        "commas; the page reaches no others",
        group="server",
        judge="weft.config.origins:why_no_origins",
    )
    dp_size: int = option(
        1,
        "engine processes behind this server, each with the whole model (but its experts, with "
        "--enable-dp-attention); --threads and memory are for each of them",
        group="replicas",
        low=1,
        high=MAX_ENGINES,
        elsewhere=("data_parallel_size",),
    )
    load_balance_method: str = option(
        "cache_aware",
        "which engine gets a request: the one that probably has its prompt, or can compute it "
        "first; the next one in turn; the one with the fewest open requests, or tokens in their "
        "prompts; the one whose number follows from the bootstrap_room",
        group="replicas",
        choices="weft.route.policy:all_method_names",
    )
    engine_restarts: int = option(
        5,
        "how often within an hour an engine that has ended is started again, if there are several",
        group="replicas",
        low=0,
        high=1000,
    )
    drain_s: float = option(
        10.0,
        "time for open requests to end when the server is stopped",
        group="server",
        low=0.0,
        high=3600.0,
    )
    state_dir: str = option(
        "",
        "folder in which sessions, stored responses, files and batches outlive the server "
        "(docs/guides/state.md); without it they end with it",
        group="server",
    )
    chat_template: str = option(
        "",
        "file with a Jinja chat template, instead of the model's",
        group="server",
        elsewhere=("chat_template_file",),
    )
    trust_request_chat_template: bool = option(
        False,
        "allow requests to bring their own chat template, which runs in the sandbox",
        group="server",
    )
    auto_truncate: bool = option(
        False,
        "cut prompts that are too long at their beginning, instead of refusing them",
        group="server",
        elsewhere=("allow_auto_truncate",),
    )
    stream_interval: int = option(
        1,
        "tokens in one event of a stream, after the first; a request may say otherwise",
        group="server",
        low=1,
        high=MAX_STREAM_INTERVAL,
    )
    tool_call_parser: str = option(
        "auto",
        "how the model writes tool calls; auto reads it from the chat template "
        "(docs/guides/tools.md)",
        group="server",
        choices="weft.text.parsers.formats:tool_parser_names",
    )
    reasoning_parser: str = option(
        "auto",
        "how the model marks its reasoning; auto reads it from the chat template "
        "(docs/guides/tools.md)",
        group="server",
        choices="weft.text.parsers.formats:reasoning_parser_names",
        elsewhere=("reasoning_format",),
    )
    limit_mm_per_prompt: str = option(
        "",
        'how many pictures, videos and sounds a prompt may have: {"image": 4, "video": 1} '
        "(64 image, 4 video and 16 audio if not given)",
        group="server",
        elsewhere=("limit_mm_data_per_request",),
    )
    allowed_media_domains: str = option(
        "",
        "hosts from which pictures, videos and sounds may be fetched, separated by commas; "
        "without them no address is fetched",
        group="server",
    )
    allowed_local_media_path: str = option(
        "",
        "folder below which requests may name pictures, videos and sounds by file: addresses",
        group="server",
    )
    media_timeout_s: float = option(
        10.0,
        "time for a host that a request names to send a picture, a video or a sound",
        group="server",
        low=0.1,
        high=600.0,
    )
    media_cache_mb: float = option(
        256.0,
        "memory for prepared pictures, videos and sounds, in case they come again",
        group="server",
        low=0.0,
        elsewhere=("mm_processor_cache_gb",),
    )
    grammar_in_reasoning: bool = option(
        False,
        "structured output applies from the first token on: the model does not reason before it",
        group="server",
        elsewhere=("enable_in_reasoning",),
    )
    log_level: str = option(
        "info",
        "lowest level of the lines that are logged",
        group="server",
        everyday=True,
        choices=("debug", "info", "warning", "error"),
        elsewhere=("uvicorn_log_level",),
    )
    log_format: str = option(
        "text", "form of the log's lines", group="server", choices=("text", "json")
    )
    log_requests: bool = option(
        False,
        "one log line per finished request",
        group="server",
        everyday=True,
        elsewhere=("enable_log_requests",),
    )
    log_slow_s: float = option(
        1.0,
        "one log line, and metrics by cause, for requests whose first token takes longer than "
        "this: why not more of the prompt was cached, and where the time went; 0: none",
        group="server",
        low=0.0,
    )
    metrics_compat: str = option(
        "none",
        "also give the metrics under the names of another engine",
        group="server",
        choices=("none", "sglang", "vllm"),
    )
    otlp_endpoint: str = option(
        "",
        "address for traces (OTLP over HTTP, http://127.0.0.1:4318/v1/traces); needs OpenTelemetry",
        group="server",
        elsewhere=("otlp_traces_endpoint",),
    )
    start_ramp_s: float = option(
        0.0,
        "seconds after a start, also of one engine that is started again, in which requests are "
        "admitted at a growing rate, as after POST /unblock?ramp_s; 0: all at once",
        group="server",
        low=0.0,
        high=3600.0,
    )
    step_timeout_s: float = option(
        300.0,
        "time after which an engine that is still computing one step counts as hanging; 0: never",
        group="server",
        low=0.0,
        elsewhere=("watchdog_timeout",),
    )
    hang_after_s: float = option(
        4.0,
        "time without a sign of life, or without progress in a step, after which an engine "
        "counts as hanging: open requests end with an error, and new ones get 503",
        group="server",
        low=1.0,
        high=3600.0,
    )
    hang_timeout_s: float = option(
        30.0,
        "time for a hanging engine to recover, before the server ends",
        group="server",
        low=0.0,
    )
    knee_output_per_s: float = option(
        0.0,
        "output tokens a second at the knee of this machine, from weft plan: GET /v1/loads then "
        "says how full the server is; 0: not known",
        group="server",
        low=0.0,
    )
    on_hang: str = option(
        "exit",
        "what happens after --hang-timeout-s: exit ends the server with status 1, wait goes on",
        group="server",
        choices=("exit", "wait"),
    )
