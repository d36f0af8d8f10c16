"""The decision journal: recorded while serving, replayed without a model, compared bit for bit."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.scheduler.recorded import RecordedWorld
from tests.scheduler.scenes import settings
from tests.scheduler.world import World
from tests.seeds import slow
from weft.cli.main import main
from weft.engine.explain import trace_request_flow
from weft.engine.guard import replace_unsent
from weft.journal.file import (
    HEAD_BYTES,
    MAGIC,
    OLD_MAGIC,
    JournalError,
    JournalReader,
    JournalWriter,
)
from weft.journal.replay import BadJournal, Replay
from weft.journal.snapshot import INSTANCE
from weft.memory.allocator import PageAllocator
from weft.messages.calls import CallFailed
from weft.messages.control import (
    AbortRequest,
    BlockInput,
    ContinueGeneration,
    FlushCache,
    GetState,
    GetStateReply,
    HealthCheck,
    PauseGeneration,
    SetPolicy,
    UnblockInput,
)
from weft.messages.replies import StepOutput
from weft.messages.requests import Abort, BatchGenerate
from weft.messages.status import UnreadableMessages
from weft.scheduler.admission import PrefillAdder

MIXED: dict[str, object] = {
    "mixed_chunk": True,
    "page_size": 4,
    "num_pages": 28,
    "context_length": 110,
}


def busy_world(
    depth: int = 0, fail_steps: set[int] | None = None, **changes: object
) -> RecordedWorld:
    """A world with chunks, retractions, aborts and a full queue behind it."""
    values = {
        "num_pages": 150,
        "schedule_conservativeness": 0.0,
        "chunked_prefill_size": 16,
        **changes,
    }
    world = RecordedWorld(settings(**values), depth, fail_steps)
    rng = random.Random(7)
    for _ in range(30):
        world.send(
            [rng.randrange(300) for _ in range(rng.randrange(1, 60))],
            max_new_tokens=rng.randrange(1, 60),
        )
        world.step()
        if rng.random() < 0.1:
            world.abort(Abort(ids=(rng.randrange(len(world.sent)),)))
    world.tell(GetState(call=1))
    world.tell(SetPolicy(call=3, policy="lpm"))
    world.tell(FlushCache(call=2, timeout_s=3.0))
    world.run_dry()
    return world


# The file


def test_a_file_gives_back_its_records(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "j")
    records = [os.urandom(n) for n in (0, 1, 100, 70_000)]
    for record in records:
        writer.append(record)
    writer.flush()
    with JournalReader(tmp_path / "j") as reader:
        assert list(reader) == records
    assert reader.damage is None
    assert reader.num_torn_bytes == 0
    assert reader.num_records == 4
    assert (tmp_path / "j").stat().st_mode & 0o777 == 0o600
    writer.close()


@pytest.mark.parametrize("cut", range(1, 18))
def test_a_last_record_that_was_not_finished_is_no_damage(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "j"
    writer = JournalWriter(path)
    writer.append(b"first")
    writer.append(b"second")
    writer.flush()
    writer.close()
    path.write_bytes(path.read_bytes()[:-cut])
    with JournalReader(path) as reader:
        assert list(reader) == [b"first"]
    assert reader.damage is None
    assert reader.num_torn_bytes == 18 - cut


def test_a_changed_bit_is_damage_wherever_it_is(tmp_path: Path) -> None:
    path = tmp_path / "j"
    writer = JournalWriter(path)
    records = [b"first", b"", b"a third that is longer", b"last"]
    for record in records:
        writer.append(record)
    writer.flush()
    writer.close()
    whole = path.read_bytes()
    begins = [
        len(MAGIC) + sum(HEAD_BYTES + len(one) for one in records[:n]) for n in range(len(records))
    ]
    for bit in range(8 * len(MAGIC), 8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with JournalReader(path) as reader:
            read = list(reader)
        hit = max(n for n, begin in enumerate(begins) if begin <= bit // 8)
        assert read == records[:hit]
        assert reader.damage is not None
        assert reader.damage.offset == begins[hit]
        assert reader.damage.record == hit + 1
        assert reader.num_torn_bytes == 0


def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_bytes(OLD_MAGIC)
    with pytest.raises(JournalError, match="older weft"):
        JournalReader(path)
    path.write_bytes(b"something else")
    with pytest.raises(JournalError, match="not a journal"):
        JournalReader(path)
    with pytest.raises(JournalError, match=r"cannot read .*each load .* FOLDER/NAME/000001"):
        JournalReader(tmp_path)
    path.rename(tmp_path / "none.dp0")
    with pytest.raises(JournalError, match=r"cannot read .*the first one .*/none\.dp0"):
        JournalReader(tmp_path / "none")


def test_what_was_there_before_is_kept_as_file_1(tmp_path: Path) -> None:
    for text in (b"old", b"new"):
        writer = JournalWriter(tmp_path / "j")
        writer.append(text)
        writer.flush()
        writer.close()
    assert list(JournalReader(tmp_path / "j")) == [b"new"]
    assert list(JournalReader(tmp_path / "j.1")) == [b"old"]


def test_a_disk_that_fails_ends_the_journal_and_nothing_else(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="cannot write"):
        JournalWriter(tmp_path / "no" / "j")
    writer = JournalWriter(tmp_path / "j")
    os.close(writer._file)
    writer._file = os.open("/dev/full", os.O_WRONLY)
    for _ in range(3):
        writer.append(b"x" * 100)
        writer.flush()
    assert writer._file < 0


# Replay


@pytest.mark.parametrize("depth", [1, *slow([0, 2])])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mixed_chunk": True, "page_size": 4, "num_pages": 28, "context_length": 110},
        {"schedule_policy": "lpm"},
    ],
)
def test_a_replay_decides_the_same_bit_for_bit(depth: int, changes: dict[str, object]) -> None:
    world = busy_world(depth, **changes)
    stats = world.scheduler.stats()
    assert stats.total_retractions
    assert stats.total_aborted
    replay = Replay(world.records, check=True)
    assert replay.run(), replay.difference
    assert replay.num_steps == stats.total_steps
    assert replay.engine.scheduler.stats() == stats
    assert not replay.engine.has_work


def test_failed_steps_are_replayed_as_failures() -> None:
    world = busy_world(1, fail_steps={3, 20})
    assert len(world.failures) == 2
    replay = Replay(world.records)
    assert replay.run(), replay.difference
    assert replay.engine.scheduler.stats() == world.scheduler.stats()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_replies_that_could_not_be_sent_are_replayed_with_the_ends_that_they_were(
    depth: int,
) -> None:
    world = RecordedWorld(settings(num_pages=150, chunked_prefill_size=16), depth)
    rng = random.Random(depth)
    num_lost = 0

    for _ in range(20):
        world.send(
            [rng.randrange(300) for _ in range(rng.randrange(1, 40))],
            max_new_tokens=rng.randrange(4, 30),
        )
        for reply in world.engine.step():
            if isinstance(reply, StepOutput) and reply.ids and rng.random() < 0.3:
                num_lost += len(replace_unsent(reply, OSError("no room"), world.engine.lose)) + 1
    answer = world.engine.submit(GetState(call=1))
    assert isinstance(answer, GetStateReply)
    [instead] = replace_unsent(answer, OSError("no room"), world.engine.lose)
    assert isinstance(instead, CallFailed)
    while world.has_work:
        world.engine.step()
    assert num_lost > 3
    assert world.scheduler.counters.messages.num_failed > 3
    world.replay(check=True)


def test_a_replay_ends_well_wherever_the_journal_was_cut_off() -> None:
    world = busy_world(1)
    for end in (1, 2, 50, 101, 102, 103, 104, 105, len(world.records) - 1):
        replay = Replay(world.records[:end])
        assert replay.run(), replay.difference


@pytest.mark.parametrize("field", ["rows", "num_rows", "num_tokens", "slots"])
def test_a_replay_stops_at_the_first_decision_that_differs(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = busy_world()
    if field == "slots":
        alloc = PageAllocator.alloc
        monkeypatch.setattr(PageAllocator, "alloc", lambda self, n, ids: alloc(self, n, ids)[::-1])
    elif field == "num_tokens":
        monkeypatch.setattr(PrefillAdder, "_floor", lambda self, n: min(n, 15))
    elif field == "rows":
        monkeypatch.setattr("weft.memory.allocator.RowTable.alloc", lambda self: self._free.pop(0))
    else:
        monkeypatch.setattr(
            PrefillAdder,
            "_fits",
            lambda self, request, extend, reserve: self._is_alone and not self.can_run,
        )
    replay = Replay(world.records)
    assert not replay.run()
    assert replay.difference is not None
    assert replay.difference.field == field
    assert replay.difference.recorded != replay.difference.now
    assert replay.difference.step == replay.step


@pytest.mark.parametrize("depth", [0, 1])
def test_what_controls_the_flow_of_work_is_replayed(depth: int) -> None:
    world = RecordedWorld(settings(chunked_prefill_size=8), depth)
    world.tell(HealthCheck(call=1))
    world.step()
    members = [world.send(list(range(i, i + 20)), max_new_tokens=9) for i in range(3)]
    batch = [msgspec.structs.replace(world.sent[id], id=id + 10, input_ids=b"") for id in members]
    prompt = world.sent[0].input_ids
    world.tell(BatchGenerate(prompts=[prompt], requests=batch, prompt_of=[0, 0, 5]))
    for id in members:
        world.sent[id + 10], world.outputs[id + 10], world.prompts[id + 10] = (
            world.sent[id],
            [],
            world.prompts[0],
        )
    for message in (
        *(
            BlockInput(call=2),
            Abort(names=("r2",)),
            PauseGeneration(call=3, mode="retract"),
            HealthCheck(call=4),
        ),
        *(
            FlushCache(call=5),
            UnblockInput(call=6),
            UnreadableMessages(num=3),
            ContinueGeneration(call=7),
        ),
        *(
            SetPolicy("lpm", call=8),
            PauseGeneration(call=9, mode="in_place"),
        ),
        *(
            GetState(call=10),
            ContinueGeneration(call=11),
            AbortRequest("r11", call=12),
            PauseGeneration(call=13),
        ),
        ContinueGeneration(call=14),
    ):
        world.tell(message)
        world.step()
        world.step()
    world.run_dry()
    replay = Replay(world.records, check=True)
    assert replay.run(), replay.difference
    assert replay.num_requests == 6
    assert replay.engine.scheduler.stats() == world.scheduler.stats()


def test_an_input_that_is_asked_for_at_another_time_is_a_difference() -> None:
    world = busy_world()
    at = next(i for i, record in enumerate(world.records) if record.startswith(b"\x92\xa1m"))
    replay = Replay([*world.records[: at + 1], *world.records[at + 2 :]])
    assert not replay.run()
    assert replay.difference is not None
    assert replay.difference.field == "next event"
    assert replay.difference.now == "reads the clock"


def test_a_server_under_steady_load_keeps_a_journal_that_is_replayed_from_its_newest_file() -> None:
    world = RecordedWorld(
        settings(num_pages=150, chunked_prefill_size=16, mixed_chunk=True), depth=1, max_bytes=5_000
    )
    shared = list(range(40))
    for number in range(300):
        if len(world.scheduler.requests) < 6:
            world.send([*shared, number % 7, number], max_new_tokens=20, ignore_eos=True)
        world.step()
        assert world.scheduler.requests
    assert len(world.records.parts) > 3
    for began, *others in world.records.files:
        assert (
            sum(map(len, others)) < max(5_000, len(began)) + 2_000
        )  # a step more than there should be
    cached = world.scheduler.stats().total_cached_tokens
    assert (
        cached > 0.7 * world.scheduler.stats().total_prompt_tokens
    )  # no file has cost the cache anything
    world.run_dry()
    world.check_idle()
    world.check_outputs()
    world.replay(check=True)


def test_the_story_of_a_request_goes_on_in_the_next_file() -> None:
    world = RecordedWorld(settings(num_pages=190, context_length=190))
    world.put_aside_in_every_step()
    world.send([1], max_new_tokens=30, ignore_eos=True)
    world.run_dry()
    (told,) = trace_request_flow(world.replay().engine.scheduler, "r0", world.time)
    assert told.output_tokens == 30
    assert told.timeline[0].what.startswith("arrived")


def test_a_state_that_cannot_be_written_leaves_the_journal_where_it_is_and_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = RecordedWorld(settings(), max_bytes=2_000)
    monkeypatch.setattr(world.scheduler, "foreign", Path("/"), raising=False)
    for id in range(40):
        world.send([id], max_new_tokens=9, ignore_eos=True)
        world.step()
    world.run_dry()
    told = [record.message for record in caplog.records if "not_put_aside" in record.message]
    size = sum(map(len, world.records))
    assert not world.records.parts
    assert 1 < len(told) <= size // 2_000
    world.replay()


@pytest.mark.parametrize(
    "name", ["os:system", "weft.scheduler.request:seed_of", "weft.messages.codec:np", "x"]
)
def test_a_state_names_nothing_but_classes_of_an_engine(name: str) -> None:
    world = busy_world()
    state = msgspec.msgpack.encode(
        {"classes": [[name, []]], "things": [[INSTANCE, []]], "engine": 0}
    )
    began = msgspec.structs.replace(Replay(world.records).began, state=zlib.compress(state))
    with pytest.raises(BadJournal, match="cannot be restored"):
        Replay([msgspec.msgpack.encode(began)])


def test_the_failure_of_the_core_is_recorded_and_happens_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(World, "check", lambda self: None)

    def bump(self: PageAllocator, pages: np.ndarray) -> None:
        raise AssertionError(f"a page was freed twice: {pages.tolist()}")

    world = RecordedWorld(settings(prefix_cache=False))
    world.send([1, 2, 3], max_new_tokens=5)
    world.step()
    with monkeypatch.context() as patch:
        patch.setattr(PageAllocator, "free", bump)
        with pytest.raises(AssertionError, match="freed twice"):
            world.run_dry()
        again = Replay(world.records)
        assert again.run()
        assert again.broke is not None
        assert "freed twice" in again.broke
    mended = Replay(world.records)
    assert not mended.run()
    assert mended.difference is not None
    assert "raises AssertionError" in mended.difference.recorded


def test_a_journal_of_another_format_is_refused() -> None:
    world = busy_world()
    with pytest.raises(BadJournal, match="does not begin"):
        Replay(world.records[1:])
    began = Replay(world.records).began
    with pytest.raises(BadJournal, match="format is 99"):
        Replay([msgspec.msgpack.encode(msgspec.structs.replace(began, version=99))])
    with pytest.raises(BadJournal, match="empty"):
        Replay([])


# The command


def test_the_command_replays_a_file_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = busy_world(1)
    world.write(tmp_path / "j")
    assert main(["replay", str(tmp_path / "j")]) == 0
    assert "every decision is as recorded" in capsys.readouterr().out
    assert main(["replay", str(tmp_path / "j"), "--until", "12"]) == 0
    assert "step 12: " in capsys.readouterr().out
    assert main(["replay", str(tmp_path / "j"), "--rid", "r5"]) == 0
    told = capsys.readouterr().out
    assert "r5 (request 5): finished" in told
    assert "first token" in told


def test_the_command_never_takes_a_damaged_file_for_a_good_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = RecordedWorld(settings(), 1)
    world.send([1, 2, 3], max_new_tokens=3)
    world.run_dry()
    world.write(tmp_path / "j")
    whole = (tmp_path / "j").read_bytes()
    rng = random.Random(5)
    for place in range(0, len(whole), 7):
        changed = bytearray(whole)
        changed[place] ^= 1 << rng.randrange(8)
        (tmp_path / "j").write_bytes(changed)
        assert main(["replay", str(tmp_path / "j")]) == 2
        out, err = capsys.readouterr()
        assert "every decision is as recorded" not in out
        assert (
            "the journal is damaged at byte " in out
            or "not a journal" in err
            or "it is empty" in err
        )
    (tmp_path / "j").write_bytes(whole[:-3])
    assert main(["replay", str(tmp_path / "j")]) == 0
    assert "the last record was not finished" in capsys.readouterr().out


def test_the_command_ends_with_1_at_a_difference_and_2_without_a_journal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = busy_world()
    world.write(tmp_path / "j")
    monkeypatch.setattr(PrefillAdder, "_floor", lambda self, n: min(n, 15))
    assert main(["replay", str(tmp_path / "j")]) == 1
    assert "the first difference is at step" in capsys.readouterr().out
    (tmp_path / "other").write_text("nothing")
    assert main(["replay", str(tmp_path / "other")]) == 2
    assert "not a journal" in capsys.readouterr().err
    assert main(["replay"]) == 2


def test_replay_needs_no_torch() -> None:
    code = "import weft.cli.replay, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
