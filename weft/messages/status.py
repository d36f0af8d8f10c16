"""Messages between engine and front about the engine itself, without an answer: that it is ready,
lives, has failed or must end, and its numbers."""

from __future__ import annotations

import msgspec


class Stats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="stats"):
    """State of the engine: gauges, and counters (`total_*`) since its start."""

    num_running: int = 0
    max_running_requests: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0  # prompt tokens of waiting requests that never ran
    num_grammar_queue: int = 0  # waiting requests whose grammar is being compiled
    kv_tokens: int = 0  # size of the KV pool
    kv_used: int = 0  # owned by requests, or locked by them in the prefix cache
    kv_evictable: int = 0  # cached and free to evict
    kv_held: int = 0  # cached, kept for sessions until memory is needed
    kv_window_tokens: int = 0  # size of the pool of layers with windows, where they have one
    kv_window_used: int = 0  # held by requests
    kv_window_evictable: int = 0  # cached and free to evict
    state_slots: int = 0  # of layers that keep a state, where a model has some
    state_slots_used: int = 0  # owned by requests
    state_slots_evictable: int = 0  # snapshots that the prefix cache keeps
    num_pins: int = 0  # of prompts that clients pin
    pinned_tokens: int = 0  # tokens of these pins
    total_pins_refused: int = 0  # because they did not fit
    total_pins_given_way: int = 0  # evicted so that a request could run at all
    disk_blocks: int = 0  # of KV that are stored, and may be found (`--cache-dir`)
    disk_bytes: int = 0  # of all files there
    total_disk_hit_tokens: int = 0  # of prompts, that were read for their request
    total_disk_read_bytes: int = 0
    total_disk_written_bytes: int = 0
    total_disk_faults: int = 0  # blocks that could not be read or written, or were damaged
    host_blocks: int = 0  # of KV in the memory of the host (`--cache-host-gb`)
    host_bytes: int = 0
    total_host_hit_tokens: int = 0  # of prompts, that came from there for their request
    total_host_read_bytes: int = 0
    total_host_written_bytes: int = 0
    # Of a server that computes prompts for others: requests whose prompt is being computed, and
    # those whose KV is lent;
    num_handoff_bootstrap: int = 0
    num_handoff_inflight: int = 0
    kv_lent: int = 0  # tokens
    # of one that continues them: prompts for whose KV it waits, and those whose KV is coming.
    num_handoff_prealloc: int = 0
    num_handoff_transfer: int = 0
    total_handoff_tokens: int = 0  # that were lent, or have come
    total_handoff_bytes: int = 0
    total_handoff_faults: int = 0  # connections that were refused or broke off, damaged pages
    total_handoff_expired: int = 0  # leases that ended before they were given back
    # Requests whose KV did not come, by the reason.
    total_handoff_unreachable: int = 0
    total_handoff_refused: int = 0
    total_handoff_lost: int = 0
    total_handoff_damaged: int = 0
    total_handoff_late: int = 0
    num_sessions: int = 0  # that are open
    num_adapters: int = 0  # that are loaded
    adapter_slots: int = 0  # adapters that may run together; 0: none may be loaded
    adapter_slots_used: int = 0  # adapters that run
    kv_quarantined: int = 0  # out of circulation, because their owner was not clear
    new_token_ratio: float = 0.0
    batch_is_full: bool = False
    total_steps: int = 0
    total_prefill_steps: int = 0
    total_split_steps: int = 0  # that computed some layers of prompts
    total_prompt_tokens: int = 0
    total_cached_tokens: int = 0
    total_prefilled_tokens: int = 0
    total_generated_tokens: int = 0
    total_retractions: int = 0
    total_evicted_tokens: int = 0
    total_evicted_window_tokens: int = 0
    total_evicted_states: int = 0
    total_requests: int = 0
    total_aborted: int = 0
    total_queue_full: int = 0  # requests refused because the queue was full
    # Admissions compared with the choice of a shadow policy; those that it would have made later,
    # and requests that it would have admitted earlier.
    total_shadow_admissions: int = 0
    total_shadow_later: int = 0
    total_shadow_earlier: int = 0
    total_dropped_messages: int = 0  # that could not be read
    total_unknown_messages: int = 0  # that have no handler
    total_failed_messages: int = 0  # whose handling raised
    total_duplicate_requests: int = 0  # with the number of an open one
    total_grammars: int = 0  # that requests have asked for
    total_grammar_hits: int = 0  # of these, found in the cache
    total_grammar_shared: int = 0  # that waited for a compilation begun for another one
    total_grammar_refused: int = 0  # and invalid, or too much to compile
    total_forced_tokens: int = 0  # generated tokens that a grammar left no choice about
    # Guessed tokens that were computed, by where they came from,
    total_drafts_prediction: int = 0
    total_drafts_tree: int = 0
    total_drafts_draft: int = 0
    total_drafts_ngram: int = 0
    # and those of them that came out the same.
    total_accepted_prediction: int = 0
    total_accepted_tree: int = 0
    total_accepted_draft: int = 0
    total_accepted_ngram: int = 0
    total_draft_runs: int = 0  # drafts of several tokens count once
    # Pictures, tiles, videos and sounds that are there encoded: how many, their tokens, and the
    # memory of their vectors.
    encoder_items: int = 0
    encoder_tokens: int = 0
    encoder_bytes: int = 0
    total_encoder_runs: int = 0  # for one picture, tile, video or sound each
    total_encoded_tokens: int = 0  # that these made
    total_encoder_s: float = 0.0  # that the encoder has worked
    total_encoder_hits: int = 0  # that were there encoded when a prompt needed them
    total_encoder_misses: int = 0  # that were encoded for a prompt that needed them
    total_faults: int = 0  # found in the books of KV memory
    busy_s: float = 0.0  # time with work


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """The engine's process is alive.

    A thread of its own sends it twice a second, also while a step runs.
    """

    step_s: float  # how long the current step has run; 0 between steps
    idle_s: float  # how long the process has used (nearly) no processor time


class Pools(msgspec.Struct, frozen=True, kw_only=True):
    """The output of a model that computes vectors or scores and generates nothing."""

    task: str  # embed or classify
    size: int  # numbers of a vector, or labels
    labels: list[str] = []
    num_token_types: int = 0  # kinds of segments that it tells apart


class EngineReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine is ready: it has generated a token on the path that it will serve with."""

    model_summary: str  # "Qwen3-0.6B (0.6 B, bfloat16)"
    vocab_size: int
    context_length: int  # prompt and completion together
    max_prompt_tokens: int
    kv_tokens: int
    page_size: int
    max_running_requests: int = 0  # rows; 0: not known
    startup: list[tuple[str, str, float]]  # phase, what it did, seconds
    pools: Pools | None = None  # None: it generates
    hidden_size: int = 0  # of hidden states and input embeddings; 0: it has neither
    gives_hidden_states: bool = False  # to requests that ask for them
    dtype: str = "float32"  # in which the model computes: input embeddings become that
    has_experts: bool = False  # in some of its layers


class EngineFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The engine cannot start, or stops: the reason in one paragraph."""

    message: str
    user_error: bool = False  # the user can mend it: exit status 2, no traceback


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag="shutdown"):
    """Finish open requests for up to `drain_s`, abort the rest, and end the engine process."""

    drain_s: float = 0.0


class UnreadableMessages(msgspec.Struct, frozen=True, kw_only=True, tag="dropped"):
    """Messages have come that could not be read. The engine's own intake sends it, to count
    them."""

    num: int
