"""Metrics of one front and its engine, in a registry of their own, under `weft:` with the suffixes of SGLang.

The engine counts its own work and sends snapshots (`set_engine`); the front records what it alone sees: latencies, ends
of requests, HTTP. Nothing is labelled by request or by anything else that a client chooses.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0),
)
_TOKENS = tuple(float(2**power) for power in range(18))

_GAUGES = {  # name: (field of the engine's snapshot, help)
    "num_running_reqs": ("num_running", "Requests in the running batch."),
    "num_queue_reqs": ("num_waiting", "Requests that wait for admission."),
    "num_used_tokens": ("kv_used", "KV tokens held by requests."),
    "kv_evictable_tokens": ("kv_evictable", "KV tokens cached and free to evict."),
    "kv_quarantined_tokens": ("kv_quarantined", "KV tokens out of circulation after a fault in the books."),
    "max_total_num_tokens": ("kv_tokens", "Size of the KV pool in tokens."),
    "new_token_ratio": ("new_token_ratio", "Part of the promised new tokens that admission reserves."),
}
_COUNTERS = {
    "prompt_tokens": ("total_prompt_tokens", "Prompt tokens of admitted requests."),
    "cached_tokens": ("total_cached_tokens", "Prompt tokens found in the prefix cache."),
    "generation_tokens": ("total_generated_tokens", "Tokens generated."),
    "num_retracted_requests": ("total_retractions", "Times that a running request went back to the queue."),
    "evicted_tokens": ("total_evicted_tokens", "KV tokens evicted from the prefix cache."),
    "engine_steps": ("total_steps", "Steps of the engine."),
    "engine_dropped_messages": ("total_dropped_messages", "Messages to the engine that could not be read."),
    "kv_faults": ("total_faults", "Faults found in the books of KV memory."),
    "engine_busy_seconds": ("busy_s", "Time that the engine had work."),
}


class Histogram:
    """Counts of values by bucket. Takes many values at once, for the latencies of a whole step."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = np.asarray(bounds)
        self._counts = np.zeros(len(bounds) + 1, dtype=np.int64)  # the last is above all bounds
        self._sum = 0.0

    def observe(self, values: Sequence[float]) -> None:
        if values:
            self._counts += np.bincount(np.searchsorted(self._bounds, values), minlength=len(self._counts))
            self._sum += float(sum(values))

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound and number of values up to it."""
        names = [*map(str, self._bounds.tolist()), "+Inf"]
        return list(zip(names, np.cumsum(self._counts).astype(float).tolist(), strict=True))

    @property
    def sum(self) -> float:
        return self._sum


class Metrics:
    """Where the front records. `render` is the page for Prometheus."""

    def __init__(self, model_name: str = "") -> None:
        self.registry = CollectorRegistry()
        self.time_to_first_token = Histogram(_SECONDS)
        self.inter_token_latency = Histogram(_SECONDS)
        self.e2e_latency = Histogram(_SECONDS)
        self.queue_time = Histogram(_SECONDS)
        self.prompt_tokens = Histogram(_TOKENS)
        self.generation_tokens = Histogram(_TOKENS)
        self._requests = self._counter("num_requests", "Finished completions.", "model_name", "finish_reason")
        self._aborted = self._counter("num_aborted_requests", "Completions that were aborted.", "model_name")
        self._http_requests = self._counter("http_requests", "HTTP requests.", "endpoint", "method")
        self._http_responses = self._counter("http_responses", "HTTP responses.", "endpoint", "status_code")
        self._unknown_fields = self._counter("unknown_request_fields", "Unknown fields in request bodies.")
        self._http_active = Gauge("weft:http_requests_active", "Open HTTP requests.", registry=self.registry)
        self.engine = EngineGauges(model_name)
        self.registry.register(self.engine)
        self.registry.register(_Histograms(self, model_name))
        self._model_name = model_name

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"weft:{name}", help, labels, registry=self.registry)

    def finished(
        self, reason: str, *, prompt_tokens: int, completion_tokens: int, e2e_s: float, queue_s: float
    ) -> None:
        """One completion has ended."""
        self._requests.labels(self._model_name, reason).inc()
        if reason == "abort":
            self._aborted.labels(self._model_name).inc()
        self.e2e_latency.observe([e2e_s])
        self.queue_time.observe([queue_s])
        self.prompt_tokens.observe([prompt_tokens])
        self.generation_tokens.observe([completion_tokens])

    def http_began(self, endpoint: str, method: str) -> None:
        self._http_active.inc()
        self._http_requests.labels(endpoint, method).inc()

    def http_ended(self, endpoint: str, status: int) -> None:
        self._http_active.dec()
        self._http_responses.labels(endpoint, str(status)).inc()

    def unknown_fields(self, count: int) -> None:
        self._unknown_fields.inc(count)

    def render(self) -> bytes:
        return generate_latest(self.registry)


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
        now, generated = time.monotonic(), numbers.get("total_generated_tokens", 0.0)
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
        return self._numbers.get("total_cached_tokens", 0) / max(self._numbers.get("total_prompt_tokens", 0), 1)

    def collect(self) -> Iterator[Metric]:
        gauges = {name: (self._numbers.get(field, 0), help) for name, (field, help) in _GAUGES.items()}
        gauges["token_usage"] = (self.token_usage, "Part of the KV pool that requests hold.")
        gauges["cache_hit_rate"] = (self.cache_hit_rate, "Part of all prompt tokens found in the prefix cache.")
        gauges["gen_throughput"] = (self.gen_throughput, "Tokens generated per second.")
        for name, (value, help) in gauges.items():
            gauge = GaugeMetricFamily(f"weft:{name}", help, labels=["model_name"])
            gauge.add_metric(self._label, value)
            yield gauge
        for name, (field, help) in _COUNTERS.items():
            counter = CounterMetricFamily(f"weft:{name}", help, labels=["model_name"])
            counter.add_metric(self._label, self._numbers.get(field, 0))
            yield counter


class _Histograms(Collector):
    def __init__(self, metrics: Metrics, model_name: str) -> None:
        self._label = (model_name,)
        self._table = {
            "time_to_first_token_seconds": (metrics.time_to_first_token, "From request to first token."),
            "inter_token_latency_seconds": (metrics.inter_token_latency, "Between two tokens of a completion."),
            "e2e_request_latency_seconds": (metrics.e2e_latency, "From request to end."),
            "queue_time_seconds": (metrics.queue_time, "From arrival in the scheduler to admission."),
            "prompt_tokens_histogram": (metrics.prompt_tokens, "Prompt tokens of a completion."),
            "generation_tokens_histogram": (metrics.generation_tokens, "Generated tokens of a completion."),
        }

    def collect(self) -> Iterator[Metric]:
        for name, (histogram, help) in self._table.items():
            family = HistogramMetricFamily(f"weft:{name}", help, labels=["model_name"])
            family.add_metric(self._label, buckets=histogram.buckets, sum_value=histogram.sum)
            yield family
