"""Metrics of one front and its engine, in their own registry, with the prefix `weft:`.

Names have the suffixes of SGLang; `compat.py` repeats the values under the names of other engines.
This module has the instruments. The component that sees an event records it: the client records
completions (`Metrics.completions`), the HTTP edge of the server records HTTP (`Metrics.http`); the
engine counts its own work and sends snapshots (`Metrics.engine`). No metric is labelled by request,
and no label has more values than the limits here, whatever clients send.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import generate_latest as generate_open_metrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from weft.config.nvml import Nvml
from weft.observe.compat import Renamed
from weft.observe.engine_numbers import PREFIX, EngineNumbers, NumbersOfEngines
from weft.observe.gpu import GpuNumbers
from weft.observe.savings import Savings

MAX_PRIORITIES = 16  # number of priorities with separate latencies
MAX_ENDPOINTS = 200
STAGES = ("dispatch", "queue", "prefill", "decode")
SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0),
)
TOKENS = tuple(float(2**power) for power in range(18))
COUNTS = tuple(float(2**power) for power in range(7))
MAX_EXEMPLAR_LEN = 120  # of a request's name; the format allows 128 including the label
FRONT = "front"  # name of the front among the processes
BACKGROUND = "background"  # instead of a priority
_OTHER = 2**40  # not a priority that clients can use


class Histogram:
    """Counts of values by bucket, with an example for each bucket.

    An *exemplar* is one value with the name of its request, so that an operator who sees a slow
    bucket can look up a request.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = list(bounds)  # to observe one value: numpy takes ten times as long
        self._edges = np.asarray(bounds)  # to observe many values
        # the last bucket is above all bounds
        self._counts = np.zeros(len(bounds) + 1, dtype=np.int64)
        self._exemplars: list[Exemplar | None] = [None] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, values: Sequence[float]) -> None:
        """Count many values at once, such as the latencies of a whole step."""
        if values:
            buckets = np.searchsorted(self._edges, values)
            self._counts += np.bincount(buckets, minlength=len(self._counts))
            self.sum += float(sum(values))

    def observe_one(self, value: float, rid: str = "") -> None:
        """Count one value, with the name of its request."""
        bucket = bisect_left(self._bounds, value)
        self._counts[bucket] += 1
        self.sum += value
        if rid and len(rid) <= MAX_EXEMPLAR_LEN:
            self._exemplars[bucket] = Exemplar({"rid": rid}, value, time.time())

    @property
    def buckets(self) -> list[tuple[str, float, Exemplar | None]]:
        """For each bucket: upper bound, number of values up to it, an exemplar within the
        bucket."""
        names = [*map(str, self._bounds), "+Inf"]
        counts = np.cumsum(self._counts).astype(float).tolist()
        return list(zip(names, counts, self._exemplars, strict=True))


class Histograms(Collector):
    """Histograms with one name, distinguished by one label.

    After `most` label values, all further ones share the label "other".
    """

    def __init__(
        self,
        name: str,
        help: str,
        bounds: Sequence[float],
        model_name: str,
        label: str,
        most: int,
    ) -> None:
        self._name = name
        self._help = help
        self._bounds = bounds
        self._model_name = model_name
        self._label = label
        self._most = most
        self._known: dict[str, Histogram] = {}

    def of(self, value: str) -> Histogram:
        found = self._known.get(value)
        if found is None:
            if len(self._known) >= self._most:
                value = "other"
            found = self._known.setdefault(value, Histogram(self._bounds))
        return found

    def collect(self) -> Iterator[Metric]:
        labels = ["model_name", self._label] if self._label else ["model_name"]
        family = HistogramMetricFamily(self._name, self._help, labels=labels)
        for value, histogram in self._known.items():
            own = (self._model_name, value) if self._label else (self._model_name,)
            buckets: Any = histogram.buckets
            family.add_metric(own, buckets=buckets, sum_value=histogram.sum)
        yield family


class Latency(NamedTuple):
    """The latencies of one priority."""

    gaps: list[float]  # between tokens, in this step; `Latencies.count_gaps` counts and clears them
    inter_token: Histogram
    first_token: Histogram
    e2e: Histogram
    queue: Histogram


class Latencies(dict[int | str, Latency]):
    """Latencies by priority; those of background requests are apart, by that word. After
    `MAX_PRIORITIES` different ones, the others share one entry."""

    def __init__(self, families: Sequence[Histograms]) -> None:
        """`families` are in the order of the fields of `Latency`."""
        super().__init__()
        self._families = families

    def of(self, priority: int, *, background: bool) -> Latency:
        return self[BACKGROUND if background else priority]

    def __missing__(self, priority: int | str) -> Latency:
        histograms = [family.of(str(priority)) for family in self._families]
        latency = Latency([], *histograms)
        if len(self) < MAX_PRIORITIES:
            self[priority] = latency
            return latency
        return self.setdefault(_OTHER, latency)

    def count_gaps(self) -> None:
        """Count the gaps of a step, after all of its tokens."""
        for latency in self.values():
            if latency.gaps:
                latency.inter_token.observe(latency.gaps)
                latency.gaps.clear()


class Maker:
    """Makes the instruments of one model in one registry."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self._model_name = model_name

    def counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, help, labels, registry=self._registry)

    def gauge(self, name: str, help: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, help, labels, registry=self._registry)

    def histograms(
        self,
        name: str,
        help: str,
        label: str,
        most: int = MAX_PRIORITIES,
    ) -> Histograms:
        """Histograms of seconds."""
        histograms = Histograms(PREFIX + name, help, SECONDS, self._model_name, label, most)
        self._registry.register(histograms)
        return histograms

    def histogram(self, name: str, help: str, bounds: tuple[float, ...]) -> Histogram:
        histograms = Histograms(PREFIX + name, help, bounds, self._model_name, "", 1)
        self._registry.register(histograms)
        return histograms.of("")

    def savings(self) -> Savings:
        return Savings(self._registry, PREFIX)


class MissMetrics:
    """Why prompts of slow requests were not in the prefix cache."""

    def __init__(self, make: Maker) -> None:
        self._requests = make.counter(
            "slow_requests",
            "Requests that were slow to begin (--log-slow-s) and were explained, by the reason why "
            "not more of their prompts was cached.",
            "cause",
        )
        self._tokens = make.counter(
            "cache_missed_tokens",
            "Prompt tokens of these requests that would have been cached otherwise.",
            "cause",
        )
        self._seconds = make.counter(
            "cache_missed_seconds",
            "The part of these tokens in the time of the prefills of these requests.",
            "cause",
        )

    def count(self, cause: str, missed_tokens: int, missed_s: float) -> None:
        self._requests.labels(cause).inc()
        self._tokens.labels(cause).inc(missed_tokens)
        self._seconds.labels(cause).inc(missed_s)


class CompletionMetrics:
    """The client's view of completions, from their parameters to their ends."""

    def __init__(self, make: Maker) -> None:
        self.latencies = Latencies(
            [
                make.histograms(
                    "inter_token_latency_seconds",
                    "Time between two tokens of a completion.",
                    "priority",
                ),
                make.histograms(
                    "time_to_first_token_seconds", "Time from request to first token.", "priority"
                ),
                make.histograms(
                    "e2e_request_latency_seconds", "Time from request to end.", "priority"
                ),
                make.histograms(
                    "queue_time_seconds",
                    "Time from arrival in the scheduler to admission.",
                    "priority",
                ),
            ]
        )
        _ = self.latencies[0]  # so that the page has it from the start
        stages = make.histograms(
            "per_stage_req_latency_seconds", "Time of a completion in a stage.", "stage"
        )
        self.stages = {stage: stages.of(stage) for stage in STAGES}
        self.time_per_token = make.histogram(
            "request_time_per_output_token_seconds",
            "Mean time of a completion's tokens after the first.",
            SECONDS,
        )
        self.inference = make.histogram(
            "request_inference_time_seconds", "Time from admission to end.", SECONDS
        )
        self.prompt_tokens = make.histogram(
            "prompt_tokens_histogram", "Prompt tokens of a completion.", TOKENS
        )
        self.uncached_tokens = make.histogram(
            "uncached_prompt_tokens_histogram",
            "Prompt tokens of a completion that were not cached.",
            TOKENS,
        )
        self.generation_tokens = make.histogram(
            "generation_tokens_histogram", "Generated tokens of a completion.", TOKENS
        )
        self.params_n = make.histogram(
            "request_params_n", "Completions that a request asked for.", COUNTS
        )
        self.params_max_tokens = make.histogram(
            "request_params_max_tokens", "Tokens that a completion may have at most.", TOKENS
        )
        self.ended = make.counter(
            "num_requests", "Finished completions.", "model_name", "finish_reason"
        )
        self.aborted = make.counter(
            "num_aborted_requests", "Completions that were aborted.", "model_name"
        )
        self.failed = make.counter(
            "num_failed_requests", "Completions that failed.", "model_name", "status_code"
        )
        self.savings = make.savings()
        self.misses = MissMetrics(make)
        # disconnect: the client has left; late: the completion has already ended here.
        abandoned = make.counter(
            "abandoned_tokens",
            "Generated tokens that no client got: the client had disconnected (disconnect), or "
            "they came after the end of their completion (late).",
            "reason",
        )
        self.abandoned = {reason: abandoned.labels(reason) for reason in ("disconnect", "late")}


class HttpMetrics:
    """The HTTP edge's view of requests. An endpoint is the template of a path."""

    def __init__(self, make: Maker) -> None:
        self.active = make.gauge("http_requests_active", "Open HTTP requests.")
        self.requests = make.counter("http_requests", "HTTP requests.", "endpoint", "method")
        self.responses = make.counter(
            "http_responses", "HTTP responses.", "endpoint", "status_code"
        )
        self.seconds = make.histograms(
            "http_request_duration_seconds", "Time of HTTP requests.", "endpoint", MAX_ENDPOINTS
        )


class FleetMetrics:
    """The launcher's view of several engines."""

    def __init__(self, make: Maker, engines: Sequence[EngineNumbers]) -> None:
        self.engines = engines  # by rank
        self.up = make.gauge("engine_up", "1 while an engine takes requests.", "dp_rank")
        self.restarts = make.counter(
            "engine_restarts", "Times that an engine was started again.", "dp_rank"
        )


class Metrics:
    """All instruments. `render` makes the page for Prometheus."""

    def __init__(self, model_name: str = "", compat: str = "none") -> None:
        """`compat` is "none", or a key of `compat.SYSTEMS`."""
        self.registry = CollectorRegistry()
        self.model_name = model_name
        make = Maker(self.registry, model_name)
        self.completions = CompletionMetrics(make)
        self.http = HttpMetrics(make)
        self._refused = make.counter("refused", "What exceeded a limit.", "limit")
        self._unknown_fields = make.counter(
            "unknown_request_fields", "Unknown fields in request bodies."
        )
        self._responding = make.gauge(
            "engine_responding", "1 while the engine answers, 0 while it hangs."
        )
        self._startup = make.gauge("startup_time_seconds", "Time of a phase of the start.", "phase")
        self._cache_config = make.gauge(
            "cache_config_info", "Pages of the KV cache.", "block_size", "num_gpu_blocks"
        )
        self.engine = EngineNumbers(model_name)
        self._make = make
        self._fleet: FleetMetrics | None = None
        self.processes = Processes()
        self.registry.register(self.engine)
        self.registry.register(self.processes)
        if compat != "none":
            self.registry.register(Renamed(compat, self.registry))

    def watch_gpu(self, uuid: str) -> None:
        """Add the numbers of the GPU that computes, if the driver's library tells them."""
        nvml = Nvml.open()
        if nvml is not None:
            self.registry.register(GpuNumbers(nvml, uuid))

    def started(self, phases: Iterable[tuple[str, float]], page_size: int, num_pages: int) -> None:
        """Record that the engine is ready."""
        for phase, seconds in phases:
            self._startup.labels(phase).set(seconds)
        self._cache_config.labels(str(page_size), str(num_pages)).set(1)
        self._responding.set(1)

    def split(self, num_engines: int) -> FleetMetrics:
        """Split the engine's numbers by engine, for a server with several engines. A model that is
        loaded again goes on with the numbers of before."""
        if self._fleet is not None:
            return self._fleet
        engines = [EngineNumbers(self.model_name, rank) for rank in range(num_engines)]
        self.registry.unregister(self.engine)
        self.registry.register(NumbersOfEngines(engines))
        self._fleet = FleetMetrics(self._make, engines)
        return self._fleet

    def responds(self, is_responding: bool) -> None:
        self._responding.set(is_responding)

    def refused(self, limit: str) -> None:
        """Count a violation of this limit, a field of `config.limits.Limits`."""
        self._refused.labels(limit).inc()

    def unknown_fields(self, count: int) -> None:
        self._unknown_fields.inc(count)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def render_open(self) -> bytes:
        """The page in the OpenMetrics format, which supports exemplars."""
        generate: Callable[..., bytes] = generate_open_metrics
        # Other ways of escaping change the colon in names.
        return generate(self.registry, escaping=ALLOWUTF8)


class Processes(Collector):
    """Processor time and memory of the front and of the added processes."""

    def __init__(self) -> None:
        self._pids = {FRONT: os.getpid()}

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
