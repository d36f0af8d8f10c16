"""Curves of one or several runs, with matplotlib (an optional dependency)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.config.options import SettingsError
from weft.sim.report import e2e_of, ttft_of
from weft.sim.run import Record

PERCENTS = np.linspace(0.5, 99.5, 199)
TITLES = ("TTFT", "ITL", "E2E")


def plot(name: str, labels: Sequence[str], records: Sequence[Record]) -> None:
    """Write an image with the cumulative distributions of TTFT, ITL and E2E. Raises
    SettingsError."""
    try:
        from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]
    except ImportError as exc:
        raise SettingsError("--plot needs matplotlib: pip install matplotlib") from exc
    figure = Figure(figsize=(12, 4), layout="constrained")
    all_axes = figure.subplots(1, len(TITLES))
    for axes, title in zip(all_axes, TITLES, strict=True):
        for label, record in zip(labels, records, strict=True):
            curve = _curve(record, title)
            axes.plot(curve, PERCENTS, label=label)
        # The slowest requests take a hundred times as long as the fastest: a logarithmic axis.
        axes.set(
            title=title,
            xlabel="seconds",
            ylabel="% at most",
            xscale="log",
        )
        axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(name)
    except (OSError, ValueError) as exc:
        raise SettingsError(f"cannot write {name}: {exc}") from exc


def _curve(record: Record, title: str) -> list[float]:
    """The values in seconds at PERCENTS."""
    if title == "ITL":
        return [record.gaps.percentile(percent) for percent in PERCENTS.tolist()]
    values = e2e_of(record)
    if title == "TTFT":
        values = ttft_of(record)
    values = values[~np.isnan(values)]
    if not len(values):
        return [float("nan")] * len(PERCENTS)
    curve: list[float] = np.percentile(values, PERCENTS).tolist()
    return curve
