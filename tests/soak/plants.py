"""Faults planted on purpose, to see that a soak run notices them: `python -m tests.soak.plants NAME
EVERY serve ...`.

Each patches one function of the front or of the engine so that every EVERY-th call of it does
wrong. The command line is that of `weft`; the engine that it starts has the same fault planted.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from weft.cli.main import main as weft
from weft.client.client import EngineClient
from weft.client.deliveries import TokenDeliveries
from weft.client.generation import Delta, Generation
from weft.launch import engine_process, start_worker
from weft.memory.allocator import PageAllocator
from weft.scheduler import scheduler
from weft.scheduler.kv import KvMemory
from weft.scheduler.scheduler import Scheduler


class Every:
    """True at each n-th question."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._asked = 0

    def __call__(self) -> bool:
        self._asked += 1
        return self._asked % self._n == 0


def piece_behind_the_next(every: Every) -> None:
    """A piece of a stream comes behind the one that follows it."""
    take = Generation.take

    def taken(self: Generation) -> list[Delta]:
        deltas = take(self)
        held: dict[int, str] = self.__dict__.setdefault("_held", {})
        for place, delta in enumerate(deltas):
            before = held.pop(delta.choice, "")
            if before:
                deltas[place] = delta._replace(text=delta.text + before)
            elif self.stream and delta.text and delta.end is None and every():
                held[delta.choice] = delta.text
                deltas[place] = delta._replace(text="")
        return deltas

    Generation.take = taken  # type: ignore[method-assign]


def tokens_exchanged(every: Every) -> None:
    """Two requests of a step get each other's token."""
    commit = scheduler.commit

    def committed(columns: Any, batch: Any, result: Any, *more: Any) -> Any:
        if len(result.tokens) > 1 and every():
            tokens = result.tokens.copy()
            tokens[[0, 1]] = tokens[[1, 0]]
            result = dataclasses.replace(result, tokens=tokens)
        return commit(columns, batch, result, *more)

    scheduler.commit = committed  # type: ignore[attr-defined]


def pages_exchanged(every: Every) -> None:
    """Two pages of a prefix that was found in the cache are exchanged."""
    take_row = KvMemory.take_row

    def taken(self: KvMemory, request: Any) -> None:
        if len(request.prefix.pages) > 1 and every():
            pages = request.prefix.pages.copy()
            pages[[0, 1]] = pages[[1, 0]]
            request.prefix = request.prefix._replace(pages=pages)
        take_row(self, request)

    KvMemory.take_row = taken  # type: ignore[method-assign]


def token_changed_by_retraction(every: Every) -> None:
    """The last token of a request that is retracted becomes another."""
    take_back = Scheduler.retract

    def taken(self: Scheduler, request: Any, **why: str) -> None:
        known = int(self.kv.columns.known_len[request.row])
        if known > request.spec.prompt_len and every():
            self.kv.columns.tokens[request.row, known - 1] ^= 1
        take_back(self, request, **why)

    Scheduler.retract = taken  # type: ignore[method-assign]


def token_lost_by_retraction(every: Every) -> None:
    """The last token of a request that is retracted is forgotten, and generated again."""
    take_back = Scheduler.retract

    def taken(self: Scheduler, request: Any, **why: str) -> None:
        if self.kv.columns.known_len[request.row] > request.spec.prompt_len and every():
            self.kv.columns.known_len[request.row] -= 1
        take_back(self, request, **why)

    Scheduler.retract = taken  # type: ignore[method-assign]


def leaving_not_told(every: Every) -> None:
    """The engine is not told that a client has left."""
    close = TokenDeliveries.close

    def left(self: TokenDeliveries, generation: Generation) -> None:
        is_open = any(completion.end is None for completion in generation.completions)
        if not is_open or not every():
            close(self, generation)
            return
        send = self.send
        self.send = lambda message: None
        close(self, generation)
        self.send = send

    TokenDeliveries.close = left  # type: ignore[method-assign]


def salt_ignored(every: Every) -> None:
    """A request's salt is dropped."""
    submit = EngineClient.submit

    def submitted(self: EngineClient, prompts: Any, *more: Any, **options: Any) -> Generation:
        if any(prompt.cache_salt for prompt in prompts) and every():
            prompts = [msgspec.structs.replace(prompt, cache_salt="") for prompt in prompts]
        return submit(self, prompts, *more, **options)

    EngineClient.submit = submitted  # type: ignore[method-assign]


def page_leaked(every: Every) -> None:
    """A page that is given back is lost."""
    free = PageAllocator.free

    def freed(self: PageAllocator, pages: Any) -> None:
        is_lost = len(pages) > 0 and every()
        free(self, np.asarray(pages)[1:] if is_lost else pages)

    PageAllocator.free = freed  # type: ignore[method-assign]


PLANTS: dict[str, Callable[[Every], None]] = {
    plant.__name__: plant
    for plant in (
        piece_behind_the_next,
        tokens_exchanged,
        pages_exchanged,
        token_changed_by_retraction,
        token_lost_by_retraction,
        leaving_not_told,
        salt_ignored,
        page_leaked,
    )
}


def main() -> None:
    name, every, verb = sys.argv[1:4]
    PLANTS[name](Every(int(every)))
    if verb == "worker":
        start_worker.main()
        return
    engine_process.COMMAND = (sys.executable, "-m", "tests.soak.plants", name, every, "worker")
    sys.exit(weft(sys.argv[3:]))


if __name__ == "__main__":
    main()
