"""The metrics of the front of several servers. `render` makes the page for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weft.observe.engine_numbers import PREFIX
from weft.observe.metrics import SECONDS, HttpMetrics, Maker, Processes
from weft.relay.pool import RelayPool

# The reasons why a decode server computes a prompt in place of a prefill server.
ALONE_REASONS = ("no_server", "refused", "lost", "late")


class RelayMetrics:
    def __init__(self, pools: Sequence[RelayPool]) -> None:
        self.registry = CollectorRegistry()
        make = Maker(self.registry, "")
        self.http = HttpMetrics(make)
        self._refused = make.counter("refused", "What exceeded a limit.", "limit")
        self._alone = make.counter(
            "route_alone",
            "Prompts that the decode server computes, because no prefill server has.",
            "reason",
        )
        self.prefill_s = make.histogram(
            "route_prefill_seconds", "Time from a request to the end of its prefill.", SECONDS
        )
        self._broken = make.counter(
            "route_broken", "Requests whose answer has broken off, or never came.", "role"
        )
        self._elsewhere = make.counter(
            "route_elsewhere",
            "Requests for which another server had more of the prompt than the one that got them.",
        )
        for reason in ALONE_REASONS:  # on the page from the start
            self._alone.labels(reason)
        self.registry.register(ServerNumbers(pools))
        self.registry.register(Processes())

    def refused(self, limit: str) -> None:
        """Something exceeded this limit, a field of `config.limits.Limits`."""
        self._refused.labels(limit).inc()

    def alone(self, reason: str) -> None:
        """`reason` is one of `ALONE_REASONS`."""
        self._alone.labels(reason).inc()

    def sent_elsewhere(self) -> None:
        self._elsewhere.inc()

    def broken(self, role: str) -> None:
        self._broken.labels(role).inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)


class ServerNumbers(Collector):
    """Metrics of each server, read from the pools when they are collected."""

    def __init__(self, pools: Sequence[RelayPool]) -> None:
        self._pools = pools

    def collect(self) -> Iterator[Metric]:
        labels = ["role", "server"]
        up = GaugeMetricFamily(
            f"{PREFIX}route_server_up", "1 while a server gets requests.", labels=labels
        )
        sent = CounterMetricFamily(
            f"{PREFIX}route_requests",
            "Requests that a server was given, also those that did not reach it.",
            labels=labels,
        )
        num_open = GaugeMetricFamily(
            f"{PREFIX}route_open_requests", "Requests that it has not answered.", labels=labels
        )
        for pool in self._pools:
            for server in pool.servers:
                values = (pool.role, server.address.url)
                up.add_metric(values, float(server.is_up))
                sent.add_metric(values, server.num_sent)
                num_open.add_metric(values, pool.router.engines[server.rank].num_open)
        yield from (up, sent, num_open)
