from __future__ import annotations

from weft.bench.scheduler import measure


def test_all_figures_are_measured_in_a_small_scene() -> None:
    figures = {figure.name: figure for figure in measure(steps=3, sequences=2_000, orders=(50,))}
    assert len(figures) == 5 + 2 * 3 + 1
    for figure in figures.values():
        assert 0 < figure.p5 <= figure.median <= figure.p95, figure
    assert "decode step, page 16" in figures
