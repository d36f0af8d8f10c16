"""What the scheduler has to report: tokens of the last result, final words, and faults.

An end may not be left half way: whatever a hook raises when it hears of one is kept here, and the
request ends all the same. It knows messages, never requests or memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from weft.messages.replies import Finish, StepOutput


class Outbox:
    def __init__(self) -> None:
        self._output: StepOutput | None = None  # of the last result, until it is taken
        self._finished: list[Finish] = []  # since the last output
        self.faults: list[Exception] = []  # that were raised, and end nothing
        self.policy_fault = ""  # of the policy that is set: why requests go as they came
        self.shadow_fault = ""  # of the shadow policy
        # Something was left half way: accounting is to begin anew before the next step.
        self.is_in_doubt = False
        self._blamed: set[int] = set()  # open requests with a fault while they were planned for

    @property
    def is_empty(self) -> bool:
        return not (self._finished or self._output)

    def put(self, output: StepOutput) -> None:
        self._output = output

    def finish(self, finish: Finish) -> None:
        self._blamed.discard(finish.id)
        self._finished.append(finish)

    def has_ended(self, id: int) -> bool:
        """Whether the final word on this request is still to be said."""
        return any(finish.id == id for finish in self._finished)

    def take_output(self) -> StepOutput | None:
        """Tokens of the last result, and final words, also those that no result brought (of
        refused and aborted requests)."""
        output = self._output or StepOutput()
        finished = self._finished
        self._output = None
        self._finished = []
        if finished:
            output = msgspec.structs.replace(output, finished=finished)
        if output.ids or output.finished or output.aux:
            return output
        return None

    def take_faults(self) -> list[Exception]:
        """Exceptions since the last call that ended no request: of hooks that heard of an end, and
        of a recomputation. All requests concerned have ended, or are computed anew."""
        faults = self.faults
        self.faults = []
        return faults

    def policy_failed(self, exc: Exception) -> None:
        """A policy of one's own has had a fault. Nothing else is touched by it."""
        self.faults.append(exc)
        self.policy_fault = str(exc)

    def shadow_failed(self, exc: Exception) -> None:
        """A shadow policy of one's own has had a fault."""
        self.faults.append(exc)
        self.shadow_fault = str(exc)

    def attempt(self, hook: Callable[..., None], *arguments: object, **more: object) -> None:
        """Call a hook. If it raises, keep the exception for `take_faults`."""
        try:
            hook(*arguments, **more)
        except Exception as exc:
            self.faults.append(exc)
            self.is_in_doubt = True

    def blame(self, ids: Sequence[int]) -> set[int]:
        """A fault was found while these were planned for. Returns those for which it is not the
        first."""
        repeated = self._blamed.intersection(ids)
        self._blamed.update(ids)
        return repeated

    def doubt(self) -> None:
        """Another room was left half way while it used what is accounted for here."""
        self.is_in_doubt = True

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Pages move within: if that is left half way, accounting is in doubt."""
        try:
            yield
        except BaseException:
            self.is_in_doubt = True
            raise
