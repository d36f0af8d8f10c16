"""The metrics of a server with several models: its own numbers, and all on one page.

Families of one name are joined; each sample of a model has the label `model_name`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import generate_latest as generate_open_metrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from weft.observe.metrics import FRONT, HttpMetrics, Maker, Processes

LABEL = "model_name"


class HouseMetrics:
    """The numbers that belong to no model: the HTTP edge, and which models are in memory."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        make = Maker(self.registry, "")
        self.http = HttpMetrics(make)
        self._refused = make.counter("refused", "What exceeded a limit.", "limit")
        self.loads = make.counter("model_loads", "Loads of models.", LABEL)
        self.unloads = make.counter("model_unloads", "Unloads of models.", LABEL, "why")
        self.failures = make.counter("model_failures", "Loads that failed, lost engines.", LABEL)
        self.load_s = make.histograms("model_load_seconds", "Time of a load.", "")
        self.wait_s = make.histograms(
            "model_wait_seconds", "Time that requests waited for their model.", ""
        )
        self.bytes = make.gauge("model_memory_bytes", "Memory of a model, at most.", LABEL)
        self.budget = make.gauge("memory_budget_bytes", "Memory that all models may take.")
        self.waiting = make.gauge("model_waiting_requests", "Requests that wait for it.", LABEL)
        self.registry.register(Processes())

    def refused(self, limit: str) -> None:
        """Something exceeded this limit, a field of `config.limits.Limits`."""
        self._refused.labels(limit).inc()


class _Joined(Collector):
    def __init__(self, own: CollectorRegistry, models: Mapping[str, CollectorRegistry]) -> None:
        self._registries = {"": own, **models}

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for name, registry in self._registries.items():
            for family in registry.collect():
                joined = families.get(family.name)
                if joined is None:
                    joined = Metric(family.name, family.documentation, family.type)
                    families[family.name] = joined
                joined.samples += _labelled(family.samples, name)
        yield from families.values()


def _labelled(samples: list[Sample], name: str) -> Iterator[Sample]:
    """The samples with the name of their model; "": they belong to the front."""
    for sample in samples:
        if name and sample.labels.get("component") == FRONT:
            continue
        if name and LABEL not in sample.labels:
            sample = sample._replace(labels={**sample.labels, LABEL: name})
        yield sample


def joined_page(
    own: CollectorRegistry, models: Mapping[str, CollectorRegistry], *, is_open: bool
) -> bytes:
    """The page for Prometheus. `is_open`: in the OpenMetrics format."""
    joined = CollectorRegistry(auto_describe=False)
    joined.register(_Joined(own, models))
    if is_open:
        generate: Callable[..., bytes] = generate_open_metrics
        return generate(joined, escaping=ALLOWUTF8)
    return generate_latest(joined)
