"""Steps of a model with an encoder, and device requests that make its vectors invalid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from weft.executor.device import DeviceOutput
from weft.executor.media.store import MediaStore
from weft.executor.runner import Do, Pass, Run
from weft.plan.device import DeviceReply, DeviceRequest, ReleaseMemory
from weft.plan.step import Plan, Result


@dataclass(frozen=True)
class MediaOutput:
    """The `DeviceOutput` of a step in which the encoder has worked, or that takes an item that
    could not be encoded."""

    output: DeviceOutput
    not_encoded: tuple[tuple[bytes, str], ...]
    encoded: tuple[bytes, ...]
    encoder_s: float

    def moved(self, move: Callable[[Tensor], Tensor]) -> MediaOutput:
        return replace(self, output=self.output.moved(move))

    def result(self) -> Result:
        return replace(
            self.output.result(),
            not_encoded=self.not_encoded,
            encoded=self.encoded,
            encoder_s=self.encoder_s,
        )


class MediaPass(Pass):
    """Lets the encoder work for a step, and after it for later ones. The row table has the same
    `media`. Other weights make the vectors invalid, and released memory includes theirs."""

    name = "encoder"

    def __init__(self, media: MediaStore) -> None:
        self._media = media

    def run(self, plan: Plan, then: Run) -> DeviceOutput:
        self._media.take_errors()  # of an earlier step that raised
        self._media.take_seconds()
        output = then(plan)
        not_encoded = self._media.take_errors()
        encoded: tuple[bytes, ...] = ()
        if plan.ahead is not None:
            encoded = self._media.work_ahead(plan.ahead)
        encoder_s = self._media.take_seconds()
        if not encoder_s and not not_encoded:
            return output
        return MediaOutput(output, not_encoded, encoded, encoder_s)

    def do(self, request: DeviceRequest, then: Do) -> DeviceReply:
        reply = then(request)
        if reply.kv_is_stale or isinstance(request, ReleaseMemory):
            self._media.clear()
        return reply
