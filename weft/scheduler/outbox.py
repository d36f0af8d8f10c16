"""Reports of the scheduler: tokens of the last result, final replies, and faults.

The end of a request must always be completed: if a hook raises then, the exception is stored here,
and the request ends all the same. This module knows messages, but neither requests nor memory.
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
        self.faults: list[Exception] = []  # exceptions that ended no request
        self.out_of_memory = ""  # what a decode step lacked, until it is logged
        # error of the policy in use, after which requests go in order of arrival
        self.policy_fault = ""
        self.shadow_fault = ""  # error of the shadow policy
        # An operation was interrupted: the accounts must be reset before the next step.
        self.is_in_doubt = False
        self._blamed: set[int] = set()  # open requests that were planned when a fault occurred

    @property
    def is_empty(self) -> bool:
        return not (self._finished or self._output)

    def put(self, output: StepOutput) -> None:
        self._output = output

    def finish(self, finish: Finish) -> None:
        self._blamed.discard(finish.id)
        self._finished.append(finish)

    def has_ended(self, id: int) -> bool:
        """Whether the final reply to this request is still to be sent."""
        return any(finish.id == id for finish in self._finished)

    def take_output(self) -> StepOutput | None:
        """Tokens of the last result, and final replies, including those without a result (of
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
        """Exceptions since the last call that ended no request: of hooks at the end of a request,
        and of a recomputation. All requests concerned have ended or are computed again."""
        faults = self.faults
        self.faults = []
        return faults

    def policy_failed(self, exc: Exception) -> None:
        """A user's own policy has raised. No other state is affected."""
        self.faults.append(exc)
        self.policy_fault = str(exc)

    def shadow_failed(self, exc: Exception) -> None:
        """A user's own shadow policy has raised."""
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
        """Note a fault during the planning of these requests. Returns those for which it is not the
        first."""
        repeated = self._blamed.intersection(ids)
        self._blamed.update(ids)
        return repeated

    def doubt(self) -> None:
        """Another part was interrupted while it used state that is accounted for here."""
        self.is_in_doubt = True

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """Context in which pages move: if it is interrupted, the accounts are in doubt."""
        try:
            yield
        except BaseException:
            self.is_in_doubt = True
            raise
