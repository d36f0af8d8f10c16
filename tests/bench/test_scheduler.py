from __future__ import annotations

from weft.bench.scale import scale_figures
from weft.bench.scheduler import measure
from weft.scheduler import policies


def test_all_figures_are_measured_in_a_small_scene() -> None:
    figures = {figure.name: figure for figure in measure(steps=3, sequences=2_000, orders=(50,))}
    assert len(figures) == 5 + 2 * 3 + 1
    for figure in figures.values():
        assert 0 < figure.p5 <= figure.median <= figure.p95, figure
    assert "decode step, page 16" in figures


def test_the_scene_of_many_requests_is_measured_under_every_policy_that_admits() -> None:
    figures = {
        figure.name: figure for figure in scale_figures(num_running=40, num_waiting=300, family=200)
    }
    admitting = set(policies.names()) - {"static"}
    assert {f"first admission, {name}" for name in admitting} < set(figures)
    assert "decode step, 40 running, 300 waiting" in figures
    assert "200 get a shared prefix" in figures
