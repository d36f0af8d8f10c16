"""Messages between engine and front about the engine itself, without a reply: it is ready, is
alive, has failed, must end, and its numbers."""

from __future__ import annotations

import msgspec


class Stats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="stats"):
    """State of the engine: gauges, and counters (`total_*`) since its start."""

    num_running: int = 0
    max_running_requests: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0  # prompt tokens of waiting requests that never ran
    num_background_running: int = 0  # of those that run, background requests
    num_background_waiting: int = 0
    num_grammar_queue: int = 0  # waiting requests whose grammar is being compiled
    kv_tokens: int = 0  # size of the KV pool
    kv_used: int = 0  # owned by requests, or locked by them in the prefix cache
    kv_evictable: int = 0  # cached and free to evict
    kv_held: int = 0  # cached, kept for sessions until memory is needed
    kv_window_tokens: int = 0  # size of the separate pool of sliding window layers; 0: none
    kv_window_used: int = 0  # owned by requests
    kv_window_evictable: int = 0  # cached and free to evict
    state_slots: int = 0  # slots for the states of layers with a state; 0: the model has none
    state_slots_used: int = 0  # owned by requests
    state_slots_evictable: int = 0  # snapshots in the prefix cache
    num_pins: int = 0  # pins of clients on prompts
    pinned_tokens: int = 0  # tokens of these pins
    total_pins_refused: int = 0  # because they did not fit
    total_pins_given_way: int = 0  # evicted because a request could not run otherwise
    disk_blocks: int = 0  # stored blocks of KV that this engine can use (`--cache-dir`)
    disk_bytes: int = 0  # size of all files there
    total_disk_hit_tokens: int = 0  # prompt tokens that were read from there
    total_disk_read_bytes: int = 0
    total_disk_written_bytes: int = 0
    total_disk_faults: int = 0  # blocks that could not be read or written, or were damaged
    host_blocks: int = 0  # blocks of KV in the memory of the host (`--cache-host-gb`)
    host_bytes: int = 0
    total_host_hit_tokens: int = 0  # prompt tokens that were read from there
    total_host_read_bytes: int = 0
    total_host_written_bytes: int = 0
    # Of a prefill server: requests whose prompt is being computed, and requests whose KV is lent.
    num_handoff_bootstrap: int = 0
    num_handoff_inflight: int = 0
    kv_lent: int = 0  # tokens
    # Of a decode server: prompts that wait for their KV, and prompts whose KV is being received.
    num_handoff_prealloc: int = 0
    num_handoff_transfer: int = 0
    total_handoff_tokens: int = 0  # tokens that were lent, or received
    total_handoff_bytes: int = 0
    total_handoff_faults: int = 0  # refused or broken connections, and damaged pages
    total_handoff_expired: int = 0  # leases that expired before they were given back
    # Requests whose KV was not received, by the reason.
    total_handoff_unreachable: int = 0
    total_handoff_refused: int = 0
    total_handoff_lost: int = 0
    total_handoff_damaged: int = 0
    total_handoff_late: int = 0
    num_sessions: int = 0  # open sessions
    num_adapters: int = 0  # loaded adapters
    adapter_slots: int = 0  # adapters that may run together; 0: none may be loaded
    adapter_slots_used: int = 0  # adapters that run
    kv_quarantined: int = 0  # not used any more, because their owner was not clear
    new_token_ratio: float = 0.0
    batch_is_full: bool = False
    total_steps: int = 0
    total_prefill_steps: int = 0
    total_split_steps: int = 0  # steps that computed only some layers of prompts
    total_prompt_tokens: int = 0
    total_cached_tokens: int = 0
    total_prefilled_tokens: int = 0
    total_generated_tokens: int = 0
    # Of background requests that have ended: their number, prompt tokens that were not cached, and
    # generated ones.
    total_background: int = 0
    total_background_prompt_tokens: int = 0
    total_background_generated_tokens: int = 0
    total_retractions: int = 0
    total_evicted_tokens: int = 0
    total_evicted_window_tokens: int = 0
    total_evicted_states: int = 0
    total_requests: int = 0
    total_aborted: int = 0
    total_queue_full: int = 0  # requests refused because the queue was full
    # Admissions that were compared with a shadow policy; admissions that it would have made later;
    # requests that it would have admitted earlier.
    total_shadow_admissions: int = 0
    total_shadow_later: int = 0
    total_shadow_earlier: int = 0
    total_dropped_messages: int = 0  # messages that could not be decoded
    total_unknown_messages: int = 0  # messages without a handler
    total_failed_messages: int = 0  # messages whose handler raised an exception
    total_duplicate_requests: int = 0  # requests with the number of an open one
    total_grammars: int = 0  # grammars of requests
    total_grammar_hits: int = 0  # of these, found in the cache
    total_grammar_shared: int = 0  # of these, those that waited for another request's compilation
    total_grammar_refused: int = 0  # of these, invalid or too large to compile
    total_forced_tokens: int = 0  # generated tokens for which the grammar allowed only one choice
    # Draft tokens that were verified, by their source,
    total_drafts_prediction: int = 0
    total_drafts_tree: int = 0
    total_drafts_draft: int = 0
    total_drafts_mtp: int = 0
    total_drafts_eagle3: int = 0
    total_drafts_ngram: int = 0
    # and the accepted ones of these.
    total_accepted_prediction: int = 0
    total_accepted_tree: int = 0
    total_accepted_draft: int = 0
    total_accepted_mtp: int = 0
    total_accepted_eagle3: int = 0
    total_accepted_ngram: int = 0
    total_draft_runs: int = 0  # drafts; one of several tokens counts once
    # The cache of the encoder: number of pictures, tiles, videos and sounds, their tokens, and the
    # bytes of their vectors.
    encoder_items: int = 0
    encoder_tokens: int = 0
    encoder_bytes: int = 0
    total_encoder_runs: int = 0  # one for each encoded picture, tile, video or sound
    total_encoded_tokens: int = 0  # tokens of these
    total_encoder_s: float = 0.0  # time of the encoder, in seconds
    total_encoder_hits: int = 0  # items in that cache when a prompt needed them
    total_encoder_misses: int = 0  # items that were encoded when a prompt needed them
    total_faults: int = 0  # faults that audits of KV memory found
    busy_s: float = 0.0  # time with work


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """The engine's process is alive.

    A separate thread sends it twice per second, also during a step.
    """

    step_s: float  # duration of the current step so far; 0 between steps
    # Time for which the engine has used (nearly) no processor time, in this step if one runs. Time
    # in which it waited for a processor does not count.
    idle_s: float


class Pools(msgspec.Struct, frozen=True, kw_only=True):
    """The output of a model that computes vectors or scores, and does not generate."""

    task: str  # embed or classify
    size: int  # length of a vector, or number of labels
    labels: list[str] = []
    num_token_types: int = 0  # number of segment kinds that the model distinguishes
    # vector; tokens: a vector for each token; sparse: a number for each token of the vocabulary
    form: str = "vector"
    markers: tuple[str, str] = ("", "")  # tokens of queries and of documents, of that form


class EngineReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine is ready: it has generated a token on the path that it will serve with."""

    model_summary: str  # "Qwen3-0.6B (0.6 B, bfloat16)"
    vocab_size: int
    context_length: int  # prompt and completion together
    max_prompt_tokens: int
    kv_tokens: int
    page_size: int
    max_running_requests: int = 0  # rows; 0: not known
    step_tokens: int = 0  # of prompts in one step; 0: not known
    startup: list[tuple[str, str, float]]  # phase, description, seconds
    pools: Pools | None = None  # None: the model generates
    hidden_size: int = 0  # of hidden states and input embeddings; 0: they are not supported
    gives_hidden_states: bool = False  # requests may ask for hidden states
    dtype: str = "float32"  # of the model; input embeddings are converted to it
    has_experts: bool = False  # some layers have experts
    passes: tuple[str, ...] = ()  # around the computation of each step, the outermost first


class EngineFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The engine cannot start, or has to stop."""

    message: str  # the reason, in one paragraph
    user_error: bool = False  # the user can correct it: exit status 2, no traceback


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag="shutdown"):
    """Finish open requests for up to `drain_s`, abort the rest, and end the engine process."""

    drain_s: float = 0.0


class UnreadableMessages(msgspec.Struct, frozen=True, kw_only=True, tag="dropped"):
    """Messages arrived that could not be decoded. The engine's own intake sends it, to count
    them."""

    num: int
