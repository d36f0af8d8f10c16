"""Steps of a model with an encoder, and what else happens to what that has made."""

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
class NotEncodedOutput:
    """The `DeviceOutput` of a step that takes what could not be encoded."""

    output: DeviceOutput
    not_encoded: tuple[tuple[bytes, str], ...]

    def moved(self, move: Callable[[Tensor], Tensor]) -> NotEncodedOutput:
        return replace(self, output=self.output.moved(move))

    def result(self) -> Result:
        return replace(self.output.result(), not_encoded=self.not_encoded)


class MediaSteps:
    """The `ModelSteps` of a model with an encoder, around those that compute. Their row table has
    the same `media`."""

    def __init__(self, steps: ModelSteps, media: MediaStore) -> None:
        self._steps = steps
        self._media = media

    def run(self, plan: Plan) -> DeviceOutput:
        self._media.take_errors()  # of a step that raised
        output = self._steps.run(plan)
        not_encoded = self._media.take_errors()
        if not not_encoded:
            return output
        return NotEncodedOutput(output, not_encoded)


class MediaDeviceStore:
    """The `DeviceStore` of a model with an encoder, around that of its weights and KV.

    Other weights make other vectors, and memory that is released includes theirs.
    """

    def __init__(self, store: DeviceStore, media: MediaStore) -> None:
        self._store = store
        self._media = media

    def do(self, request: DeviceRequest) -> DeviceReply:
        reply = self._store.do(request)
        if reply.kv_is_stale or isinstance(request, ReleaseMemory):
            self._media.clear()
        return reply
