"""How many completions of one request the engine has at a time: not more than a part of its rows, so that who asks for
thousands does not stand before everybody else in a queue that goes by arrival. The others stay here, in their order,
and each follows when one has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from weft.messages.requests import GenerateRequest


class HeldBack:
    """What the engine has not got yet of one generation."""

    def __init__(
        self, requests: Sequence[GenerateRequest], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._requests = {request.id: request for request in requests}
        self._clock = clock
        self._began_s = clock()

    def __contains__(self, id: int) -> bool:
        return id in self._requests

    def drop(self, id: int) -> bool:
        """Whether it was here."""
        return self._requests.pop(id, None) is not None

    def take(self) -> GenerateRequest | None:
        """The next one, which has spent here what is missing of its time."""
        if not self._requests:
            return None
        request = self._requests.pop(next(iter(self._requests)))
        if request.timeout_ms:
            spent_ms = int((self._clock() - self._began_s) * 1_000)
            request = msgspec.structs.replace(
                request, timeout_ms=max(request.timeout_ms - spent_ms, 1)
            )
        return request
