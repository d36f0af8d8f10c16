"""What the benchmark of standing streams measures, in virtual time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch.tiny_model import write_tiny_model
from weft.bench.freeze import FreezeLoad, FreezeRun, LoadPlayer, PrefillVariant, figures
from weft.cli.bench import bench
from weft.config.options import SettingsError
from weft.engine.engine import Engine
from weft.scheduler.pace.step_cost import CostModel
from weft.scheduler.settings import SchedulerSettings
from weft.sim.cost import CostRunner, TrueLengths, VirtualClock

COST = CostModel(0.01, 0.001, 0.0)  # seconds for a step, a token, a pair
LOAD = FreezeLoad(
    num_streams=3,
    stream_prompt_len=4,
    stream_output_len=100,
    num_prompts=4,
    prompt_len=200,
    output_len=5,
    at_once=2,
)


def play(variant: PrefillVariant) -> FreezeRun:
    clock = VirtualClock()
    lengths = TrueLengths()
    for id in range(100):
        lengths.add(id, 10_000)  # all end by what they may have
    settings = SchedulerSettings(
        num_pages=2_000,
        page_size=1,
        max_running_requests=8,
        context_length=512,
        vocab_size=100,
        chunked_prefill_size=variant.chunk or -1,
        mixed_chunk=variant.mixed,
        aging_s=0.0,
    )

    def fail(exc: Exception) -> None:
        raise exc

    engine = Engine(
        settings, CostRunner(COST, clock, lengths), clock=clock, overlap=0, on_failure=fail
    )
    trial = LoadPlayer(engine, clock, LOAD, settings.vocab_size, seed=1).play()
    assert not engine.has_work
    return trial


def test_a_whole_prompt_holds_streams_up_for_as_long_as_it_takes() -> None:
    trial = play(PrefillVariant(None, mixed=False))
    assert max(trial.alone_gaps_s) == pytest.approx(0.013)
    assert max(trial.gaps_s) >= 0.2  # the step of a prompt of 200 tokens
    assert len(trial.ttft_s) == 4
    assert trial.num_tokens == 3 * (4 + 100) + 4 * (200 + 5)
    assert trial.seconds > sum(4 * [0.2])


@pytest.mark.parametrize("chunk", [25, 50])
def test_a_chunk_bounds_the_gaps_only_in_mixed_steps(chunk: int) -> None:
    mixed = play(PrefillVariant(chunk, mixed=True))
    apart = play(PrefillVariant(chunk, mixed=False))
    assert max(mixed.gaps_s) == pytest.approx(0.01 + 0.001 * chunk, abs=0.01)
    assert max(apart.gaps_s) > 0.2
    assert figures([mixed]).p99_s < figures([apart]).p99_s


def test_figures_are_of_all_runs_together() -> None:
    runs = [
        FreezeRun([1.0], [1.0] * 49 + [5.0], [2.0], 100, 10.0),
        FreezeRun([2.0], [1.0] * 50, [4.0], 300, 10.0),
    ]
    found = figures(runs)
    assert found.p50_s == 1.0
    assert found.longest_s == 5.0
    assert found.ttft_s == 3.0
    assert found.tokens_per_s == 20.0
    assert found.ratio == found.p99_s / found.alone_p99_s


def test_the_verb_prints_a_line_for_each_variant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    path = tmp_path / "out.json"
    small = [
        "--streams",
        "2",
        "--prompts",
        "2",
        "--prompt-len",
        "20",
        "--output-len",
        "2",
        "--stream-len",
        "120",
        "--rounds",
        "1",
    ]
    engine = [
        "--load-format",
        "dummy",
        "--threads",
        "1",
        "--kv-tokens",
        "4096",
        "--max-running-requests",
        "8",
    ]
    assert (
        bench(
            [
                "freeze",
                str(model),
                "--chunks",
                "default,16,none",
                *small,
                *engine,
                "--json",
                str(path),
            ]
        )
        == 0
    )
    names = [one["variant"] for one in json.loads(path.read_text())["results"]]
    assert names[0] == "default, mixed on"
    assert names[1:] == ["16, mixed off", "16, mixed on", "none, mixed off", "none, mixed on"]
    assert "p99 / alone" in capsys.readouterr().out
    with pytest.raises(SettingsError, match="--chunks has 'x'"):
        bench(["freeze", str(model), "--chunks", "x", *engine])
    with pytest.raises(SettingsError, match="--stream-len is 1,000,000"):
        bench(["freeze", str(model), *small, "--stream-len", "1000000", *engine])
    with pytest.raises(SettingsError, match="at most"):
        bench(["freeze", str(model), "--prompt-len", "1000000", *engine])
    with pytest.raises(SettingsError, match="--stream-len is 72"):
        bench(["freeze", str(model), "--stream-len", "72", *engine])
