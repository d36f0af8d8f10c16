"""Pictures in simulated requests: what the encoder costs, its budget, and journals of requests with
some."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sim.records import Records
from tests.sim.scene import SCENE
from weft.cli.sim import sim
from weft.config.media import MediaRules
from weft.config.options import SettingsError
from weft.journal.recorder import RecordedEngine
from weft.messages.media import MediaItem
from weft.scheduler.pace.step_cost import CostModel
from weft.scheduler.settings import SchedulerSettings
from weft.sim.cost import CostRunner, TrueLengths, VirtualClock
from weft.sim.encoder import EncoderCost, read_encoder_cost
from weft.sim.fit import fit_encoder
from weft.sim.journal import read_journal
from weft.sim.run import EngineTarget, Record, Run, simulate
from weft.sim.synthetic import PictureTraffic, Traffic, synthetic
from weft.sim.trace import PICTURE, Arrival, Segment, TokenSource

SETTINGS = replace(SCENE, num_pages=800, page_size=1, max_slowdown=-1.0, media=MediaRules())
STEP = CostModel(1.0, 0.0, 0.0)  # every step takes a second
ENCODER = EncoderCost(2.0, 0.25)  # a picture of 16 tokens takes six


def seeing(time_s: float, *pictures: int, key: int = 0, output_len: int = 3) -> Arrival:
    """A request with four tokens of text, then pictures of 16 tokens, then four of text."""
    items: list[MediaItem] = []
    for place, number in enumerate(pictures):
        digest = number.to_bytes(32, "big")
        items.append(MediaItem(kind="image", digest=digest, start=4 + 16 * place, length=16))
    return Arrival(
        time_s,
        (Segment(key, 4), Segment(PICTURE, 16 * len(items)), Segment(1_000 + key, 4)),
        output_len,
        100,
        media=tuple(items),
    )


def play(*arrivals: Arrival, settings: SchedulerSettings = SETTINGS) -> Record:
    return simulate(settings, STEP, arrivals, overlap=False, encoder_cost=ENCODER)


def test_a_picture_is_encoded_once_and_costs_what_the_encoder_does() -> None:
    record = play(seeing(0.0, 7), seeing(50.0, 7), seeing(100.0, 7, key=1), seeing(150.0, 8))
    waits = (record.first_s - record.sent_s).tolist()
    assert waits == [7.0, 1.0, 1.0, 7.0]  # cached; encoded before; another picture
    assert record.cached_len.tolist() == [0, 23, 0, 4]
    assert record.machine.encoder_runs == 2
    assert record.machine.encoded_tokens == 32
    assert record.machine.encoder_s == 12.0
    assert record.machine.encoder_hits == 1


def test_the_budget_of_the_encoder_decides_how_much_a_step_encodes() -> None:
    wide = play(seeing(0.0, 1, 2))
    narrow = play(seeing(0.0, 1, 2), settings=replace(SETTINGS, max_encoder_tokens=16))
    assert wide.first_s[0] == 13.0  # one step for both
    assert narrow.first_s[0] == 14.0
    nothing_kept = replace(SETTINGS, encoder_cache_tokens=0, prefix_cache=False)
    both = [seeing(0.0, 1), seeing(50.0, 1)]
    assert play(*both, settings=replace(SETTINGS, prefix_cache=False)).machine.encoder_runs == 1
    assert (
        play(*both, seeing(100.0, 2), seeing(150.0, 1), settings=nothing_kept).machine.encoder_runs
        == 3
    )


def test_the_encoder_works_behind_the_steps_of_running_requests() -> None:
    bounded = replace(SETTINGS, max_slowdown=2.0)
    stream = Arrival(0.0, (Segment(5, 20),), 60, 100)
    slow = EncoderCost(20.0, 0.0)
    gaps: list[float] = []
    for settings in (SETTINGS, bounded):
        record = simulate(
            settings, STEP, [stream, seeing(10.0, 1)], overlap=False, encoder_cost=slow
        )
        assert record.machine.encoder_runs == 1
        assert record.machine.encoder_s == pytest.approx(20.0)
        gaps.append(record.gaps.percentile(100))
    assert gaps[0] > 20.0
    assert gaps[1] < 3.0


def test_a_journal_with_pictures_is_simulated_as_it_was() -> None:
    records = Records()
    clock = VirtualClock()
    lengths = TrueLengths()
    runner = CostRunner(STEP, clock, lengths, encoder_cost=ENCODER)
    engine = RecordedEngine(
        replace(SETTINGS, max_slowdown=2.0),
        runner,
        clock=clock,
        overlap=0,
        on_failure=lambda exc: None,
        sink=records,
        max_bytes=1 << 30,
    )
    engine.start_over()
    sent = [seeing(9.37 * number, number % 5, key=number, output_len=20) for number in range(9)]
    Run(EngineTarget(engine, clock), TokenSource(SETTINGS.vocab_size), lengths).play(sent)
    journal = read_journal(records)
    assert [one.media for one in journal.arrivals] == [one.media for one in sent]
    assert sum(one.num_items for one in journal.encoder) == 5
    fitted = fit_encoder(journal.encoder)
    assert fitted.seconds(1, 16) == pytest.approx(6.0)
    assert {round(step.seconds, 6) for step in journal.steps} == {1.0}  # without the encoder
    again = simulate(journal.settings, STEP, journal.arrivals, overlap=False, encoder_cost=fitted)
    assert again.end_s.tolist() == pytest.approx(journal.record.end_s.tolist())
    assert again.machine.encoder_s == pytest.approx(runner.encoder.busy_s)
    forgetful = replace(journal.settings, encoder_cache_tokens=0)
    what_if = simulate(forgetful, STEP, journal.arrivals, overlap=False, encoder_cost=fitted)
    assert what_if.machine.encoder_runs > 5


def test_pictures_are_drawn_beside_the_same_text() -> None:
    traffic = Traffic(requests=200, turns=3)
    plain = list(synthetic(traffic))
    pictures = PictureTraffic(images=1.5, image_tokens="uniform:10:20", image_pool=4)
    seen = list(synthetic(traffic, pictures=pictures))
    assert [one.time_s for one in seen] == [one.time_s for one in plain]
    num_new = 0
    for one, text in zip(seen, plain, strict=True):
        without = tuple(part for part in one.prompt if part[0] != PICTURE)  # type: ignore[index]
        assert without == text.prompt
        begin = 0
        places: list[tuple[int, int]] = []
        for key, length in one.prompt:  # type: ignore[misc]
            if key == PICTURE:
                places.append((begin, length))
            begin += length
        assert places == [(item.start, item.length) for item in one.media]
        num_new += len(one.media) - (len(seen[one.after].media) if one.after >= 0 else 0)
    assert num_new / len(seen) == pytest.approx(1.5, rel=0.2)
    assert len({item.digest for one in seen for item in one.media}) == 4


def test_a_cost_of_the_encoder_that_cannot_be_meant_is_refused() -> None:
    assert read_encoder_cost("0.5,0.001") == EncoderCost(0.5, 0.001)
    for text in ("gpus", "1", "1,2,3", "-1,0", "nan,0"):
        with pytest.raises(SettingsError, match="--encoder-cost is"):
            read_encoder_cost(text)
    with pytest.raises(SettingsError, match="--images is of synthetic traffic"):
        sim(["--images", "1", "--trace", "trace.csv"])


def test_the_command_says_what_the_encoder_did(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--requests", "20", "--images", "1", "--image-pool", "3", "--output-len", "4"]
    assert sim([*words, "--encoder-cost", "0.5,0"]) == 0
    assert "encoder      3 runs, 768 tokens in 1.50 s; " in capsys.readouterr().out
    assert sim([*words, "--compare", "max_encoder_tokens=256,2048"]) == 0
    assert "enc. runs" in capsys.readouterr().out
