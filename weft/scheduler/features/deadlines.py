"""Lists the new requests that must have their first token by some time (`ttft_ms`).

`engine/deadline_service.py` decides whether a request can be in time; the policy `deadline` orders
by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from weft.messages.requests import GenerateRequest
from weft.scheduler.feature import Feature


class DeadlineFeature(Feature):
    request_fields: ClassVar[tuple[str, ...]] = ("ttft_ms",)

    def __init__(self) -> None:
        self.newcomers: list[int] = []  # ids of requests that the service has not seen yet
        self.wake: Callable[[], None] | None = None  # called when a request has come

    def arrive(self, message: GenerateRequest) -> None:
        self.newcomers.append(message.id)
        if self.wake is not None:
            self.wake()
