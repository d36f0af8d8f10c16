"""The table of completions that have not ended: by number, by name, and those that still wait here.

A request that asks for more completions than its share of the engine's rows sends a part of them;
the others wait here in their order, and one follows for each that ends. So a request with
thousands of completions does not stand before all others in a queue that goes by arrival.
Knows nothing of how a completion ends; the client alone writes this table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from weft.client.generation import Completion, Generation
from weft.messages.requests import GenerateRequest


class OpenCompletions:
    def __init__(self) -> None:
        self.by_id: dict[int, Completion] = {}
        self._by_name: dict[str, set[int]] = {}  # of requests and of batches
        self.deferred: dict[Generation, DeferredRequests] = {}

    def add(self, completion: Completion) -> None:
        spec = completion.spec
        self.by_id[spec.id] = completion
        for name in {spec.rid, spec.group} - {""}:
            self._by_name.setdefault(name, set()).add(spec.id)

    def remove(self, completion: Completion) -> None:
        spec = completion.spec
        del self.by_id[spec.id]
        for name in {spec.rid, spec.group} - {""}:
            ids = self._by_name[name]
            ids.discard(spec.id)
            if not ids:
                del self._by_name[name]

    def named(self, name: str) -> list[Completion]:
        """Those whose request or batch has exactly this name."""
        return [self.by_id[id] for id in self._by_name.get(name, ())]

    @property
    def is_empty(self) -> bool:
        return not (self.by_id or self._by_name or self.deferred)

    # ---- requests beyond the share of one generation

    def defer(self, generation: Generation, requests: Sequence[GenerateRequest]) -> None:
        """Keep `requests` until others of the same generation have ended."""
        self.deferred[generation] = DeferredRequests(requests)

    def drop_deferred(self, completion: Completion) -> bool:
        """Forget its request. Whether it was still here."""
        deferred = self.deferred.get(completion.generation)
        return deferred is not None and deferred.drop(completion.spec.id)

    def forget_deferred(self, generation: Generation | None = None) -> None:
        """Send no more of a generation, or of any."""
        if generation is None:
            self.deferred.clear()
        else:
            self.deferred.pop(generation, None)

    def follow(self, ended: Sequence[Completion]) -> list[GenerateRequest]:
        """The requests that may go to the engine, because it is done with those in `ended`."""
        following: list[GenerateRequest] = []
        for completion in ended:
            deferred = self.deferred.get(completion.generation)
            request = None if deferred is None else deferred.take()
            if request is not None:
                following.append(request)
        return following


class DeferredRequests:
    """The requests of one generation that the engine has not got yet."""

    def __init__(
        self,
        requests: Sequence[GenerateRequest],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._requests = {request.id: request for request in requests}
        self._clock = clock
        self._began_s = clock()

    def drop(self, id: int) -> bool:
        """Forget one. Whether it was here."""
        return self._requests.pop(id, None) is not None

    def take(self) -> GenerateRequest | None:
        """The next one. The time that it has waited here is taken from its time."""
        if not self._requests:
            return None
        request = self._requests.pop(next(iter(self._requests)))
        if request.timeout_ms:
            waited_ms = int((self._clock() - self._began_s) * 1_000)
            left_ms = max(request.timeout_ms - waited_ms, 1)  # 0 would mean: never
            request = replace(request, timeout_ms=left_ms)
        return request
