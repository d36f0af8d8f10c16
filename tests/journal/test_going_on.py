"""States within a journal: where a replay begins that is asked for one step, and goes on behind
damage."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path

import msgspec
import pytest

from tests.scheduler.recorded import RecordedWorld
from tests.scheduler.scenes import settings
from weft.cli.main import main
from weft.journal.file import HEAD_BYTES, MAGIC, JournalReader
from weft.journal.records import BEGINNING, Began
from weft.journal.replay import BadJournal, Replay, last_beginning

Told = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def world() -> RecordedWorld:
    """Some 250 steps of a queue that never ends, with a state in the midst, or several."""
    world = RecordedWorld(
        settings(num_pages=150, chunked_prefill_size=16, mixed_chunk=True),
        depth=1,
        state_bytes=20_000,
    )
    shared = list(range(40))
    for number in range(250):
        if len(world.scheduler.requests) < 6:
            world.send([*shared, number % 7, number], max_new_tokens=20, ignore_eos=True)
        world.step()
    world.run_dry()
    return world


@pytest.fixture(scope="module")
def whole(world: RecordedWorld, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("journal") / "j"
    world.write(path)
    return path.read_bytes()


@pytest.fixture
def path(whole: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "j"
    path.write_bytes(whole)
    return path


def offsets(path: Path) -> list[int]:
    """Where records begin."""
    found = []
    with JournalReader(path) as reader:
        at = reader.offset
        for _ in reader:
            found.append(at)
            at = reader.offset
    return found


def states(path: Path) -> dict[int, Began]:
    """The records from which a replay can begin, by their place."""
    found = {}
    with JournalReader(path) as reader:
        at = reader.offset
        for record in reader:
            if record.startswith(BEGINNING):
                found[at] = msgspec.msgpack.decode(record, type=Began)
            at = reader.offset
    return found


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_states_stand_at_intervals_and_change_no_decision(world: RecordedWorld, path: Path) -> None:
    places = sorted(states(path))
    assert len(places) > 1
    for before, place in itertools.pairwise(places):
        assert place - before >= 20_000
    world.replay(check=True)


def test_a_replay_from_any_state_decides_what_was_recorded(
    world: RecordedWorld, path: Path
) -> None:
    for place, began in states(path).items():
        with JournalReader(path) as reader:
            reader.go_to(place)
            replay = Replay(reader, check=True)
            assert replay.first_step == began.step
            assert replay.run(), replay.difference
        assert replay.engine.scheduler.stats() == world.scheduler.stats()


def test_a_replay_up_to_a_step_begins_with_the_last_state_before(path: Path, told: Told) -> None:
    places = states(path)
    begun = [began.step for began in places.values()]
    for step in (0, begun[1] - 1, begun[1], begun[-1] + 2):
        with JournalReader(path) as reader:
            start, damage = last_beginning(reader, step)
        assert places[start].step == max(at for at in begun if at <= step)
        assert not damage
        assert main(["replay", str(path), "--until", str(step)]) == 0
        out = told.readouterr().out
        assert f"step {step}: " in out
        num_steps = int(re.search(r"([\d,]+) steps? and", out)[1].replace(",", ""))  # type: ignore[index]
        assert num_steps == step + 1 - places[start].step


def test_a_state_of_another_weft_is_passed_over(path: Path, world: RecordedWorld) -> None:
    other = RecordedWorld(settings())
    for record in world.records:
        one = record
        if record.startswith(BEGINNING):
            began = msgspec.msgpack.decode(record, type=Began)
            one = msgspec.msgpack.encode(msgspec.structs.replace(began, weft="9.9.9"))
        other.records.append(one)
    del other.records[0]  # it has begun itself
    other.write(path)
    with JournalReader(path) as reader:
        assert last_beginning(reader, 100) == (len(MAGIC), [])


def test_what_follows_damage_is_replayed_from_the_next_state_on(
    path: Path, whole: bytes, told: Told
) -> None:
    rng = random.Random(3)
    places = sorted(states(path))
    begins = offsets(path)
    hits = [rng.randrange(len(MAGIC) * 8, len(whole) * 8) for _ in range(12)]
    hits += [(place + within) * 8 for place in places[:2] for within in (0, HEAD_BYTES + 9)]
    for bit in hits:
        path.write_bytes(whole)
        flip(path, bit)

        status = main(["replay", str(path)])

        out = told.readouterr().out
        hit = max(at for at in begins if at <= bit // 8)
        following = [place for place in places if place > hit]
        assert status == 2
        assert f"the journal is damaged at byte {hit:,} " in out
        if following:
            assert f"(byte {following[0]:,})" in out
            assert out.rstrip().endswith("every decision is as recorded")
        else:
            assert "no later state of the engine" in out


def test_each_of_several_damages_is_named(path: Path, told: Told) -> None:
    begins = offsets(path)
    places = sorted(states(path))
    hits = [begins[20], next(at for at in begins if at > places[1])]
    for at in hits:
        flip(path, at * 8 + 3)
    assert main(["replay", str(path)]) == 2
    out = told.readouterr().out
    assert [f"damaged at byte {at:,}" in out for at in hits] == [True, True]


def test_a_step_within_what_is_damaged_is_said_not_to_be_there(path: Path, told: Told) -> None:
    behind = sorted(began.step for began in states(path).values())[1]
    flip(path, offsets(path)[20] * 8)
    assert main(["replay", str(path), "--until", str(behind - 1)]) == 2
    assert f"step {behind - 1} is in the damaged part" in told.readouterr().out
    # A step behind it is shown, and the damage before it is told.
    assert main(["replay", str(path), "--until", str(behind + 5)]) == 2
    out = told.readouterr().out
    assert "damaged at byte" in out
    assert f"step {behind + 5}: " in out


@pytest.fixture
def told(capsys: Told) -> Told:
    return capsys


def test_a_control_request_that_is_not_here_ends_the_replay() -> None:
    world = RecordedWorld(settings(outside_control=("nowhere:ROWS",)))
    world.send([1, 2, 3], max_new_tokens=2)
    world.run_dry()
    with pytest.raises(BadJournal, match=r"its control request is not here: .*'nowhere'"):
        world.replay()
