"""One question to the engines for all viewers of the page: ten viewers cost as much as one.

    viewers ◀── pictures ── Feed ══ Watch ══▶ engine         no viewer: no question is asked

The feed asks the engine at most `RATE` times a second while the engine works, and less often while
it is idle, or shown to many viewers. A viewer that reads too slowly misses pictures, but never the
last one; steps are numbered, so the page notices. Written for one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from weft.client.calls import EngineFault
from weft.client.client import EngineClient
from weft.client.engine_state import EngineUnavailable
from weft.client.pictures import NO_STEPS, STEP_COLUMNS, HeadTexts, shown
from weft.json_types import JsonObject
from weft.messages.picture import Picture, Seen, Watch
from weft.text.tokenizer import Tokenizer

RATE = 5.0  # pictures in a second, at most
MAX_SENDS = 320.0  # pictures in a second to all viewers together: more viewers see fewer
REST_S = 1.0  # between two pictures of an engine without work
CALL_TIMEOUT_S = 10.0
KEPT_S = 8.0  # seconds until a picture is too old; the engine keeps its steps for somewhat longer
MAX_WAITING = 64  # pictures that wait for a slow viewer
MAX_VIEWERS = 1_000
MAX_STEPS = 600  # that a new viewer sees


def event(name: str, fields: Any) -> bytes:
    """A server-sent event."""
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(fields) + b"\n\n"


class Viewer:
    """One open page. Iterate over it for its events."""

    def __init__(self) -> None:
        self._events: deque[bytes] = deque(maxlen=MAX_WAITING)
        self._news = asyncio.Event()
        self._is_over = False

    def show(self, event: bytes) -> None:
        self._events.append(event)
        self._news.set()

    def end(self) -> None:
        self._is_over = True
        self._news.set()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            await self._news.wait()
            self._news.clear()
            while self._events:
                yield self._events.popleft()
            if self._is_over:
                return


class _Watched:
    """What the feed has seen of one engine."""

    def __init__(self) -> None:
        self.seen = Seen()
        self.last: JsonObject = {}  # picture, with the latest tree
        self.steps: deque[list[Any]] = deque(maxlen=MAX_STEPS)  # a list of columns for each

    def take(self, fields: JsonObject) -> None:
        """Take the next picture."""
        steps = fields["steps"]
        tree = fields.get("tree")
        step = self.seen.step
        round = self.seen.round
        if tree is not None:
            round = tree["round"]
        if steps["number"]:
            step = steps["number"][-1]
            columns = [steps[name] for name in STEP_COLUMNS]
            self.steps += map(
                list,
                zip(*columns, strict=True),
            )
        elif fields["stats"]["total_steps"] <= step:
            # The engine has started again: its step numbers begin at 0.
            self.steps.clear()
            step = -1
            round = 0
        self.seen = Seen(step, round)
        self.last = {**self.last, **fields}

    def full(self) -> JsonObject:
        """The last picture with all kept steps, for a viewer that has seen none."""
        steps = dict(
            zip(
                STEP_COLUMNS,
                map(list, zip(*self.steps, strict=True)),
                strict=False,
            )
        )
        return {**self.last, "steps": steps or NO_STEPS}


class Feed:
    """Asks the engines of `client` while there are viewers, and as long as the server takes
    work."""

    def __init__(
        self, client: EngineClient, tokenizer: Tokenizer, is_draining: Callable[[], bool]
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._is_draining = is_draining
        self._texts: HeadTexts | None = None
        self._viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._shown_s = 0.0  # when the last picture came
        self._engines: dict[int, _Watched] = {}  # by rank

    @property
    def is_full(self) -> bool:
        return len(self._viewers) >= MAX_VIEWERS

    def join(self) -> Viewer:
        """Add a viewer. It sees at once what earlier viewers have seen, and the kept pictures if
        the last one is not older than `KEPT_S`."""
        loop = asyncio.get_running_loop()
        viewer = Viewer()
        self._viewers.add(viewer)
        if self._task is None or self._task.done():
            if loop.time() - self._shown_s > KEPT_S:
                self._engines.clear()
            self._task = loop.create_task(self._run())
        for rank in sorted(self._engines):
            viewer.show(
                event(
                    "picture",
                    self._engines[rank].full(),
                )
            )
        return viewer

    def leave(self, viewer: Viewer) -> None:
        self._viewers.discard(viewer)
        if not self._viewers and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        while self._viewers:
            if self._is_draining():
                self._end()
                return
            began_s = asyncio.get_running_loop().time()
            is_busy = False
            try:
                picture = await self._client.call(
                    self._question(),
                    CALL_TIMEOUT_S,
                )
            except (EngineUnavailable, EngineFault) as exc:
                self._show(event("away", {"why": str(exc)}))
            else:
                for one in (picture, *picture.others):
                    self._show(
                        event(
                            "picture",
                            await self._take(one),
                        )
                    )
                    is_busy = is_busy or one.stats.num_running > 0
            await self._pause(began_s, is_busy=is_busy)

    @property
    def _gap_s(self) -> float:
        """The least time from one picture to the next."""
        return max(1.0 / RATE, len(self._viewers) / MAX_SENDS)

    async def _pause(self, began_s: float, *, is_busy: bool) -> None:
        """Wait until the next picture is due. If work comes while the engine is idle, it is due
        earlier."""
        loop = asyncio.get_running_loop()
        while True:
            ends_s = began_s + max(REST_S, self._gap_s)
            if is_busy or self._client.num_open:
                ends_s = began_s + self._gap_s
            if self._is_draining():
                return
            left_s = ends_s - loop.time()
            if left_s <= 0:
                return
            await asyncio.sleep(min(left_s, 1.0 / RATE))

    def _end(self) -> None:
        """The server stops: end all streams, so that it need not wait for them."""
        for viewer in self._viewers:
            viewer.show(
                event(
                    "away",
                    {"why": "the server is stopping"},
                )
            )
            viewer.end()

    def _question(self) -> Watch:
        first = self._engines.get(0)
        seen = Seen() if first is None else first.seen
        return Watch(
            since_step=seen.step,
            since_round=seen.round,
            seen={rank: one.seen for rank, one in self._engines.items()},
        )

    async def _take(self, picture: Picture) -> JsonObject:
        if self._texts is None:
            self._texts = HeadTexts(
                self._tokenizer,
                self._client.engine.vocab_size,
            )
        if picture.tree is None:
            fields = shown(picture, self._texts)
        else:
            # Decoding two hundred texts takes some milliseconds: do it outside of the event loop.
            fields = await asyncio.to_thread(
                shown,
                picture,
                self._texts,
            )
        self._engines.setdefault(picture.rank, _Watched()).take(fields)
        self._shown_s = asyncio.get_running_loop().time()
        return fields

    def _show(self, picture: bytes) -> None:
        for viewer in self._viewers:
            viewer.show(picture)
