"""Helper processes: what somebody else wrote (templates, grammars, pictures) is read in a process
with limits, never in a process that serves.

    owner ──question──▶ Helper ──line──▶ process: answers, within its memory and processor time
      └─────kill──────▶   │                (`process.serve`, `limit_memory`, `limit_work`)
                          └── started again, and set up again, after each end

This module is the owner's side. It knows nothing of the questions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.config.process import Child, ChildEnded

SETUP_S = 60.0  # wall-clock time for the interpreter and what it loads
SLOW_S = 60.0  # wall-clock time beyond the processor time; then the process counts as hung


class HelperFailed(Exception):
    """The process has ended, or was ended, instead of answering."""

    def __init__(self, *, out_of_time: bool, hung: bool = False) -> None:
        """`out_of_time`: it needed more processor time than allowed, or hung; else it needed too
        much memory, crashed, or was killed. `hung`: it gave no answer in the wall-clock time, so
        perhaps the machine gave it no processor."""
        super().__init__()
        self.out_of_time = out_of_time
        self.hung = hung


class Helper:
    """One process at a time, for one caller at a time; `kill` may come from any thread."""

    def __init__(
        self,
        module: str,
        setup: bytes,
        check_setup: Callable[[bytes], object],
        files: Sequence[int] = (),
    ) -> None:
        """`setup` is the first line for each new process of `module`; `check_setup` gets its answer
        and raises if the process cannot work. SETUP_S limits the wall-clock time of both.
        `files`: descriptors that the process inherits under the same numbers."""
        self._module = module
        self._setup = setup
        self._check_setup = check_setup
        self._files = tuple(files)
        self._child: Child | None = None
        self._is_set_up = False

    @property
    def child(self) -> Child | None:
        """The present process, for tests."""
        return self._child

    def start(self) -> None:
        """Begin to start a process, if none is alive. Does not wait."""
        if self._child is not None and not self._child.is_alive:
            self.close()
        if self._child is None:
            self._child = Child(self._module, self._files)
            self._is_set_up = False

    def adopt(self, child: Child) -> None:
        """Use a process of `module` that has been started already and asked nothing."""
        self.close()
        self._child = child
        self._is_set_up = False

    def set_up(self) -> None:
        """Set up the process that `start` has started. Raises `HelperFailed`, and what
        `check_setup` raises."""
        if self._is_set_up:
            return
        answer = self._ask(self._setup, SETUP_S)
        try:
            self._check_setup(answer)
        except BaseException:
            self.close()
            raise
        self._is_set_up = True

    def ask(self, question: bytes, work_s: float) -> bytes:
        """The answer to a line. `work_s`: the processor time that the process allows itself.

        Raises `HelperFailed`. A process that has ended is not replaced: `start` comes before.
        """
        self.set_up()
        return self._ask(question, work_s + SLOW_S)

    def kill(self) -> None:
        """End the process, and so the question that is being asked. Does not wait."""
        child = self._child
        if child is not None:
            child.kill()

    def close(self) -> None:
        """End the process. Not while a question is being asked."""
        child = self._child
        self._child = None
        if child is not None:
            child.close()

    def _ask(self, question: bytes, timeout_s: float) -> bytes:
        if self._child is None:
            raise HelperFailed(out_of_time=False)
        try:
            return self._child.ask(question, timeout_s)
        except TimeoutError:
            self.close()
            raise HelperFailed(out_of_time=True, hung=True) from None
        except ChildEnded as exc:
            self.close()
            raise HelperFailed(out_of_time=exc.out_of_time) from None
