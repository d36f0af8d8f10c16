"""Steps of a model with an encoder, and device requests that make its vectors invalid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from weft.executor.device import DeviceOutput
from weft.executor.media.store import MediaStore
from weft.executor.runner import DeviceStore, ModelSteps
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


class MediaSteps:
    """The `ModelSteps` of a model with an encoder, which wraps the steps that compute. Their row
    table has the same `media`."""

    def __init__(self, steps: ModelSteps, media: MediaStore) -> None:
        self.inner = steps
        self._media = media

    def run(self, plan: Plan) -> DeviceOutput:
        self._media.take_errors()  # of an earlier step that raised
        self._media.take_seconds()
        output = self.inner.run(plan)
        not_encoded = self._media.take_errors()
        encoded: tuple[bytes, ...] = ()
        if plan.ahead is not None:
            encoded = self._media.work_ahead(plan.ahead)
        encoder_s = self._media.take_seconds()
        if not encoder_s and not not_encoded:
            return output
        return MediaOutput(output, not_encoded, encoded, encoder_s)


class MediaDeviceStore:
    """The `DeviceStore` of a model with an encoder, which wraps that of its weights and KV.

    Other weights make the vectors invalid, and released memory includes theirs.
    """

    def __init__(self, store: DeviceStore, media: MediaStore) -> None:
        self.inner = store
        self._media = media

    def do(self, request: DeviceRequest) -> DeviceReply:
        reply = self.inner.do(request)
        if reply.kv_is_stale or isinstance(request, ReleaseMemory):
            self._media.clear()
        return reply
