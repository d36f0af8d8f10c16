"""The options of the scheduler: declared once, here, and used in `weft/scheduler/`.

    SchedulingOptions ─┬─▶ EngineConfig        as users write them; `resolve` replaces zeros
                       └─▶ SchedulerSettings   the same fields in the scheduler, with values

A new option is a field here and the line of the scheduler that reads it
(docs/contribute/scheduler-option.md). `weft sim` has it too; a `changeable` option can be changed
while the engine runs. Knows nothing of the scheduler's use of a value.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from weft.config.options import option
from weft.json_types import JsonObject


@dataclass(frozen=True, kw_only=True)
class SchedulingOptions:
    schedule_policy: str = option(
        "fcfs",
        "order of waiting requests: a policy, or several from the coarsest to the finest, as in "
        "'priority > fair(key) > lpm'",
        group="scheduling",
        changeable=True,
        everyday=True,
        choices="weft.scheduler.policies:names",
        judge="weft.scheduler.policies.composed.build:why_not",
        elsewhere=("scheduling_policy",),
    )
    shadow_policy: str = option(
        "",
        "a second policy, which decides on the same inputs without effect: weft counts what it "
        "would have changed, and shows it for each request",
        group="scheduling",
        changeable=True,
        judge="weft.scheduler.policies.composed.build:why_no_shadow",
    )
    schedule_conservativeness: float = option(
        1.0,
        "above 1 admits fewer requests, below 1 more (and retracts more often)",
        group="scheduling",
        changeable=True,
        low=0.0,
        high=10.0,
        elsewhere=("num_reserved_decode_tokens",),
    )
    max_running_requests: int = option(
        0,
        "requests that decode together; 0 decides by KV size",
        group="scheduling",
        changeable=True,
        everyday=True,
        low=0,
        elsewhere=("max_num_seqs", "parallel"),
    )
    max_queued_requests: int = option(
        4096,
        "waiting online requests, and as many of the background; more are refused with 503",
        group="scheduling",
        changeable=True,
        everyday=True,
        low=0,
    )
    max_queued_tokens: int = option(
        0,
        "prompt tokens of waiting requests; more are refused with 503; 0: no limit",
        group="scheduling",
        changeable=True,
        low=0,
        elsewhere=("max_num_queued_tokens",),
    )
    max_prefill_tokens: int = option(
        16384, "prompt tokens in one step", group="scheduling", changeable=True, low=1
    )
    chunked_prefill_size: int = option(
        0,
        "longest piece of a prompt in one step, in tokens; 0 decides by device, -1 never cuts "
        "unless the time of steps is limited",
        group="scheduling",
        changeable=True,
        everyday=True,
        low=-1,
        elsewhere=(
            "batch_size",
            "ubatch_size",
            "max_num_batched_tokens",
            "long_prefill_token_threshold",
        ),
    )
    max_encoder_tokens: int = option(
        0,
        "tokens of pictures, videos and sounds that are encoded in one step; an item with more "
        "is encoded alone; 0: as many as in a chunk",
        group="scheduling",
        low=0,
        elsewhere=("max_num_encoder_input_tokens",),
    )
    encoder_cache_tokens: int = option(
        8192,
        "tokens of pictures, videos and sounds that stay encoded, for other requests with the same "
        "ones",
        group="scheduling",
        low=0,
        elsewhere=("encoder_cache_size",),
    )
    mixed_chunk: bool = option(
        True,
        "let running requests decode in the same step as a prefill, so that streams continue "
        "while prompts are computed",
        group="scheduling",
        changeable=True,
        everyday=True,
        elsewhere=("enable_mixed_chunk",),
    )
    split_prefill_layers: int = option(
        0,
        "layers of a prefill between two decode steps of running requests; 0: all, in one step",
        group="scheduling",
        low=0,
    )
    max_step_ms: float = option(
        0.0,
        "bound on the time between two tokens of a running request: prompts and drafts are cut to "
        "fit; 0: none",
        group="scheduling",
        everyday=True,
        low=0.0,
        elsewhere=("prefill_decode_interval",),
    )
    max_slowdown: float = option(
        0.0,
        "how many times as long steps of running requests may take for prompts that arrive "
        "later, which are cut to fit; 0 decides, -1: no limit",
        group="scheduling",
        everyday=True,
        low=-1.0,
    )
    max_queue_s: float = option(
        0.0,
        "longest wait of a request for its turn, after which it ends with 503, except in the "
        "background; 0: no limit",
        group="scheduling",
        low=0.0,
        elsewhere=("request_timeout",),
    )
    max_run_s: float = option(
        0.0,
        "longest run of a request after that, after which it ends with 408, except in the "
        "background; 0: no limit",
        group="scheduling",
        low=0.0,
    )
    aging_s: float = option(
        30.0,
        "a request that has waited for this time gets one turn in four, whatever the policy; 0: "
        "never",
        group="scheduling",
        low=0.0,
    )
    low_priority_first: bool = option(
        False,
        "for the policy priority: lower values go first",
        group="scheduling",
        elsewhere=("schedule_low_priority_values_first",),
    )
    preemption_threshold: int = option(
        10,
        "for the policy priority: lead above which a waiting request preempts a running one",
        group="scheduling",
        low=0,
        elsewhere=("priority_scheduling_preemption_threshold",),
    )
    background_policy: str = option(
        "fair > dfs-weight",
        "order of waiting background requests, which go after all others",
        group="scheduling",
        judge="weft.scheduler.policies.composed.build:why_not",
    )
    background_slowdown: float = option(
        2.75,
        "how many times as long steps of other requests may take for background requests as they "
        "would on average without them",
        group="scheduling",
        low=1.0,
    )
    background_step_ms: float = option(
        50.0,
        "longest step with prompts of background requests while no other request runs, so that one "
        "that arrives waits no longer; 0: as long as any",
        group="scheduling",
        low=0.0,
    )
    speculative: str = option(
        "auto",
        "sources of guesses of the next tokens, which are computed together and compared: "
        "prediction, tree, draft, mtp, eagle3, ngram, or several with commas; off: none; auto "
        "decides by device. Answers stay the same",
        group="scheduling",
        everyday=True,
        aliases=("speculative_algorithm",),
    )
    max_draft: int = option(
        8,
        "most guessed tokens of a request in one step",
        group="scheduling",
        low=1,
        high=64,
        elsewhere=(
            *("draft", "draft_n", "draft_min"),
            *("speculative_num_draft_tokens", "speculative_eagle_topk"),
        ),
        aliases=("draft_max", "num_speculative_tokens", "speculative_num_steps"),
    )
    max_loras_per_batch: int = option(
        8,
        "adapters that run together; the model without one counts as one, if a request runs on it",
        group="adapters",
        low=1,
        high=256,
        elsewhere=("max_loras",),
    )
    max_loaded_loras: int = option(
        0,
        "adapters in memory; a new one replaces the least recently used one; 0: as many as may "
        "run together, or as --lora-paths names",
        group="adapters",
        low=0,
        high=4096,
        elsewhere=("max_cpu_loras",),
    )
    ngram_max: int = option(
        4,
        "for --speculative ngram: most tokens at the end of a text that are searched in it",
        group="scheduling",
        low=1,
        high=32,
        elsewhere=("prompt_lookup_max", "speculative_ngram_max_match_window_size"),
    )
    ngram_min: int = option(
        2,
        "for --speculative ngram: fewest such tokens",
        group="scheduling",
        low=1,
        high=32,
        elsewhere=("prompt_lookup_min", "speculative_ngram_min_match_window_size"),
    )
    max_pinned: float = option(
        0.25,
        "part of the KV pool that pinned prompts may hold (cache_control, POST /cache/pin); 0: "
        "nothing is pinned",
        group="cache",
        low=0.0,
        high=0.9,
    )
    tool_pause_s: float = option(
        120.0,
        "longest time for which the KV of a chat is kept that has called tools, as a part of "
        "--max-pinned; how long follows from earlier pauses; 0: not at all",
        group="cache",
        low=0.0,
        high=86_400.0,
    )
    tenant_cache: str = option(
        "",
        "part of --max-pinned that the pins of a tenant may hold, alice=0.3,bob=0.1; others may "
        "have all of it",
        group="cache",
    )
    tenant_weights: str = option(
        "",
        "for the policy fair: shares of tenants, alice=2,bob=0.5; others have 1",
        group="scheduling",
    )


def scheduling_values(config: SchedulingOptions) -> JsonObject:
    """The scheduling options in `config`, by name, for another class with these options."""
    return {item.name: getattr(config, item.name) for item in fields(SchedulingOptions)}
