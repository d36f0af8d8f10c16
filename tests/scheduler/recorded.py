"""A world that keeps a journal of itself, in memory until somebody wants the file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tests.scheduler.world import World
from weft.engine.pin_service import PinService
from weft.grammar.protocol import Grammars
from weft.journal.file import JournalWriter
from weft.journal.recorder import RecordedEngine, Recorder
from weft.journal.records import Record, Turned
from weft.journal.replay import Replay
from weft.memory.handoff.protocol import Handoff
from weft.memory.tiers.protocol import Tiers
from weft.messages.codec import ToEngine
from weft.messages.replies import StepOutput
from weft.messages.requests import Abort, GenerateRequest
from weft.scheduler.features.processors import ProcessorChecks
from weft.scheduler.settings import SchedulerSettings


class Records(list[bytes]):
    """A sink in memory. `parts` are the files that were put aside."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        # Records that are in `num_bytes`: a long journal is not summed anew in each step.
        self.num_counted = 0
        self.parts: list[list[bytes]] = []

    def flush(self) -> None:
        self.num_bytes += sum(map(len, self[self.num_counted :]))
        self.num_counted = len(self)

    def rotate(self) -> None:
        self.parts.append(list(self))
        self.clear()
        self.num_bytes = 0
        self.num_counted = 0

    @property
    def files(self) -> list[list[bytes]]:
        """All of them, the oldest first."""
        return [*self.parts, list(self)]


class _SoonFull:
    """A recorder to whom a file with a few steps is too large."""

    def __init__(self, recorder: Recorder, most_steps: int) -> None:
        self._recorder = recorder
        self._most_steps = most_steps
        self._num_steps = 0  # in the file

    @property
    def is_full(self) -> bool:
        return self._num_steps >= self._most_steps

    def write(self, record: Record) -> None:
        if isinstance(record, Turned):
            self._num_steps += 1
        self._recorder.write(record)

    def rotate(self) -> None:
        self._num_steps = 0
        self._recorder.rotate()

    def __getattr__(self, name: str) -> object:
        return getattr(self._recorder, name)


class RecordedWorld(World):
    """As a World, but messages and steps go through an engine that records them."""

    def __init__(
        self,
        settings: SchedulerSettings,
        depth: int = 0,
        fail_steps: set[int] | None = None,
        max_bytes: int = 1 << 40,
        state_bytes: int = 0,
        grammars: Grammars | None = None,
        processors: ProcessorChecks | None = None,
        tiers: Tiers | None = None,
        handoff: Handoff | None = None,
    ) -> None:
        super().__init__(settings, depth, fail_steps)
        self.records = Records()
        self.engine = RecordedEngine(
            settings,
            self.runner,
            clock=lambda: self.time,
            overlap=depth,
            on_failure=self.failed,
            sink=self.records,
            max_bytes=max_bytes,
            state_bytes=state_bytes,
            grammars=grammars,
            processors=processors,
            tiers=tiers,
            handoff=handoff,
        )
        self.engine.start_over()
        self.scheduler = self.engine.scheduler

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def tell(self, message: ToEngine) -> None:
        self.engine.submit(message)

    def take_in(self, request: GenerateRequest) -> None:
        self.tell(request)

    def abort(self, message: Abort) -> None:
        self.tell(message)

    def turn(self) -> list[StepOutput]:
        replies = self.engine.step()
        return [reply for reply in replies if isinstance(reply, StepOutput)]

    def put_aside_in_every_step(self) -> None:
        """From now on no file of the journal has more than one step."""
        self._put_aside_after(1)

    def put_aside_often(self) -> None:
        """From now on no file of the journal has more than five steps. What the state of the first
        lacks shows in any of them, for a fifth of the costs of a file for each step."""
        self._put_aside_after(5)

    def _put_aside_after(self, most_steps: int) -> None:
        recorder = _SoonFull(self.engine._recorder, most_steps)
        self.engine._recorder = recorder  # type: ignore[assignment]

    @property
    def pins(self) -> PinService:
        return self.engine._engine.services.pins

    def check_step(self) -> None:
        super().check_step()
        book = self.pins.feature.book
        assert book.num_pages(self.scheduler.kv) <= book.max_pages
        # Nothing stays pinned that nobody lists.
        listed = {entry.pin for entry in book.by_name.values() if entry.is_there}
        assert set(self.scheduler.kv.pins.firm) <= listed
        assert all(entry.until_s > self.time - self.tick_s for entry in book.by_name.values())

    def replay(self, *, check: bool = False) -> Replay:
        """Replay each file of the journal alone. Returns the last replay, which ends where this
        world stands."""
        step = 0
        for records in self.records.files:
            replay = Replay(records, check=check)
            assert replay.first_step == step
            assert replay.run(), replay.difference
            step = replay.step
        assert step == self.scheduler.planner.num_steps
        assert replay.engine.scheduler.stats() == self.scheduler.stats()
        return replay

    def write_failure(self, exc: Exception, prefix: str) -> Path:
        """Write the journal of a world that broke into a file that is kept. Returns its path."""
        self.engine.broke(exc)
        handle, name = tempfile.mkstemp(prefix=prefix, suffix=".journal")
        os.close(handle)
        os.unlink(name)
        self.write(Path(name))
        return Path(name)

    def write(self, path: Path) -> None:
        """Write the journal so far."""
        writer = JournalWriter(path)
        for record in self.records:
            writer.append(record)
        writer.flush()
        writer.close()
