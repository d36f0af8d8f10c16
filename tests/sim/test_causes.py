"""Why prompts of a simulated run were not cached, and what other settings would have saved."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.scheduler.recorded import RecordedWorld
from tests.scheduler.scenes import settings as scene
from weft.cli.main import main
from weft.engine.engine import Engine
from weft.sim.causes import CauseSums, ExplainedEngine, savings
from weft.sim.cost import PRESETS
from weft.sim.run import Clock, Labels, Record, simulate
from weft.sim.trace import EOS, Arrival, Segment

SETTINGS = replace(
    scene(), num_pages=400, context_length=600, vocab_size=1_000, eos_token_ids=(EOS,)
)
HEAD = 1
TAIL = 2
CLOCK = 3


def arrival(at_s: float, clock: int) -> Arrival:
    """A prompt with a clock behind its head, and the same text after it."""
    prompt = (Segment(HEAD, 64), Segment(100 + clock, 8), Segment(TAIL, 96))
    return Arrival(time_s=at_s, prompt=prompt, output_len=2, max_new_tokens=2)


def explained(*arrivals: Arrival) -> CauseSums:
    sums = CauseSums()

    def around(engine: Engine, clock: Clock) -> ExplainedEngine:
        return ExplainedEngine(engine, clock, sums)

    simulate(SETTINGS, PRESETS["cpu"], arrivals, around=around)
    return sums


def test_a_clock_in_each_prompt_is_the_cause_that_cost_the_most() -> None:
    sums = explained(*(arrival(100.0 * number, number) for number in range(4)))
    changed = sums.by_cause["changed"]
    assert changed.num_requests == 3
    assert changed.missed_tokens == 3 * 96
    assert changed.missed_s > 0
    assert sums.by_cause["first seen"].num_requests == 1
    assert sums.num_prompt_tokens == 4 * 168
    lines = sums.lines().splitlines()
    assert lines[2].split()[:5] == ["changed", "3", "288", "42.9%", f"{changed.missed_s:,.1f}"]


def test_the_same_prompts_miss_nothing() -> None:
    sums = explained(*(arrival(100.0 * number, 7) for number in range(3)))
    assert sum(one.missed_tokens for one in sums.by_cause.values()) == 0
    assert sums.by_cause["found"].num_requests == 2


def test_a_run_that_computes_less_of_prompts_would_have_saved() -> None:
    records = []
    for cached in (0, 50, -25):
        nothing = np.zeros(2)
        counts = np.zeros(2, dtype=np.int64)
        record = Record(
            sent_s=nothing,
            first_s=nothing,
            end_s=nothing,
            prompt_len=counts + 100,
            output_len=counts,
            cached_len=np.array([cached, 0]),
            retractions=counts,
            state=counts,
            tenant=Labels(counts, [""]),
            reason=Labels(counts, []),
            background=counts > 0,
        )
        records.append(record)
    assert savings(["fcfs", "lpm", "worse"], records) == [
        "lpm would have saved 25.0% of prefill (50 tokens)",
        "worse would have computed 12.5% more of prompts (25 tokens)",
    ]


def test_the_command_prints_causes_and_what_others_would_have_saved(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["sim", "--rate", "50", "--requests", "30", "--prefixes", "3", "--why", "on"]
    assert main(asked) == 0
    told = capsys.readouterr().out
    assert "tokens missed" in told
    assert "lpm would have " in told
    assert "twice the KV memory would have " in told
    assert main([*asked, "--compare", "policy=fcfs,lpm"]) == 0
    told = capsys.readouterr().out
    assert told.count("tokens missed") == 2
    assert "policy=lpm would have " in told
    assert "twice" not in told


@pytest.mark.parametrize("other", [("--page", "on"), ("--replicas", "2")])
def test_what_cannot_be_explained_together_is_refused(
    other: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sim", "--requests", "2", "--why", "on", *other]) == 2
    told = capsys.readouterr().err
    assert "--why" in told
    assert other[0] in told


def test_a_journal_tells_later_why_a_request_was_slow(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    world = RecordedWorld(scene(num_pages=400, context_length=600))
    for clock in (1, 2):
        prompt = [*range(100, 140), clock, *range(200, 280)]
        world.send(prompt, max_new_tokens=3, ignore_eos=True, rid=f"turn-{clock}")
        world.run_dry()
    journal = tmp_path_factory.mktemp("journal") / "j"
    world.write(journal)
    assert main(["replay", str(journal), "--why", "turn-2"]) == 0
    told = capsys.readouterr().out
    assert "cache: changed: its first 40 tokens are those of request 'turn-1'" in told
    assert "  cost: 80 tokens" in told
    assert "  here: [2, 200, " in told
    assert "  time: " in told
    assert "    prefill_between" in told
    assert main(["replay", str(journal), "--why", "nobody"]) == 0
    assert "no request named 'nobody'" in capsys.readouterr().out
