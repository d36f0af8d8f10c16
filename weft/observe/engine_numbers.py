"""The engine's latest numbers: as metrics, and as a status line in the server's log.

The engine counts its own work and sends snapshots, the fields of `Stats`. While it has work, a log
line reports at intervals the running and waiting requests, the speed and the memory use. This
module knows nothing of requests.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weft.config.handoff import REASONS
from weft.observe.log import EventLog

PREFIX = "weft:"
LINE_INTERVAL_S = 10.0  # between two status lines
RATE_INTERVAL_S = 0.5  # shortest time over which a rate is measured

log = EventLog("status")

_GAUGES = {  # name: (field of the engine's snapshot, help)
    "num_running_reqs": ("num_running", "Requests in the running batch."),
    "num_queue_reqs": ("num_waiting", "Requests that wait for admission."),
    "num_background_running_reqs": (
        "num_background_running",
        "Requests with a row that get what others leave.",
    ),
    "num_background_queue_reqs": (
        "num_background_waiting",
        "Requests that wait for what others leave.",
    ),
    "num_used_tokens": ("kv_used", "KV tokens held by requests."),
    "kv_evictable_tokens": ("kv_evictable", "KV tokens cached and free to evict."),
    "kv_held_tokens": ("kv_held", "KV tokens cached for sessions until memory is needed."),
    "kv_quarantined_tokens": (
        "kv_quarantined",
        "KV tokens out of circulation after a fault in the books.",
    ),
    "max_total_num_tokens": ("kv_tokens", "Size of the KV pool in tokens."),
    "max_window_num_tokens": (
        "kv_window_tokens",
        "Size of the KV pool of layers with sliding windows, in tokens; 0: they have none.",
    ),
    "num_used_window_tokens": (
        "kv_window_used",
        "KV tokens of layers with sliding windows held by requests.",
    ),
    "kv_evictable_window_tokens": (
        "kv_window_evictable",
        "KV tokens of layers with sliding windows cached and free to evict.",
    ),
    "max_state_slots": (
        "state_slots",
        "States that can be kept of layers with a state; 0: there are no such layers.",
    ),
    "num_used_state_slots": ("state_slots_used", "States of running requests."),
    "evictable_state_slots": (
        "state_slots_evictable",
        "States that the prefix cache keeps.",
    ),
    "num_pins": ("num_pins", "Beginnings of prompts that clients pin in the prefix cache."),
    "pinned_tokens": ("pinned_tokens", "KV tokens that pins hold."),
    "cache_disk_blocks": ("disk_blocks", "Blocks of KV in --cache-dir that may be found."),
    "cache_disk_bytes": ("disk_bytes", "Bytes of all files in --cache-dir."),
    "cache_host_blocks": ("host_blocks", "Blocks of KV in the memory of the host."),
    "cache_host_bytes": ("host_bytes", "Bytes of KV in the memory of the host."),
    "num_prefill_bootstrap_queue_reqs": (
        "num_handoff_bootstrap",
        "Requests whose prompt is being computed for another server.",
    ),
    "num_prefill_inflight_queue_reqs": (
        "num_handoff_inflight",
        "Prompts whose KV is lent to another server.",
    ),
    "num_decode_prealloc_queue_reqs": (
        "num_handoff_prealloc",
        "Prompts that another server computes, or for whose KV there is no room yet.",
    ),
    "num_decode_transfer_queue_reqs": (
        "num_handoff_transfer",
        "Prompts whose KV is coming from another server.",
    ),
    "kv_lent_tokens": ("kv_lent", "KV tokens lent to other servers."),
    "max_running_reqs": ("max_running_requests", "Requests that may run together."),
    "num_queue_tokens": (
        "num_waiting_tokens",
        "Prompt tokens of requests that wait for their first admission.",
    ),
    "num_sessions": ("num_sessions", "Open sessions."),
    "num_loaded_loras": ("num_adapters", "Adapters that are loaded."),
    "lora_pool_slots_total": (
        "adapter_slots",
        "Adapters that may run together; 0: the server takes none.",
    ),
    "lora_pool_slots_used": ("adapter_slots_used", "Adapters that run."),
    "num_grammar_queue_reqs": ("num_grammar_queue", "Requests whose grammar is being compiled."),
    "encoder_cache_items": (
        "encoder_items",
        "Pictures, tiles, videos and sounds that are kept encoded.",
    ),
    "encoder_cache_bytes": (
        "encoder_bytes",
        "Bytes of the kept vectors of pictures, videos and sounds.",
    ),
    "encoder_cache_tokens": (
        "encoder_tokens",
        "Tokens of pictures, videos and sounds that are kept encoded.",
    ),
    "new_token_ratio": (
        "new_token_ratio",
        "Part of the promised new tokens that admission reserves.",
    ),
}
_COUNTERS = {
    "prompt_tokens": ("total_prompt_tokens", "Prompt tokens of admitted requests."),
    "cached_tokens": ("total_cached_tokens", "Prompt tokens found in the prefix cache."),
    "cached_disk_tokens": (
        "total_disk_hit_tokens",
        "Prompt tokens that were read from --cache-dir for their request.",
    ),
    "cached_host_tokens": (
        "total_host_hit_tokens",
        "Prompt tokens that came from the memory of the host (--cache-host-gb).",
    ),
    "pins_refused": ("total_pins_refused", "Pins that were refused for want of room for them."),
    "pins_given_way": (
        "total_pins_given_way",
        "Times that a pin gave way, because a request could not run otherwise.",
    ),
    "cache_disk_read_bytes": ("total_disk_read_bytes", "Bytes read from --cache-dir."),
    "cache_disk_written_bytes": ("total_disk_written_bytes", "Bytes written to --cache-dir."),
    "cache_host_read_bytes": (
        "total_host_read_bytes",
        "Bytes copied from the memory of the host to the pool.",
    ),
    "cache_host_written_bytes": (
        "total_host_written_bytes",
        "Bytes copied from the pool to the memory of the host.",
    ),
    "cache_faults": (
        "total_disk_faults",
        "Blocks in --cache-dir that could not be read or written, or were damaged.",
    ),
    "handoff_tokens": ("total_handoff_tokens", "KV tokens lent to, or taken from, other servers."),
    "handoff_bytes": ("total_handoff_bytes", "Bytes of KV sent to, or taken from, other servers."),
    "handoff_faults": (
        "total_handoff_faults",
        "Connections between servers that were refused or broke off, and damaged pages.",
    ),
    "handoff_expired": (
        "total_handoff_expired",
        "Leases that ended before the other server gave them back.",
    ),
    "prefilled_tokens": (
        "total_prefilled_tokens",
        "Tokens computed in prefills, again after a retraction.",
    ),
    "generation_tokens": ("total_generated_tokens", "Tokens generated."),
    "background_requests": ("total_background", "Background requests that have ended."),
    "background_prompt_tokens": (
        "total_background_prompt_tokens",
        "Prompt tokens of background requests that have ended, without those found in the cache.",
    ),
    "background_generation_tokens": (
        "total_background_generated_tokens",
        "Tokens generated for background requests that have ended.",
    ),
    "num_retracted_requests": (
        "total_retractions",
        "Times that a running request went back to the queue.",
    ),
    "evicted_tokens": ("total_evicted_tokens", "KV tokens evicted from the prefix cache."),
    "evicted_window_tokens": (
        "total_evicted_window_tokens",
        "KV tokens of layers with sliding windows evicted from the prefix cache.",
    ),
    "evicted_states": ("total_evicted_states", "States evicted from the prefix cache."),
    "engine_steps": ("total_steps", "Steps of the engine."),
    "engine_prefill_steps": ("total_prefill_steps", "Steps that computed prompts."),
    "engine_split_prefill_steps": (
        "total_split_steps",
        "Steps that computed some layers of prompts.",
    ),
    "num_queue_full_requests": ("total_queue_full", "Requests refused because the queue was full."),
    "shadow_admissions": (
        "total_shadow_admissions",
        "Admissions that were compared with the choice of the shadow policy.",
    ),
    "shadow_later": (
        "total_shadow_later",
        "Admitted requests that the shadow policy would have let wait.",
    ),
    "shadow_earlier": (
        "total_shadow_earlier",
        "Requests that the shadow policy would have admitted while they waited.",
    ),
    "engine_unknown_messages": (
        "total_unknown_messages",
        "Messages to the engine without a handler.",
    ),
    "engine_duplicate_requests": (
        "total_duplicate_requests",
        "Requests with the number of an open one.",
    ),
    "engine_failed_messages": (
        "total_failed_messages",
        "Messages to the engine whose handling raised.",
    ),
    "engine_dropped_messages": (
        "total_dropped_messages",
        "Messages to the engine that could not be read.",
    ),
    "num_grammar": ("total_grammars", "Grammars that requests have asked for."),
    "num_grammar_cache_hit": ("total_grammar_hits", "Grammars that were found in the cache."),
    "num_grammar_shared": (
        "total_grammar_shared",
        "Requests that waited for a compilation begun for another: compilations avoided.",
    ),
    "num_grammar_aborted": (
        "total_grammar_refused",
        "Grammars that were invalid, or too large to compile.",
    ),
    "forced_tokens": (
        "total_forced_tokens",
        "Generated tokens for which a grammar left no choice.",
    ),
    "drafts_prediction": (
        "total_drafts_prediction",
        "Guessed tokens that were computed, from what clients expect.",
    ),
    "drafts_tree": ("total_drafts_tree", "Guessed tokens computed, from the prefix cache."),
    "drafts_draft": ("total_drafts_draft", "Guessed tokens computed, of the draft model."),
    "drafts_mtp": ("total_drafts_mtp", "Guessed tokens computed, of the model's own MTP head."),
    "drafts_eagle3": ("total_drafts_eagle3", "Guessed tokens computed, of an EAGLE-3 head."),
    "drafts_ngram": ("total_drafts_ngram", "Guessed tokens computed, from the request's text."),
    "accepted_prediction": (
        "total_accepted_prediction",
        "Tokens guessed from what clients expect that were right.",
    ),
    "accepted_tree": (
        "total_accepted_tree",
        "Tokens guessed from the prefix cache that were right.",
    ),
    "accepted_draft": (
        "total_accepted_draft",
        "Tokens guessed by the draft model that were right.",
    ),
    "accepted_mtp": (
        "total_accepted_mtp",
        "Tokens guessed by the model's own MTP head that were right.",
    ),
    "accepted_eagle3": (
        "total_accepted_eagle3",
        "Tokens guessed by an EAGLE-3 head that were right.",
    ),
    "accepted_ngram": (
        "total_accepted_ngram",
        "Tokens guessed from the request's text that were right.",
    ),
    "draft_runs": (
        "total_draft_runs",
        "Drafts that were computed, of one token or several that follow each other.",
    ),
    "encoder_runs": (
        "total_encoder_runs",
        "Pictures, tiles, videos and sounds that were encoded.",
    ),
    "encoded_tokens": (
        "total_encoded_tokens",
        "Tokens of the pictures, videos and sounds that were encoded.",
    ),
    "encoder_cache_hits": (
        "total_encoder_hits",
        "Pictures, tiles, videos and sounds that were already encoded when a prompt needed them.",
    ),
    "encoder_cache_misses": (
        "total_encoder_misses",
        "Pictures, tiles, videos and sounds that were encoded for a prompt that needed them.",
    ),
    "encoder_seconds": ("total_encoder_s", "Time that the encoder has worked."),
    "kv_faults": ("total_faults", "Faults found in the books of KV memory."),
    "engine_busy_seconds": ("busy_s", "Time that the engine had work."),
}


# Counters whose growth since the last status line goes into the next one.
GROWING = (
    "busy_s",
    "total_prompt_tokens",
    "total_generated_tokens",
    "total_cached_tokens",
    "total_retractions",
)


class EngineNumbers(Collector):
    """The engine's last snapshot, by field names, and values derived from it."""

    def __init__(self, model_name: str, dp_rank: int | None = None) -> None:
        """`dp_rank` is a label, if there are several engines. Status lines are about all of them,
        so an engine with a rank writes none."""
        self._labels = {"model_name": model_name}
        self._writes_lines = dp_rank is None
        if dp_rank is not None:
            self._labels["dp_rank"] = str(dp_rank)
        self._numbers: Mapping[str, float] = {}
        self._rate_base = (time.monotonic(), 0.0)  # (time, generated tokens)
        self.gen_throughput = 0.0  # tokens per second between the last two snapshots
        self._line_at = float("-inf")  # time of the last status line,
        self._line_numbers: Mapping[str, float] = {}  # and its snapshot

    def set(self, numbers: Mapping[str, float], now: float) -> None:
        """Take a snapshot of the engine; `now` is a reading of `time.monotonic`."""
        self._numbers = numbers
        then, before = self._rate_base
        generated = numbers.get("total_generated_tokens", 0.0)
        # Snapshots may come close together; over a short time, a rate would be inexact.
        if now - then >= RATE_INTERVAL_S:
            self.gen_throughput = max(generated - before, 0.0) / (now - then)
            self._rate_base = (now, generated)
        has_work = numbers.get("num_running") or numbers.get("num_waiting")
        if has_work and self._writes_lines and now - self._line_at >= LINE_INTERVAL_S:
            self._write_line(numbers)
            self._line_at = now
            self._line_numbers = numbers

    @property
    def token_usage(self) -> float:
        """Part of the KV pool that requests own, 0 to 1."""
        return self._numbers.get("kv_used", 0) / max(self._numbers.get("kv_tokens", 0), 1)

    @property
    def swa_token_usage(self) -> float:
        """Part of the pool of sliding-window layers that requests own, 0 to 1."""
        used = self._numbers.get("kv_window_used", 0)
        return used / max(self._numbers.get("kv_window_tokens", 0), 1)

    @property
    def mamba_usage(self) -> float:
        """Part of the slots for states that requests own, 0 to 1."""
        used = self._numbers.get("state_slots_used", 0)
        return used / max(self._numbers.get("state_slots", 0), 1)

    @property
    def cache_hit_rate(self) -> float:
        """Part of all prompt tokens that were found in the prefix cache, 0 to 1."""
        return self._numbers.get("total_cached_tokens", 0) / max(
            self._numbers.get("total_prompt_tokens", 0), 1
        )

    @property
    def mean_accepted_length(self) -> float:
        """Mean number of accepted tokens per draft."""
        accepted = 0.0
        for name, value in self._numbers.items():
            if name.startswith("total_accepted_"):
                accepted += value
        return accepted / max(self._numbers.get("total_draft_runs", 0), 1)

    @property
    def available_tokens(self) -> float:
        """KV tokens that are free, neither owned nor cached."""
        in_use = sum(
            self._numbers.get(name, 0)
            for name in ("kv_used", "kv_evictable", "kv_held", "kv_quarantined")
        )
        return max(self._numbers.get("kv_tokens", 0) - in_use, 0)

    def _write_line(self, numbers: Mapping[str, float]) -> None:
        # Rates are per time with work since the last line, so that idle time does not lower them.
        grown: dict[str, float] = {}
        for name in GROWING:
            # With several engines, one may have been lost with its counts.
            grown[name] = max(numbers[name] - self._line_numbers.get(name, 0), 0.0)
        busy_s = max(grown["busy_s"], 1e-3)
        log.info(
            "working",
            model=self._labels["model_name"],
            running=int(numbers["num_running"]),
            waiting=int(numbers["num_waiting"]),
            prompt_tokens_per_s=round(grown["total_prompt_tokens"] / busy_s, 1),
            output_tokens_per_s=round(grown["total_generated_tokens"] / busy_s, 1),
            kv_used=f"{numbers['kv_used'] / max(numbers['kv_tokens'], 1):.1%}",
            cache_hits=f"{grown['total_cached_tokens'] / max(grown['total_prompt_tokens'], 1):.1%}",
            retractions=int(grown["total_retractions"]),
        )

    def collect(self) -> Iterator[Metric]:
        for name, (field, help) in _GAUGES.items():
            yield self._gauge(name, self._numbers.get(field, 0), help)
        usage = "Part of the KV pool that requests hold."
        yield self._gauge("token_usage", self.token_usage, usage)
        in_windows = "Part of the KV pool of layers with sliding windows held by requests."
        yield self._gauge("swa_token_usage", self.swa_token_usage, in_windows)
        in_states = "Part of the slots for states of layers that keep one held by requests."
        yield self._gauge("mamba_usage", self.mamba_usage, in_states)
        available = "KV tokens neither held nor cached."
        yield self._gauge("kv_available_tokens", self.available_tokens, available)
        hits = "Part of all prompt tokens found in the prefix cache."
        yield self._gauge("cache_hit_rate", self.cache_hit_rate, hits)
        accepted = "Mean number of tokens of a draft that were right."
        yield self._gauge("mean_accepted_length", self.mean_accepted_length, accepted)
        throughput = "Tokens generated per second."
        yield self._gauge("gen_throughput", self.gen_throughput, throughput)
        for name, (field, help) in _COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, help, labels=list(self._labels))
            counter.add_metric(list(self._labels.values()), self._numbers.get(field, 0))
            yield counter
        yield self._fallbacks()

    def _fallbacks(self) -> Metric:
        help = "Requests whose KV did not come from another server."
        labels = [*self._labels, "reason"]
        family = CounterMetricFamily(PREFIX + "handoff_fallback", help, labels=labels)
        for reason in REASONS:
            value = self._numbers.get(f"total_handoff_{reason}", 0)
            family.add_metric([*self._labels.values(), reason], value)
        return family

    def _gauge(self, name: str, value: float, help: str) -> Metric:
        gauge = GaugeMetricFamily(PREFIX + name, help, labels=list(self._labels))
        gauge.add_metric(list(self._labels.values()), value)
        return gauge


class NumbersOfEngines(Collector):
    """The numbers of several engines, distinguished by the label `dp_rank`."""

    def __init__(self, engines: Sequence[EngineNumbers]) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        pages = [list(engine.collect()) for engine in self._engines]
        for families in zip(*pages, strict=True):
            merged = families[0]
            for family in families[1:]:
                merged.samples += family.samples
            yield merged
