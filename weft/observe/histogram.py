"""Histograms that take many values at once, for the latencies of a whole step,
and remember an example for each bucket.

An *exemplar* is one value with the name of its request:
whoever sees a slow bucket can look that request up.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0),
)
TOKENS = tuple(float(2**power) for power in range(18))
COUNTS = tuple(float(2**power) for power in range(7))
MAX_EXEMPLAR_LEN = 120  # of a name; the format allows 128 with its label


class Histogram:
    """Counts of values by bucket."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = list(bounds)  # for one value: numpy takes ten times as long for it
        self._edges = np.asarray(bounds)  # for many
        self._counts = np.zeros(len(bounds) + 1, dtype=np.int64)  # the last is above all bounds
        self._exemplars: list[Exemplar | None] = [None] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, values: Sequence[float]) -> None:
        if values:
            self._counts += np.bincount(
                np.searchsorted(self._edges, values), minlength=len(self._counts)
            )
            self.sum += float(sum(values))

    def observe_one(self, value: float, rid: str = "") -> None:
        """One value, and the name of its request."""
        bucket = bisect_left(self._bounds, value)
        self._counts[bucket] += 1
        self.sum += value
        if rid and len(rid) <= MAX_EXEMPLAR_LEN:
            self._exemplars[bucket] = Exemplar({"rid": rid}, value, time.time())

    @property
    def buckets(self) -> list[tuple[str, float, Exemplar | None]]:
        """Upper bound, number of values up to it,
        and an example of those above the bound before.
        """
        names = [*map(str, self._bounds), "+Inf"]
        return list(
            zip(names, np.cumsum(self._counts).astype(float).tolist(), self._exemplars, strict=True)
        )


class Histograms(Collector):
    """Histograms of one name, told apart by one label.
    Past `most` of them the rest share the label "other".
    """

    def __init__(
        self, name: str, help: str, bounds: Sequence[float], model_name: str, label: str, most: int
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
