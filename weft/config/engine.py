"""Settings of the engine: the model, its loading, its memory, and scheduling (`scheduling.py`).

Zero or "auto" is a value that `resolve` replaces, from the model and the machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.config.drafts import OFF
from weft.config.options import option
from weft.config.quantized import METHODS
from weft.config.scheduling import SchedulingOptions

# The class of each attention backend for GPUs, besides torch
# (docs/contribute/attention-backend.md).
GPU_ATTENTION_BACKENDS = {"triton": "weft.executor.gpu.attention:TritonPaged"}


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model, its loading, its device and its memory."""

    # model
    model: str = option(
        "",
        "model folder, GGUF file, or Hugging Face hub id (ORG/REPO-GGUF:Q4_K_M for GGUF); "
        "if not given, SmolLM2-135M-Instruct where it is installed, else, and for weft bench, the "
        "bundled weft-nano",
        group="model",
        elsewhere=("model_path",),
    )
    revision: str = option("", "branch, tag or commit on the hub", group="model")
    tokenizer: str = option(
        "",
        "folder or hub id with the tokenizer.json for a GGUF file; its own if not given",
        group="model",
        elsewhere=("tokenizer_path",),
    )
    mmproj: str = option(
        "",
        "GGUF file with the encoder of pictures or sounds for a GGUF file; the one beside it, by "
        "its name, if not given",
        group="model",
    )
    draft_model: str = option(
        "",
        "a smaller model with the same tokenizer, named as for --model, or the folder of an "
        "EAGLE-3 head, which guesses the next tokens (--speculative draft, eagle3 or auto); on a "
        "CPU only",
        group="model",
        elsewhere=("md", "spec_draft_model"),
        aliases=(
            *("model_draft", "speculative_model", "speculative_draft_model"),
            "speculative_draft_model_path",
        ),
    )
    speculative_config: str = option(
        "",
        "--speculative, --draft-model, --max-draft, --ngram-max and --ngram-min as vLLM writes "
        "them, in JSON: method (ngram, draft_model, eagle3 or mtp), model, num_speculative_tokens, "
        "prompt_lookup_max, prompt_lookup_min",
        group="model",
    )
    dtype: str = option(
        "auto",
        "type of weights and computation; auto takes the model's, but on a CPU bfloat16 for "
        "float16, and on a GPU for float32",
        group="model",
        everyday=True,
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantize: str = option(
        "auto",
        "keep weights in fewer bits: int8, int4 (on a CPU with scales for groups of inputs) or, "
        "on a GPU, fp8 (one per output); embeddings in int8. auto keeps what is stored in eight "
        "bits or as the codes of a GGUF file, where the device computes with them",
        group="model",
        everyday=True,
        choices=("auto", "none", "int8", "int4", "fp8"),
    )
    quantize_encoder: str = option(
        "none",
        "keep the weights of an encoder of pictures, videos or sounds in fewer bits: int12 (on "
        "a CPU, in rows of 13 bits; about as exact as bfloat16, and faster if the processor has "
        "no instructions for bfloat16)",
        group="model",
        choices=("none", "int12"),
    )
    quantization: str = option(
        "auto",
        "format in which the checkpoint stores its weights, by the names of vLLM and SGLang; "
        "weft finds it without this option, and compares (--quantize chooses fewer bits)",
        group="model",
        choices=("auto", *METHODS),
    )
    load_format: str = option(
        "auto",
        "format of the weight files: auto takes safetensors if a folder has both; dummy makes "
        "random weights of the model's shape",
        group="model",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    task: str = option(
        "auto",
        "use of the model; auto derives it from the files; embed makes vectors even with a "
        "model that generates",
        group="model",
        choices=("auto", "generate", "embed", "classify"),
        elsewhere=("is_embedding", "runner", "convert", "embedding"),
    )
    model_impl: str = option(
        "auto",
        "whose code computes the model: weft's own, or that of the package transformers, which "
        "knows more models; auto takes weft's if it has the model",
        group="model",
        choices=("auto", "weft", "transformers"),
    )
    language_model_only: bool = option(
        False,
        "leave out the encoder of a model that also takes pictures, videos or sounds: it then "
        "takes text alone, and needs less memory",
        group="model",
    )
    mm_processor_kwargs: str = option(
        "",
        "settings of the model's processor of pictures that replace those in its files, as "
        'JSON: {"max_pixels": 501760}, {"do_pan_and_scan": true}',
        group="model",
        elsewhere=("mm_process_config",),
    )
    weights_root: str = option(
        "",
        "folder below which POST /update_weights_from_disk and /load_lora_adapter may read; the "
        "parent of the model's folder if not given",
        group="model",
    )
    weights_cache: str = option(
        "auto",
        "folder for weights as the CPU kernels have them in memory: the next start maps them, and "
        "replicas share them; auto takes ~/.cache/weft/weights for models from 64 MB on, off none",
        group="model",
    )
    weights_cache_gb: float = option(
        20.0,
        "gigabytes that --weights-cache may take; the least recently used models are removed",
        group="model",
        low=0.01,
    )
    context_length: int = option(
        0,
        "longest prompt and completion together, in tokens; 0 takes the model's, cut to what the "
        "KV cache holds",
        group="model",
        everyday=True,
        low=0,
        elsewhere=("max_model_len", "ctx_size", "num_ctx", "max_seq_len"),
    )
    generation_config: str = option(
        "auto",
        "source of sampling parameters that a request does not give: auto takes the model's "
        "generation_config.json, none the defaults of the API; or a folder with such a file",
        group="model",
        elsewhere=("sampling_defaults",),
    )
    seed: int = option(
        0,
        "requests that have no seed get one from this and their order of arrival",
        group="model",
        everyday=True,
        elsewhere=("random_seed",),
    )
    enable_return_hidden_states: bool = option(
        False, "return hidden states to requests with return_hidden_states", group="model"
    )

    # device
    device: str = option(
        "auto", "where to run", group="device", everyday=True, choices=("auto", "cpu", "cuda")
    )
    threads: int = option(
        0,
        "CPU threads for the model; 0 takes all physical cores, which ranks and replicas share",
        group="device",
        everyday=True,
        low=0,
        high=1024,
    )
    kernels: str = option(
        "auto",
        "code that computes on a CPU: auto takes weft's kernels for the best instruction set if "
        "they are available, else torch",
        group="device",
        choices=(
            "auto",
            "torch",
            "avx512_bf16",
            "avx512_bf16_kv",
            "avx512_vnni",
            "avx512",
            "avx2_vnni",
            "avx2",
            "portable",
        ),
    )
    attention_backend: str = option(
        "auto",
        "code that computes attention, except in the CPU kernels: auto takes Triton on a GPU, "
        "else torch; module:Class is one from outside of weft",
        group="device",
        choices=("auto", "torch", *GPU_ATTENTION_BACKENDS),
        judge="weft.config.plugins:why_no_backend",
    )
    cuda_graph: bool = option(
        True,
        "capture decode steps on a GPU as graphs",
        group="device",
        elsewhere=("disable_cuda_graph", "enforce_eager"),
    )
    cuda_graph_sizes: str = option(
        "",
        "numbers of requests for which graphs are captured, such as 1,2,4; 1 to "
        "--max-running-requests in steps if not given",
        group="device",
        elsewhere=("cuda_graph_bs", "cuda_graph_max_bs", "cuda_graph_capture_sizes"),
    )
    cuda_graph_prompt: int = option(
        512,
        "also capture steps with prompts of up to this number of tokens; 0: none",
        group="device",
        low=0,
        high=8192,
    )

    # memory
    kv_tokens: int = option(
        0,
        "size of the KV cache in tokens; 0 takes it from --memory-fraction",
        group="memory",
        everyday=True,
        low=0,
        elsewhere=("max_total_tokens", "num_gpu_blocks_override"),
    )
    memory_fraction: float = option(
        0.0,
        "part of the free memory that weights and KV cache may take; 0 decides by device",
        group="memory",
        everyday=True,
        low=0.0,
        high=1.0,
        elsewhere=("mem_fraction_static", "gpu_memory_utilization"),
    )
    kv_dtype: str = option(
        "auto",
        "type of the KV cache; auto takes that of the model; int8 on a CPU only, fp8 on a GPU only",
        group="memory",
        everyday=True,
        choices=("auto", "bf16", "fp32", "int8", "fp8"),
        elsewhere=(
            "cache_type_k",
            "cache_type_v",
            "kv_cache_dtype",
        ),
    )
    page_size: int = option(
        0,
        "tokens per page of the KV cache; 0 takes 8 on a CPU, 1 on a GPU",
        group="memory",
        everyday=True,
        low=0,
        high=1024,
        elsewhere=("block_size",),
    )
    swa_full_tokens_ratio: float = option(
        0.0,
        "size of the pool of layers with sliding windows, as a part of --kv-tokens; 0 takes the "
        "size that requests of an eighth of the context need",
        group="memory",
        low=0.0,
        high=1.0,
    )
    disable_hybrid_swa_memory: bool = option(
        False,
        "keep all tokens in layers with sliding windows, too, in the same pool as for other layers",
        group="memory",
        elsewhere=("disable_hybrid_kv_cache_manager",),
    )
    max_mamba_cache_size: int = option(
        0,
        "states kept at a time, for requests and in the prefix cache, by models with layers "
        "that keep a state (LFM2, Qwen3.5, ...); 0: by --mamba-full-memory-ratio",
        group="memory",
        low=0,
    )
    mamba_full_memory_ratio: float = option(
        0.0,
        "memory for states, as a part of that for KV; 0 takes 0.5, and less if states are small",
        group="memory",
        low=0.0,
    )
    prefix_cache: bool = option(
        True,
        "keep and share the KV of equal prefixes",
        group="memory",
        everyday=True,
        elsewhere=("disable_radix_cache", "enable_prefix_caching", "no_enable_prefix_caching"),
    )
    page_copies: bool = option(
        True,
        "copy the tokens of a cached page with which a prompt of the same key goes on before both "
        "differ, instead of computing them",
        group="memory",
    )


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """KV of cached prefixes in a folder, where it outlives the process, and in host memory."""

    cache_dir: str = option(
        "",
        "folder in which KV of prompts is kept, and found again after a restart; it contains "
        "what users have written, so only this user may read it",
        group="cache",
        everyday=True,
        elsewhere=(
            *("hicache_storage_backend", "slot_save_path", "local_disk"),
            "disaggregation_decode_enable_offload_kvcache",
        ),
    )
    cache_disk_gb: float = option(
        20.0,
        "gigabytes that --cache-dir may take; the least recently used blocks are removed",
        group="cache",
        low=0.01,
        elsewhere=(*("cache_ram", "max_local_disk_size"),),
    )
    cache_host_gb: float = option(
        0.0,
        "gigabytes of the host's memory for KV of prompts that does not fit into a GPU's pool; "
        "0: by --cache-host-ratio",
        group="cache",
        low=0.0,
        elsewhere=(
            *("enable_hierarchical_cache", "kv_offloading_size", "kv_offloading_backend"),
            *("local_cpu", "max_local_cpu_size", "swap_space"),
            *("hicache_mem_layout", "hicache_io_backend", "hicache_host_memory_mode"),
        ),
        aliases=("hicache_size",),
    )
    cache_host_ratio: float = option(
        0.0,
        "the same as a multiple of the pool; 0: none of the host's memory is used",
        group="cache",
        low=0.0,
        high=1_000.0,
        aliases=("hicache_ratio",),
    )
    cache_write: str = option(
        "selective",
        "which prompts are written: selective, those used twice, turns of sessions, and the "
        "others when the server ends; through, those of every request; back, all when the "
        "server ends; off, none",
        group="cache",
        choices=("selective", "through", "back", "off"),
        aliases=("hicache_write_policy",),
        words=(
            ("write_through", "through"),
            ("write_through_selective", "selective"),
            ("write_back", "back"),
        ),
    )
    cache_wait_ms: float = option(
        2000.0,
        "longest time that a request waits for its KV to be read; 0: nothing is read",
        group="cache",
        low=0.0,
        high=600_000.0,
        aliases=("hicache_storage_prefetch_policy",),
        words=(
            ("best_effort", "1"),
            ("timeout", "2000"),
            ("wait_complete", "600000"),
        ),
    )
    cache_block: int = option(
        0,
        "tokens of a block in --cache-dir, whole pages; 0 takes those that fit into 64, at least "
        "one",
        group="cache",
        low=0,
        high=4096,
        elsewhere=("lmcache_chunk_size",),
    )
    kv_events_config: str = option(
        "",
        "tell routers by ZeroMQ what the prefix cache holds, as vLLM and SGLang do, in JSON: "
        "enable_kv_cache_events, publisher (zmq or null), endpoint, replay_endpoint, buffer_steps, "
        "hwm, max_queue_size, topic; also bind, encoding (map or array), data_parallel_rank",
        group="cache",
    )


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """Several processes that together hold one model."""

    tp_size: int = option(
        1,
        "processes that hold the weights together and compute each step together (tensor "
        "parallel), on a CPU; --threads counts those of each process",
        group="parallel",
        low=1,
        high=64,
        elsewhere=("tp", "tensor_parallel_size"),
    )
    pp_size: int = option(
        1,
        "processes that have some of the layers each, and compute each step one after another "
        "(pipeline parallel), on a CPU; --threads counts those of each process",
        group="parallel",
        low=1,
        high=64,
        elsewhere=("pp", "pipeline_parallel_size"),
    )
    pp_max_micro_batch_size: int = option(
        0,
        "requests of a step that only decodes, if several stages work at once; 0: an equal "
        "share of the running requests",
        group="parallel",
        low=0,
        elsewhere=("pp_async_batch_depth",),
    )
    enable_dp_attention: bool = option(
        False,
        "the engines of --dp-size divide the experts of the model, and run their steps "
        "together; each has all other weights",
        group="parallel",
    )
    ep_size: int = option(
        1,
        "the same number as --dp-size, with --enable-dp-attention; 1: the same",
        group="parallel",
        low=1,
        high=64,
        elsewhere=("ep", "expert_parallel_size", "enable_expert_parallel"),
    )
    dist_backend: str = option(
        "auto",
        "how processes add up their results: shm by shared memory, tcp by weft's own sockets, "
        "gloo by the library of that name; auto takes shm if weft's kernels compute on one "
        "machine, else tcp",
        group="parallel",
        choices=("auto", "shm", "tcp", "gloo"),
    )
    dist_timeout: float = option(
        600.0,
        "seconds after which a process that waits for another one gives up, at the start and in a "
        "step",
        group="parallel",
        low=1.0,
        elsewhere=("distributed_timeout_seconds",),
    )
    nnodes: int = option(
        1,
        "machines, called nodes, whose processes hold the model together; each has as many of the "
        "--tp-size",
        group="parallel",
        low=1,
        high=64,
    )
    node_rank: int = option(
        0,
        "number of this node: node 0 serves, and the others wait for it and follow",
        group="parallel",
        low=0,
        high=63,
    )
    dist_init_addr: str = option(
        "",
        "HOST:PORT on which node 0 waits for the others; any but loopback needs --dist-secret",
        group="parallel",
        elsewhere=("nccl_init_addr", "master_addr", "master_port", "data_parallel_address"),
    )
    dist_secret: str = option(
        "",
        "secret that all nodes need (better: WEFT_DIST_SECRET); without it all nodes must be on "
        "one machine",
        group="parallel",
    )


@dataclass(frozen=True, kw_only=True)
class HandoffOptions:
    """One server computes prompts, another server generates their completions."""

    disaggregation_mode: str = option(
        "none",
        "what this server does for requests with a bootstrap_room: prefill computes their "
        "prompts and lends the KV, decode takes it and generates; none serves whole requests",
        group="handoff",
        choices=("none", "prefill", "decode"),
        elsewhere=("kv_role", "kv_connector"),
        words=(("null", "none"),),
    )
    disaggregation_bootstrap_port: int = option(
        8998,
        "port on which a prefill server lends KV, and where a decode server asks for it if a "
        "request names no port",
        group="handoff",
        low=0,
        high=65535,
        elsewhere=("kv_port",),
    )
    handoff_host: str = option(
        "127.0.0.1",
        "address on which a prefill server lends KV; any but loopback needs --handoff-secret",
        group="handoff",
        elsewhere=("disaggregation_ib_device", "kv_ip"),
    )
    handoff_secret: str = option(
        "",
        "secret that both servers need (better: WEFT_HANDOFF_SECRET); without it KV is handed "
        "over on this machine only, and not authenticated",
        group="handoff",
    )
    handoff_lenders: str = option(
        "",
        "prefill servers that requests may name to a decode server, separated by commas: HOST "
        "(at --disaggregation-bootstrap-port), HOST:PORT, HOST:* (any port), *.NAME, 10.0.0.0/8; "
        "without it, any that has the secret, and without a secret any on this machine",
        group="handoff",
        judge="weft.config.lenders:why_no_lenders",
    )
    handoff_lease_s: float = option(
        30.0,
        "time for which a prefill server keeps KV that no server asks for",
        group="handoff",
        low=0.1,
        high=3600.0,
    )
    handoff_wait_s: float = option(
        60.0,
        "longest time that a request waits on a decode server for all of its KV",
        group="handoff",
        low=0.0,
        high=3600.0,
    )
    handoff_fallback: str = option(
        "compute",
        "what a decode server does with a request whose KV does not arrive: compute its prompt, "
        "or fail",
        group="handoff",
        choices=("compute", "fail"),
        elsewhere=("kv_load_failure_policy",),
    )
    kv_transfer_config: str = option(
        "",
        "--disaggregation-mode, --handoff-host, --disaggregation-bootstrap-port and "
        "--handoff-fallback as vLLM writes them, in JSON: kv_role (kv_producer or kv_consumer), "
        "kv_ip, kv_port, kv_load_failure_policy (recompute or fail)",
        group="handoff",
    )


# A dataclass takes the fields of its last base first; the help has this order.
@dataclass(frozen=True, kw_only=True)
class EngineConfig(SchedulingOptions, ParallelOptions, HandoffOptions, CacheOptions, ModelOptions):
    """All settings of an engine."""

    # the loop
    overlap: bool | None = option(
        None,
        "plan the next step while the device runs this one; on with a GPU or --pp-size, off "
        "with a CPU, whose cores do both, and with --draft-model",
        group="scheduling",
        everyday=True,
        elsewhere=("disable_overlap_schedule", "async_scheduling"),
    )

    # profile
    profile_dir: str = option(
        "",
        "folder for the traces of POST /start_profile and the files of POST "
        "/dump_expert_distribution_record; without it they are only in answers",
        group="profile",
    )

    # sessions
    max_sessions: int = option(256, "open sessions; no more are opened", group="sessions", low=0)
    max_sessions_per_key: int = option(
        0,
        "open sessions of one API key; 0: a quarter of all if there are several keys, else all",
        group="sessions",
        low=0,
    )
    max_session_turns: int = option(
        1_000, "requests of a session; more are refused", group="sessions", low=1
    )
    max_session_tokens: int = option(
        131_072,
        "tokens of a session, in all of its turns together; what would make more is refused",
        group="sessions",
        low=1,
    )
    session_timeout_s: float = option(
        600.0,
        "time without a request after which a session is closed; 0: never",
        group="sessions",
        low=0.0,
    )

    # structured output
    grammar_backend: str = option(
        "llguidance",
        "library for structured output; none refuses such requests",
        group="grammar",
        choices=("llguidance", "xgrammar", "none"),
    )
    grammar_timeout_s: float = option(
        5.0,
        "processor time to compile a grammar, after which it is refused",
        group="grammar",
        low=0.1,
        high=600.0,
    )
    grammar_cache_mb: int = option(64, "memory for compiled grammars", group="grammar", low=0)
    grammar_jump: bool = option(
        True,
        "tokens that a grammar determines are computed in one step, without sampling",
        group="grammar",
    )

    # adapters
    enable_lora: bool = option(
        False,
        "allow adapters (LoRA), which requests may name; on with --lora-paths and --lora-dir",
        group="adapters",
    )
    lora_paths: str = option(
        "",
        "adapters to load before the server is ready: NAME=FOLDER, or JSON with lora_name, "
        "lora_path and pinned; several are separated by commas or are several words",
        group="adapters",
        everyday=True,
        several=True,
        elsewhere=("lora",),
        aliases=("lora_modules",),
    )
    lora_dir: str = option(
        "",
        "folder that contains folders of adapters: each is loaded when a request first names it",
        group="adapters",
        elsewhere=("lora_resolver_cache_dir",),
    )
    max_lora_rank: int = option(
        64,
        "largest rank that an adapter may have; memory is laid out for it",
        group="adapters",
        low=1,
        high=512,
    )
    lora_target_modules: str = option(
        "all",
        "modules that adapters may change, q_proj,v_proj; all: those that the model has, but not "
        "its experts, for which all,experts lays out memory",
        group="adapters",
    )
    lora_full_modules: str = option(
        "",
        "modules that adapters may replace by matrices of their own, lm_head,embed_tokens; memory "
        "is laid out for them",
        group="adapters",
    )

    # logit processors
    logit_processors: str = option(
        "",
        "files with logit processors that requests may name: PATH.py or PATH.py:Name, separated "
        "by commas",
        group="processors",
        elsewhere=("logits_processors", "enable_custom_logit_processor"),
    )

    # parts from outside
    plugins: str = option(
        "",
        "parts from outside of weft, KIND=module:Name, separated by commas; the kinds are control, "
        "routes, passes, kv_groups, families and tiers (docs/contribute/outside.md)",
        group="processors",
        judge="weft.config.plugins:why_no_plugins",
    )

    # journal
    journal: str = option(
        "",
        "file in which every decision of the scheduler is recorded, for weft replay",
        group="journal",
    )
    journal_max_mb: int = option(
        256,
        "megabytes after which the journal is renamed to FILE.1, and a new file begins",
        group="journal",
        low=1,
    )
    journal_state_mb: int = option(
        32,
        "megabytes after which the state of the engine is recorded again, so that weft replay can "
        "begin there; 0: only at the beginning of a file",
        group="journal",
        low=0,
    )

    @property
    def keeps_runs(self) -> bool:
        """Whether steps with drafts are planned before the drafts of the previous step are
        compared."""
        return bool(self.overlap) and self.speculative != OFF
