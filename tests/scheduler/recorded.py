"""A world that keeps a journal of itself, in memory until somebody wants the file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tests.scheduler.world import World
from weft.grammar.protocol import Grammars
from weft.messages.codec import ToEngine
from weft.messages.replies import StepOutput
from weft.messages.requests import Abort, GenerateRequest
from weft.observe.journal import JournalWriter
from weft.scheduler.service.blocker import Barrier
from weft.scheduler.service.journal import RecordedEngine
from weft.scheduler.service.processors import Processors
from weft.scheduler.settings import SchedulerSettings


class Records(list[bytes]):
    """A sink in memory."""

    num_bytes = 0

    def flush(self) -> None:
        self.num_bytes = sum(map(len, self))

    def rotate(self) -> None:
        self.clear()
        self.num_bytes = 0


class RecordedWorld(World):
    """As a World, but messages and steps go through an engine that records them."""

    def __init__(
        self,
        settings: SchedulerSettings,
        depth: int = 0,
        fail_steps: set[int] | None = None,
        max_bytes: int = 1 << 40,
        barrier: Barrier | None = None,
        grammars: Grammars | None = None,
        processors: Processors | None = None,
    ) -> None:
        super().__init__(settings, depth, fail_steps)
        self.records = Records()
        self.engine = RecordedEngine(
            settings,
            self.runner,
            clock=lambda: self.time,
            overlap=depth,
            on_failure=self.failures.append,
            sink=self.records,
            max_bytes=max_bytes,
            barrier=barrier,
            grammars=grammars,
            processors=processors,
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
        self.scheduler = self.engine.scheduler  # another, where the journal began anew
        return [reply for reply in replies if isinstance(reply, StepOutput)]

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
