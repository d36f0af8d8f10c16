"""The live page for a recording: pictures of an engine that ran earlier, or of a simulated one.

    journal or simulation ─▶ Camera ─▶ frames ─▶ a server for this machine ─▶ the page

The pictures are those that the live page would have shown, one per step. When there are too many,
every second one is dropped, repeatedly, so that a film of any length fits in memory. This module
knows neither how the engine is run, nor the format of a journal.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.client.pictures import ids_as_text, shown
from weft.config.numbers import counted
from weft.config.options import SettingsError
from weft.config.server import ServerConfig
from weft.engine.engine import Engine
from weft.engine.explain import trace_request_flow
from weft.json_types import JsonObject
from weft.launch.listen import listen
from weft.messages.codec import FromEngine, ToEngine
from weft.messages.control import Explanation
from weft.messages.picture import Watch
from weft.server.auth import Pages
from weft.server.errors import ApiError, error_response
from weft.server.page.files import INDEX, read_files
from weft.server.serve import make_server, run

MAX_FRAMES = 1_200
STEPS_BEFORE = 240  # steps before a frame whose bars it shows
SPAN_S = 60.0  # time before a frame whose figures it shows
NUM_POINTS = 30  # number of these figures
COMPRESSION = 1
HOST = "127.0.0.1"


class Frame(NamedTuple):
    """One picture."""

    step: int
    at_s: float  # since the first frame
    packed: bytes  # the JSON of the picture, compressed
    point: JsonObject  # time and counters of the picture: `at_s`, `stats`


class Camera:
    """Takes a picture of an engine after each step, from number `since` on."""

    def __init__(self, engine: Engine, since: int = 0) -> None:
        self._pictures = engine.services.observers.pictures
        self._counters = engine.scheduler.planner
        self._since = since
        self._last_step = -1
        self._first_s: float | None = None
        self._tree: JsonObject | None = None
        self._round = 0
        self.frames: list[Frame] = []
        self.stride = 1  # steps from one frame to the next
        self._pictures.stay()

    def look(self, now: float) -> None:
        """Take a picture if the engine has planned another step since the last call."""
        step = self._counters.num_steps - 1
        if step == self._last_step:
            return
        self._last_step = step
        if step < self._since or step % self.stride:
            return
        if len(self.frames) == MAX_FRAMES:
            self._thin_out()
            if step % self.stride:
                return
        self.frames.append(self._frame(step, now))

    def _frame(self, step: int, now: float) -> Frame:
        if self._first_s is None:
            self._first_s = now
        question = Watch(since_step=step - STEPS_BEFORE, since_round=self._round)
        fields = shown(self._pictures.take(question, now), ids_as_text)
        # Each frame is complete, because the page can jump to any frame: it has the tree as last
        # seen.
        tree = fields.get("tree")
        if tree is not None:
            self._tree = tree
            self._round = tree["round"]
        fields["tree"] = self._tree
        packed = zlib.compress(msgspec.json.encode(fields), COMPRESSION)
        point: JsonObject = {
            "at_s": fields["at_s"],
            "stats": fields["stats"],
        }
        return Frame(step, now - self._first_s, packed, point)

    def _thin_out(self) -> None:
        """Keep every second frame."""
        self.stride *= 2
        self.frames = [frame for frame in self.frames if frame.step % self.stride == 0]


class FilmedEngine:
    """A simulated engine with a camera."""

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock
        self.camera = Camera(engine)

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def submit(self, message: ToEngine) -> FromEngine | None:
        return self._engine.submit(message)

    def step(self) -> list[FromEngine]:
        replies = self._engine.step()
        self.camera.look(self._clock())
        return replies

    def film(self, title: str, summary: str) -> Film:
        """The film of the pictures so far."""

        def tell(rid: str) -> list[Explanation]:
            return trace_request_flow(self._engine.scheduler, rid, self._clock())

        return Film(title, summary, self.camera.frames, self.camera.stride, tell)


class Film(NamedTuple):
    """The data of the page."""

    title: str
    summary: str
    frames: Sequence[Frame]
    stride: int
    # traces of the requests with a name, at the end of the run
    tell: Callable[[str], list[Explanation]]
    journals: tuple[str, ...] = ()  # path of the recorded journal, if the film is of one

    @property
    def pictures(self) -> str:
        """The steps that have a picture, in words."""
        return "each step" if self.stride == 1 else f"every {self.stride}th step"

    def points_before(self, number: int) -> list[JsonObject]:
        """Times and counters before a frame, earliest first. Without them, the rates of the frame
        would depend on the frame shown before."""
        end_s = self.frames[number].at_s
        first = number
        while first and end_s - self.frames[first - 1].at_s <= SPAN_S:
            first -= 1
        stride = (number - first) // NUM_POINTS + 1
        # The page computes rates from the nearest points, so all of these are included.
        near = max(number - NUM_POINTS // 2, first)
        numbers = [
            *range(first, near, stride),
            *range(near, number),
        ]
        return [self.frames[one].point for one in numbers]


def make_film_app(film: Film) -> ASGIApp:
    """The web app: the page, its frames and the traces of requests. Only for pages of this
    server."""
    found = read_files()
    index = found[INDEX]
    markup = index.body.replace(b'<html lang="en"', b'<html lang="en" data-mode="film"', 1)

    async def page(request: Request) -> Response:
        headers = dict(index.headers)
        del headers["etag"]  # the page differs from that of a server
        return Response(markup, headers=headers)

    async def file(request: Request) -> Response:
        one = found.get(request.path_params["name"])
        if one is None:
            raise ApiError(404, "the page has no such file")
        return Response(one.body, headers=one.headers)

    async def facts(request: Request) -> Response:
        facts = {
            "title": film.title,
            "model": film.title,
            "summary": f"{film.summary} · a picture of {film.pictures}",
            "journals": film.journals,
            "frames": [{"step": one.step, "at_s": one.at_s} for one in film.frames],
        }
        return _json(msgspec.json.encode(facts))

    async def frame(request: Request) -> Response:
        number = request.path_params["number"]
        if number >= len(film.frames):
            raise ApiError(
                404,
                f"there is no frame {number:,}; the film has {counted(len(film.frames), 'frame')}",
            )
        fields = msgspec.json.decode(zlib.decompress(film.frames[number].packed))
        fields["before"] = film.points_before(number)
        return _json(msgspec.json.encode(fields))

    async def story(request: Request) -> Response:
        rid = request.path_params["rid"]
        stories = film.tell(rid)
        if not stories:
            raise ApiError(
                404, f"no request named {rid[:128]!r} is among the last of the recording"
            )
        return _json(msgspec.json.encode({"requests": stories}))

    router = Router(
        [
            Route("/", page),
            Route("/page/{name:path}", file),
            Route("/film", facts),
            Route("/film/{number:int}", frame),
            Route("/requests/{rid:path}", story),
        ],
        redirect_slashes=False,
    )
    return _ForPagesOfOurs(router)


class _ForPagesOfOurs:
    """Recordings contain users' prompts, so pages of other origins must not read them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._pages = Pages(bound=HOST)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        scope["app"] = self._app
        refusal = self._pages.refusal(Headers(scope=scope))
        try:
            if refusal is not None:
                raise refusal
            await self._app(scope, receive, send)
        except Exception as exc:
            await error_response(exc)(scope, receive, send)


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json", headers={"cache-control": "no-store"})


def show_film(film: Film, port: int) -> None:
    """Serve the page to this machine until the user interrupts it. Raises SettingsError if the port
    is taken."""
    if not film.frames:
        raise SettingsError("there is no step to show")
    config = ServerConfig(host=HOST, port=port, drain_s=1.0)
    socket = listen(HOST, port)
    url = f"http://{HOST}:{socket.getsockname()[1]}"
    print(
        f"{counted(len(film.frames), 'picture')}, of {film.pictures}: {url}  (Ctrl-C ends)",
        flush=True,
    )
    server = make_server(make_film_app(film), config)
    run(server.serve(sockets=[socket]))
