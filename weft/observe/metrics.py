"""Metrics of one front and its engine, in a registry of their own,
under `weft:` with the suffixes of SGLang.

The engine counts its own work and sends snapshots (`engine.set`); the front records what it alone
sees: latencies, ends of requests, HTTP. Nothing is labelled by request, and no label has more
values than are written here, whatever clients send.
`compat.py` tells the same values by the names of other engines.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import generate_latest as generate_open_metrics
from prometheus_client.registry import Collector

from weft.observe.compat import Renamed
from weft.observe.histogram import COUNTS, SECONDS, TOKENS, Histogram, Histograms

PREFIX = "weft:"
MAX_PRIORITIES = 16  # that have latencies of their own
STAGES = ("dispatch", "queue", "prefill", "decode")

_GAUGES = {  # name: (field of the engine's snapshot, help)
    "num_running_reqs": ("num_running", "Requests in the running batch."),
    "num_queue_reqs": ("num_waiting", "Requests that wait for admission."),
    "num_used_tokens": ("kv_used", "KV tokens held by requests."),
    "kv_evictable_tokens": ("kv_evictable", "KV tokens cached and free to evict."),
    "kv_held_tokens": ("kv_held", "KV tokens cached for sessions until memory is needed."),
    "kv_quarantined_tokens": (
        "kv_quarantined",
        "KV tokens out of circulation after a fault in the books.",
    ),
    "max_total_num_tokens": ("kv_tokens", "Size of the KV pool in tokens."),
    "max_running_reqs": ("max_running_requests", "Requests that may run together."),
    "num_queue_tokens": (
        "num_waiting_tokens",
        "Prompt tokens of requests that wait for their first admission.",
    ),
    "num_sessions": ("num_sessions", "Open sessions."),
    "num_grammar_queue_reqs": ("num_grammar_queue", "Requests whose grammar is being compiled."),
    "new_token_ratio": (
        "new_token_ratio",
        "Part of the promised new tokens that admission reserves.",
    ),
}
_COUNTERS = {
    "prompt_tokens": ("total_prompt_tokens", "Prompt tokens of admitted requests."),
    "cached_tokens": ("total_cached_tokens", "Prompt tokens found in the prefix cache."),
    "prefilled_tokens": (
        "total_prefilled_tokens",
        "Tokens computed in prefills, again after a retraction.",
    ),
    "generation_tokens": ("total_generated_tokens", "Tokens generated."),
    "num_retracted_requests": (
        "total_retractions",
        "Times that a running request went back to the queue.",
    ),
    "evicted_tokens": ("total_evicted_tokens", "KV tokens evicted from the prefix cache."),
    "engine_steps": ("total_steps", "Steps of the engine."),
    "engine_prefill_steps": ("total_prefill_steps", "Steps that computed prompts."),
    "num_queue_full_requests": ("total_queue_full", "Requests refused because the queue was full."),
    "engine_unknown_messages": (
        "total_unknown_messages",
        "Messages to the engine that nobody handles.",
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
    "num_grammar_cache_hit": ("total_grammar_hits", "Of these, found in the cache."),
    "num_grammar_aborted": ("total_grammar_refused", "And invalid, or too much to compile."),
    "forced_tokens": (
        "total_forced_tokens",
        "Of the generated tokens, those about which a grammar left no choice.",
    ),
    "kv_faults": ("total_faults", "Faults found in the books of KV memory."),
    "engine_busy_seconds": ("busy_s", "Time that the engine had work."),
}


class Latency:
    """The latencies of one priority. The client collects those of a step,
    then `Metrics.end_step` counts them.
    """

    def __init__(
        self, inter_token: Histogram, first_token: Histogram, e2e: Histogram, queue: Histogram
    ) -> None:
        self.gaps: list[float] = []  # between two tokens, of this step
        self.first_token = first_token
        self.e2e = e2e
        self.queue = queue
        self._inter_token = inter_token

    def end_step(self) -> None:
        if self.gaps:
            self._inter_token.observe(self.gaps)
            self.gaps.clear()


class Metrics:
    """Where the front records. `render` is the page for Prometheus;
    `compat` is none, or a name in `compat.SYSTEMS`.
    """

    def __init__(self, model_name: str = "", compat: str = "none") -> None:
        self.registry = CollectorRegistry()
        self.model_name = self._model_name = model_name
        by_priority = [
            self._histograms(
                "inter_token_latency_seconds", "Between two tokens of a completion.", "priority"
            ),
            self._histograms(
                "time_to_first_token_seconds", "From request to first token.", "priority"
            ),
            self._histograms("e2e_request_latency_seconds", "From request to end.", "priority"),
            self._histograms(
                "queue_time_seconds", "From arrival in the scheduler to admission.", "priority"
            ),
        ]
        self._by_priority = by_priority
        self._latencies: dict[int, Latency] = {}
        self.latency(0)
        stages = self._histograms(
            "per_stage_req_latency_seconds", "Time of a completion in a stage.", "stage"
        )
        self._stages = {stage: stages.of(stage) for stage in STAGES}
        self._time_per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time of a completion's tokens after the first.",
            SECONDS,
        )
        self._inference = self._histogram(
            "request_inference_time_seconds", "From admission to end.", SECONDS
        )
        self._prompt_tokens = self._histogram(
            "prompt_tokens_histogram", "Prompt tokens of a completion.", TOKENS
        )
        self._uncached_tokens = self._histogram(
            "uncached_prompt_tokens_histogram",
            "Prompt tokens of a completion that were not cached.",
            TOKENS,
        )
        self._generation_tokens = self._histogram(
            "generation_tokens_histogram", "Generated tokens of a completion.", TOKENS
        )
        self._params_n = self._histogram(
            "request_params_n", "Completions that a request asked for.", COUNTS
        )
        self._params_max_tokens = self._histogram(
            "request_params_max_tokens", "Tokens that a completion may have at most.", TOKENS
        )
        self._requests = self._counter(
            "num_requests", "Finished completions.", "model_name", "finish_reason"
        )
        self._aborted = self._counter(
            "num_aborted_requests", "Completions that were aborted.", "model_name"
        )
        self._failed = self._counter(
            "num_failed_requests", "Completions that failed.", "model_name", "status_code"
        )
        self._refused = self._counter("refused", "What exceeded a limit.", "limit")
        self._http_requests = self._counter("http_requests", "HTTP requests.", "endpoint", "method")
        self._http_responses = self._counter(
            "http_responses", "HTTP responses.", "endpoint", "status_code"
        )
        self._http_seconds = self._histograms(
            "http_request_duration_seconds", "Of HTTP requests.", "endpoint", 200
        )
        self._unknown_fields = self._counter(
            "unknown_request_fields", "Unknown fields in request bodies."
        )
        self._http_active = Gauge(
            f"{PREFIX}http_requests_active", "Open HTTP requests.", registry=self.registry
        )
        self._responding = self._gauge(
            "engine_responding", "1 while the engine answers, 0 while it hangs."
        )
        self._startup = self._gauge(
            "startup_time_seconds", "Time of a phase of the start.", "phase"
        )
        self._cache_config = self._gauge(
            "cache_config_info", "Pages of the KV cache.", "block_size", "num_gpu_blocks"
        )
        self.engine = EngineGauges(model_name)
        self.processes = Processes()
        self.registry.register(self.engine)
        self.registry.register(self.processes)
        if compat != "none":
            self.registry.register(Renamed(compat, self.registry))

    def latency(self, priority: int) -> Latency:
        """Where the latencies of this priority are recorded.
        Past `MAX_PRIORITIES` different ones share a place.
        """
        found = self._latencies.get(priority)
        if found is None:
            histograms = [one.of(str(priority)) for one in self._by_priority]
            found = Latency(*histograms)
            if len(self._latencies) < MAX_PRIORITIES:
                self._latencies[priority] = found
            else:
                found = self._latencies.setdefault(_OTHER, found)
        return found

    def end_step(self) -> None:
        """Everything that a step of the engine brought has been recorded."""
        for latency in self._latencies.values():
            latency.end_step()

    def began(self, n: int, max_tokens: int) -> None:
        """A prompt is to be completed `n` times, with at most so many tokens."""
        self._params_n.observe_one(n)
        self._params_max_tokens.observe_one(max_tokens)

    def finished(
        self, reason: str, status: int, *, prompt_tokens: int, cached_tokens: int, num_tokens: int
    ) -> None:
        """One completion has ended."""
        self._requests.labels(self._model_name, reason).inc()
        if reason == "abort":
            self._aborted.labels(self._model_name).inc()
        if status >= 400:
            self._failed.labels(self._model_name, str(status)).inc()
        self._prompt_tokens.observe_one(prompt_tokens)
        self._uncached_tokens.observe_one(prompt_tokens - cached_tokens)
        self._generation_tokens.observe_one(num_tokens)

    def staged(self, stages: Mapping[str, float], num_tokens: int, rid: str) -> None:
        """How long a completion that has a token spent in each of `STAGES`."""
        for stage, seconds in stages.items():
            self._stages[stage].observe_one(seconds, rid)
        self._inference.observe_one(stages["prefill"] + stages["decode"], rid)
        if num_tokens > 1:
            self._time_per_token.observe_one(stages["decode"] / (num_tokens - 1), rid)

    def started(self, phases: Iterable[tuple[str, float]], page_size: int, num_pages: int) -> None:
        """The engine is ready."""
        for phase, seconds in phases:
            self._startup.labels(phase).set(seconds)
        self._cache_config.labels(str(page_size), str(num_pages)).set(1)
        self._responding.set(1)

    def responds(self, is_responding: bool) -> None:
        self._responding.set(is_responding)

    def refused(self, limit: str) -> None:
        """Something exceeded this limit, a field of `config.limits.Limits`."""
        self._refused.labels(limit).inc()

    def http_began(self, endpoint: str, method: str) -> None:
        self._http_active.inc()
        self._http_requests.labels(endpoint, method).inc()

    def http_ended(self, endpoint: str, status: int, seconds: float) -> None:
        self._http_active.dec()
        self._http_responses.labels(endpoint, str(status)).inc()
        self._http_seconds.of(endpoint).observe_one(seconds)

    def unknown_fields(self, count: int) -> None:
        self._unknown_fields.inc(count)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def render_open(self) -> bytes:
        """In the format OpenMetrics, which has a place for exemplars."""
        generate: Callable[..., bytes] = generate_open_metrics
        # Other ways to escape change the colon.
        return generate(self.registry, escaping=ALLOWUTF8)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, help, labels, registry=self.registry)

    def _gauge(self, name: str, help: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, help, labels, registry=self.registry)

    def _histograms(
        self, name: str, help: str, label: str, most: int = MAX_PRIORITIES
    ) -> Histograms:
        histograms = Histograms(PREFIX + name, help, SECONDS, self._model_name, label, most)
        self.registry.register(histograms)
        return histograms

    def _histogram(self, name: str, help: str, bounds: tuple[float, ...]) -> Histogram:
        histograms = Histograms(PREFIX + name, help, bounds, self._model_name, "", 1)
        self.registry.register(histograms)
        return histograms.of("")


_OTHER = 2**40  # no priority of a client


class EngineGauges(Collector):
    """The engine's last snapshot, by its field names, and what follows from it."""

    def __init__(self, model_name: str) -> None:
        self._label = (model_name,)
        self._numbers: Mapping[str, float] = {}
        self._rate_base = (time.monotonic(), 0.0)  # when, tokens generated
        self.gen_throughput = 0.0  # tokens per second between the last two snapshots

    def set(self, numbers: Mapping[str, float]) -> None:
        self._numbers = numbers
        then, before = self._rate_base
        now = time.monotonic()
        generated = numbers.get("total_generated_tokens", 0.0)
        if now - then >= 0.5:
            self.gen_throughput = max(generated - before, 0.0) / (now - then)
            self._rate_base = (now, generated)

    @property
    def token_usage(self) -> float:
        """Part of the KV pool that requests hold, 0 to 1."""
        return self._numbers.get("kv_used", 0) / max(self._numbers.get("kv_tokens", 0), 1)

    @property
    def cache_hit_rate(self) -> float:
        """Part of all prompt tokens that were found in the prefix cache, 0 to 1."""
        return self._numbers.get("total_cached_tokens", 0) / max(
            self._numbers.get("total_prompt_tokens", 0), 1
        )

    @property
    def available_tokens(self) -> float:
        """KV tokens that nobody uses, not even the cache."""
        held = sum(
            self._numbers.get(name, 0)
            for name in ("kv_used", "kv_evictable", "kv_held", "kv_quarantined")
        )
        return max(self._numbers.get("kv_tokens", 0) - held, 0)

    def collect(self) -> Iterator[Metric]:
        gauges = {
            name: (self._numbers.get(field, 0), help) for name, (field, help) in _GAUGES.items()
        }
        gauges["token_usage"] = (self.token_usage, "Part of the KV pool that requests hold.")
        gauges["kv_available_tokens"] = (
            self.available_tokens,
            "KV tokens neither held nor cached.",
        )
        gauges["cache_hit_rate"] = (
            self.cache_hit_rate,
            "Part of all prompt tokens found in the prefix cache.",
        )
        gauges["gen_throughput"] = (self.gen_throughput, "Tokens generated per second.")
        for name, (value, help) in gauges.items():
            gauge = GaugeMetricFamily(PREFIX + name, help, labels=["model_name"])
            gauge.add_metric(self._label, value)
            yield gauge
        for name, (field, help) in _COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, help, labels=["model_name"])
            counter.add_metric(self._label, self._numbers.get(field, 0))
            yield counter


class Processes(Collector):
    """Processor time and memory of the front and of whatever processes are added."""

    def __init__(self) -> None:
        self._pids = {"front": os.getpid()}

    def add(self, component: str, pid: int) -> None:
        self._pids[component] = pid

    def collect(self) -> Iterator[Metric]:
        cpu = CounterMetricFamily(
            f"{PREFIX}process_cpu_seconds", "Processor time.", labels=["component"]
        )
        memory = GaugeMetricFamily(
            f"{PREFIX}process_resident_memory_bytes", "Memory in use.", labels=["component"]
        )
        for component, pid in self._pids.items():
            try:
                process = psutil.Process(pid)
                times = process.cpu_times()
                cpu.add_metric((component,), times.user + times.system)
                memory.add_metric((component,), process.memory_info().rss)
            except psutil.Error:
                continue  # it has ended
        yield cpu
        yield memory
