"""Passes from outside of weft, each within a fence: whatever it raises or returns, the requests of
its step end, and the device is not blamed.

    FencedPass ─▶ the pass ─▶ _Inner ─▶ the next pass, and the computation
    checks the output         notes their exceptions, which are not the pass's
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from weft.config.plugins import OutsideFault, plugins, refused
from weft.executor.device import DeviceOutput
from weft.executor.runner import Do, Pass, Run
from weft.observe.survivable import is_survivable
from weft.plan.device import DeviceReply, DeviceRequest
from weft.plan.step import Plan, Result


def outside_passes(setting: str) -> list[Pass]:
    """The passes of `--plugins`, which stand around all others. Raises SettingsError."""
    found: list[Pass] = []
    for name, kind in plugins(setting, "passes"):
        if not (isinstance(kind, type) and issubclass(kind, Pass)):
            raise refused("passes", name, "is no subclass of weft.executor.runner.Pass")
        try:
            own = kind()
        except (Exception, SystemExit) as exc:  # whatever it raises: it is the code of others
            raise refused("passes", name, f"cannot be made: {exc}") from exc
        found.append(FencedPass(name, own))
    return found


class FencedPass(Pass):
    """`plugin`: the name by which `--plugins` has it."""

    def __init__(self, plugin: str, own: Pass) -> None:
        self.name = str(own.name)
        self._plugin = plugin
        self._own = own

    def run(self, plan: Plan, then: Run) -> DeviceOutput:
        inner = _Inner(then)
        try:
            output = self._own.run(plan, inner)
        except BaseException as exc:
            if exc is inner.raised or not is_survivable(exc):
                raise
            raise self._fault(f"raised {type(exc).__name__}: {exc}") from exc
        if output is inner.output:
            return output
        if not (hasattr(output, "moved") and hasattr(output, "result")):
            raise self._fault(f"returned {type(output).__name__}, which is no output of a step")
        num_sampled = int(np.sum(plan.num_sampled))
        return _OwnOutput(output, num_sampled, self._fault)

    def do(self, request: DeviceRequest, then: Do) -> DeviceReply:
        try:
            reply = self._own.do(request, then)
        except BaseException as exc:
            if not is_survivable(exc):
                raise
            fault = self._fault(f"raised {type(exc).__name__}: {exc}")
            return DeviceReply(ok=False, message=str(fault), status=500)
        if not isinstance(reply, DeviceReply):
            fault = self._fault(f"returned {type(reply).__name__} instead of a DeviceReply")
            return DeviceReply(ok=False, message=str(fault), status=500)
        return reply

    def _fault(self, what: str) -> OutsideFault:
        return OutsideFault(f"the pass {self._plugin} {what}")


class _Inner:
    """What a pass gets as `then`."""

    def __init__(self, then: Run) -> None:
        self._then = then
        self.output: DeviceOutput | None = None
        self.raised: BaseException | None = None

    def __call__(self, plan: Plan) -> DeviceOutput:
        try:
            self.output = self._then(plan)
        except BaseException as exc:
            self.raised = exc
            raise
        return self.output


class _OwnOutput:
    """An output that a pass has made itself: its result is checked when it is read."""

    def __init__(
        self, own: DeviceOutput, num_sampled: int, fault: Callable[[str], OutsideFault]
    ) -> None:
        self._own = own
        self._num_sampled = num_sampled
        self._fault = fault

    def moved(self, move: Callable[[Tensor], Tensor]) -> DeviceOutput:
        try:
            return _OwnOutput(self._own.moved(move), self._num_sampled, self._fault)
        except (Exception, SystemExit) as exc:
            raise self._fault(f"returned an output that cannot be moved: {exc}") from exc

    def result(self) -> Result:
        try:
            result = self._own.result()
            wrong = _why_wrong(result, self._num_sampled)
        except (Exception, SystemExit) as exc:
            raise self._fault(f"returned an output without a result: {exc}") from exc
        if wrong:
            raise self._fault(f"returned {wrong}")
        return result


def _why_wrong(result: Result, num_sampled: int) -> str:
    """Why this is no result of a step that samples so many tokens; "" if it may be one."""
    if not isinstance(result, Result):
        return f"{type(result).__name__} as the result of a step"
    tokens = result.tokens
    if not isinstance(tokens, np.ndarray) or tokens.dtype.kind != "i" or tokens.ndim != 1:
        return f"tokens that are no array of integers ({type(tokens).__name__})"
    # Of a run with drafts, fewer tokens may count.
    num_expected = num_sampled if result.counts is None else int(np.sum(result.counts))
    if len(tokens) != num_expected:
        return f"{len(tokens)} tokens; {num_expected} are expected"
    if len(tokens) and int(tokens.min()) < 0:
        return f"the token {int(tokens.min())}"
    return ""
