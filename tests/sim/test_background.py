"""A batch beside traffic, in virtual time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.sim.scene import SCENE
from weft.cli.main import main
from weft.scheduler.pace.step_cost import CostModel
from weft.sim.report import Slo, describe, summarize
from weft.sim.run import simulate
from weft.sim.synthetic import BackgroundTraffic, Traffic, synthetic, with_batch

SETTINGS = replace(
    SCENE,
    num_pages=4_000,
    context_length=2_048,
    chunked_prefill_size=512,
    mixed_chunk=True,
    max_slowdown=2.0,
)
COST = CostModel(0.004, 0.0005)
TRAFFIC = Traffic(requests=40, rate=4.0, input_len="100", output_len="40", max_tokens=40)
BATCH = BackgroundTraffic(background=400, background_input_len="100", background_output_len="40")


def test_a_batch_fills_what_the_traffic_leaves() -> None:
    alone = summarize(simulate(SETTINGS, COST, synthetic(TRAFFIC)), Slo())
    record = simulate(SETTINGS, COST, with_batch(synthetic(TRAFFIC), BATCH, 0))
    beside = summarize(record, Slo())
    assert alone.background is None
    assert beside.background is not None
    # Figures of the traffic are those of its own requests.
    assert (beside.requests, beside.finished) == (40, 40)
    assert beside.background.requests == beside.background.finished == 400
    assert beside.background.both_total_per_s > 1.5 * alone.total_per_s
    assert beside.itl_s[2] < 3 * alone.itl_s[2]
    assert "400 of 400 requests finished" in describe(beside)


def test_lines_come_when_earlier_ones_have_ended_and_turns_follow_their_own_chats() -> None:
    few = replace(BATCH, background=20, background_open=4)
    chats = replace(TRAFFIC, requests=10, turns=3, think=0.1)
    record = simulate(SETTINGS, COST, with_batch(synthetic(chats), few, 0))
    lines = np.flatnonzero(record.background)
    assert lines.tolist() == [*range(20)]
    for line in lines[4:]:
        assert record.sent_s[line] == pytest.approx(record.end_s[line - 4])
    assert (record.state == 1).all()


def test_a_batch_alone_is_reported_as_any_traffic() -> None:
    record = simulate(SETTINGS, COST, with_batch([], BATCH, 0))
    summary = summarize(record, Slo())
    assert summary.background is None
    assert summary.finished == 400
    assert summary.itl_s[0] > 0


def test_the_command_line_plays_a_batch(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--requests", "20", "--rate", "50", "--background", "30", "--mixed-chunk", "on"]
    assert main(["sim", *words, "--max-slowdown", "2"]) == 0
    assert "30 of 30 requests finished" in capsys.readouterr().out
