"""The requests of one generation beyond its share of the engine, which wait here.

This module knows neither the engine nor how a completion ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from weft.messages.requests import GenerateRequest

PromptKey = tuple[bytes, tuple[bytes, ...]]  # ids, and the digests of media


class ShareLimits(NamedTuple):
    """What one generation may have in the engine at a time."""

    num_rows: int
    step_tokens: int  # of prompts that have no token yet; 0: not known, no limit
    page_size: int


class DeferredRequests:
    """The requests of one generation that were not sent to the engine yet.

    At least one request is always in the engine, as long as any waits here.
    """

    def __init__(
        self,
        requests: Sequence[GenerateRequest],
        limits: ShareLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._requests = {request.id: request for request in requests}
        self._limits = limits
        self._in_engine: set[int] = set()
        self._unbegun: dict[int, int] = {}  # of these, without a token -> tokens to compute
        self._last_prompt: PromptKey | None = None  # that was sent
        self._clock = clock
        self._began_s = clock()

    @property
    def num_waiting(self) -> int:
        """Requests that were not sent."""
        return len(self._requests)

    def drop(self, id: int) -> bool:
        """Drop one request. Returns whether it was here."""
        return self._requests.pop(id, None) is not None

    def began(self, id: int) -> None:
        """The engine has computed a first token of request `id`."""
        self._unbegun.pop(id, None)

    def ended(self, id: int) -> None:
        """Request `id` is no longer in the engine."""
        self._in_engine.discard(id)
        self._unbegun.pop(id, None)

    def take(self) -> list[GenerateRequest]:
        """Take the requests that may be sent now, in order. Their time limits are shortened by the
        time that they waited here."""
        taken: list[GenerateRequest] = []
        limits = self._limits
        num_tokens = sum(self._unbegun.values())
        for id, request in self._requests.items():
            if len(self._in_engine) >= limits.num_rows:
                break
            cost = self._tokens_to_compute(request)
            num_tokens += cost
            if self._unbegun and limits.step_tokens and num_tokens > limits.step_tokens:
                break
            self._in_engine.add(id)
            self._unbegun[id] = cost
            self._last_prompt = _prompt_key(request)
            taken.append(request)
        for request in taken:
            del self._requests[request.id]
        if not taken:
            return []
        waited_ms = int((self._clock() - self._began_s) * 1_000)
        return [_shortened(request, waited_ms) for request in taken]

    def _tokens_to_compute(self, request: GenerateRequest) -> int:
        """Whole pages of its prompt; of a prompt that was sent just before, the last page alone."""
        page_size = self._limits.page_size
        if request.shares_kv and self._last_prompt == _prompt_key(request):
            return page_size
        prompt_len = request.prompt_len
        num_pages = -(-prompt_len // page_size)
        return max(num_pages, 1) * page_size


def _prompt_key(request: GenerateRequest) -> PromptKey:
    """Media are compared by name, because the values are large."""
    return request.input_ids, tuple(item.digest for item in request.media)


def _shortened(request: GenerateRequest, waited_ms: int) -> GenerateRequest:
    """`request` with less time left."""
    if request.timeout_ms:
        left_ms = max(request.timeout_ms - waited_ms, 1)  # 0 would mean no limit
        request = replace(request, timeout_ms=left_ms)
    if request.ttft_ms:
        left_ms = max(request.ttft_ms - waited_ms, 1)
        request = replace(request, ttft_ms=left_ms)
    return request
