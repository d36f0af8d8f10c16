"""A real server on a loopback port in a thread of its own, in front of an engine that is 100 lines
of Python.

The engine answers a prompt with what the test wants (`script`), one token of each request a step.
No test waits for time to pass: `HANG_S` only ends what hangs, and whoever tests a time-out passes
it by the clock of a `SkippingLoop`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np
import uvloop

from tests.server.template_here import rendering_here
from tests.text.tokens import EOS, byte_tokenizer
from weft.client.client import EngineClient
from weft.config.limits import Limits
from weft.config.server import ServerConfig
from weft.messages import control, sessions, status
from weft.messages.calls import ControlReply, ControlRequest
from weft.messages.codec import FromEngine, ToEngine, decode_from_engine, decode_to_engine, encode
from weft.messages.pins import ToolPause
from weft.messages.replies import (
    AuxPiece,
    Finish,
    HiddenStatesPiece,
    PromptLogprobsPiece,
    StepOutput,
    TokenLogprobs,
)
from weft.messages.requests import Abort, BatchGenerate, GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.server.app import create_app
from weft.server.catalog import ModelCatalog
from weft.server.context import ModelFacts, Readiness, ServerInfo
from weft.server.serve import make_server
from weft.text.media.families import ProcessorRecipe
from weft.text.tokenizer import Tokenizer

T = TypeVar("T")
HANG_S = 240.0  # whatever takes so long does not come any more
CONTEXT = 2_000
MODEL = "tiny/byte-model"
READY = status.EngineReady(
    model_summary="byte model (0 B)",
    vocab_size=270,
    context_length=CONTEXT,
    max_prompt_tokens=CONTEXT - 1,
    kv_tokens=8_000,
    page_size=16,
    startup=[("weights", "none", 0.0)],
    hidden_size=3,
    gives_hidden_states=True,
)


def as_bytes(text: str) -> list[int]:
    return list(text.encode())


@dataclass
class _Running:
    request: GenerateRequest
    tokens: list[int]
    num_done: int = 0


@dataclass
class FakeEngine:
    """`script(prompt ids)` gives the whole completion; its end is EOS. `deliver` is where answers
    go."""

    deliver: Callable[[FromEngine], None]
    script: Callable[[list[int]], list[int]] = lambda ids: as_bytes("Hello, wörld! 🎉")
    step_s: float = 0.0
    hold: bool = False  # requests stay queued
    full: bool = False  # requests are refused, as by a full queue
    busy: bool = False  # the cache cannot be flushed
    seen: list[GenerateRequest] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    paused: list[ToolPause] = field(default_factory=list)
    running: dict[int, _Running] = field(default_factory=dict)
    stepping: bool = False

    def send(self, message: ToEngine) -> None:
        """As the client's `send`: through the codec, like on the real way."""
        message = decode_to_engine(encode(message))
        match message:
            case GenerateRequest():
                self.seen.append(message)
                if self.full:
                    self.answer(
                        StepOutput(
                            finished=[_end(message, "abort", 503, "The request queue is full.")]
                        )
                    )
                    return
                prompt = np.frombuffer(message.input_ids, dtype=np.int32).tolist()
                self.running[message.id] = _Running(message, self.script(prompt))
                self.start()
            case BatchGenerate():
                for member in message.members():
                    self.send(member)
            case Abort():
                ids = tuple(self.running) if message.all else message.ids
                self.aborted += ids
                gone = [self.running.pop(id) for id in ids if id in self.running]
                self.answer(
                    StepOutput(
                        finished=[_end(one.request, "abort", 200, message.message) for one in gone]
                    )
                )
            case ToolPause():
                self.paused.append(message)
            case ControlRequest():
                reply = self.reply(message)
                if reply is not None:
                    self.answer(msgspec.structs.replace(reply, call=message.call))

    def reply(self, message: ControlRequest[Any]) -> ControlReply | None:
        """The answer to a control request; None for one that this engine does not know."""
        match message:
            case control.HealthCheck():
                return control.HealthCheckReply(success=True)
            case control.BlockInput():
                return control.InputReply("blocked", 0)
            case control.UnblockInput():
                return control.InputReply("unblocked", 0)
            case control.PauseGeneration():
                return control.GenerationReply(message.mode, 0)
            case control.ContinueGeneration():
                return control.GenerationReply("", 0)
            case control.SetPolicy():
                known = message.policy in ("fcfs", "lpm")
                return control.SetPolicyReply(success=known, before="fcfs", message="no policy")
            case control.FlushCache():
                why_not = "busy" if self.busy else ""
                return control.FlushCacheReply(success=not self.busy, message=why_not)
            case control.GetState():
                return control.GetStateReply(
                    status.Stats(
                        num_running=len(self.running), kv_tokens=8_000, total_prompt_tokens=10
                    )
                )
            case control.FreezeGC():
                return control.FreezeGCReply(7)
            case sessions.OpenSession():
                return sessions.OpenSessionReply(success=True)
            case sessions.CloseSession():
                return sessions.CloseSessionReply(success=True)
        return None

    def answer(self, message: FromEngine) -> None:
        data = encode(message)
        asyncio.get_running_loop().call_soon(lambda: self.deliver(decode_from_engine(data)))

    def start(self) -> None:
        if not self.stepping:
            self.stepping = True
            self._task = asyncio.get_running_loop().create_task(self.loop())

    async def loop(self) -> None:
        while self.running:
            await asyncio.sleep(self.step_s or (0.005 if self.hold else 0))
            if not self.hold:
                self.answer(self.step())
        self.stepping = False

    def step(self) -> StepOutput:
        ids: list[int] = []
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        finished: list[Finish] = []
        given: list[AuxPiece] = []
        for id, one in list(self.running.items()):
            params = one.request.sampling
            if params.prompt_logprobs is not None and not one.num_done:
                given += _told(one.request, params)
            if params.hidden_states is not None:
                given.append(_states(one, whole=params.hidden_states == "all"))
            if params.max_new_tokens == 0:
                finished.append(_end(one.request, "length", 200, ""))
                del self.running[id]
                continue
            is_over = one.num_done >= len(one.tokens)
            token = EOS if is_over else one.tokens[one.num_done]
            one.num_done += 1
            ids.append(id)
            tokens.append(token)
            if params.logprobs is not None:
                top = [(token + k) % 256 for k in range(params.logprobs)]
                values = [-0.5 - k for k in range(params.logprobs)]
                others = [-float(token) for token in params.logprob_token_ids]
                told = TokenLogprobs(
                    id=id, logprob=-0.5, top_ids=top, top_logprobs=values, id_logprobs=others
                )
                logprobs.append(told)
            assert params.max_new_tokens is not None
            stopped = (is_over and not params.ignore_eos) or token in params.stop_token_ids
            if stopped or one.num_done >= params.max_new_tokens:
                finish = _end(one.request, "stop" if stopped else "length", 200, "", one.num_done)
                finished.append(finish if not stopped else _matched(finish, token))
                del self.running[id]
        return StepOutput(
            ids=np.asarray(ids, dtype=np.int64).tobytes(),
            tokens=np.asarray(tokens, dtype=np.int32).tobytes(),
            logprobs=logprobs,
            aux=given,
            finished=finished,
        )


def _states(one: _Running, *, whole: bool) -> HiddenStatesPiece:
    """Of the tokens that a step computes: the one at position p has [p, p + 0.5, -p]."""
    prompt_len = len(one.request.input_ids) // 4
    end = prompt_len + one.num_done
    start = 0 if whole and not one.num_done else end - 1
    positions = np.arange(start, end, dtype=np.float32)
    vectors = np.stack([positions, positions + 0.5, -positions], axis=1).tobytes()
    return HiddenStatesPiece(
        id=one.request.id, start=start, num_tokens=end - start, vectors=vectors
    )


def _told(request: GenerateRequest, params: SamplingParams) -> list[AuxPiece]:
    """In pieces of 4: token t has log probability -t, is the third, and t + 1, t + 2.. are
    likelier: -0.5, -1.5.."""
    ids = np.frombuffer(request.input_ids, dtype=np.int32)[params.prompt_logprobs_start :]
    num_top = params.prompt_logprobs or 0
    num_ids = len(params.logprob_token_ids)
    logprobs = -ids.astype(np.float32)
    logprobs[:1] = np.nan
    top = ids[:, None] + np.arange(1, 1 + num_top, dtype=np.int32)
    values = np.tile(-0.5 - np.arange(num_top, dtype=np.float32), (len(ids), 1))
    others = np.tile(-np.array(params.logprob_token_ids, dtype=np.float32), (len(ids), 1))
    return [
        PromptLogprobsPiece(
            id=request.id,
            tokens=ids[piece].tobytes(),
            logprobs=logprobs[piece].tobytes(),
            ranks=np.full(len(ids[piece]), 3, dtype=np.int32).tobytes(),
            num_top=num_top,
            top_ids=top[piece].tobytes(),
            top_logprobs=values[piece].tobytes(),
            num_ids=num_ids,
            id_logprobs=others[piece].tobytes(),
        )
        for piece in (slice(begin, begin + 4) for begin in range(0, len(ids), 4))
    ]


def _end(
    request: GenerateRequest, reason: Any, status: int, message: str, num_tokens: int = 0
) -> Finish:
    prompt_tokens = len(request.input_ids) // 4
    return Finish(
        id=request.id,
        reason=reason,
        status=status,
        message=message,
        prompt_tokens=prompt_tokens,
        completion_tokens=num_tokens,
        cached_tokens=prompt_tokens // 2,
        queue_s=0.001,
    )


def _matched(finish: Finish, token: int) -> Finish:
    return msgspec.structs.replace(finish, matched=token)


class RunningServer:
    """The server, the client behind it and the fake engine, all in one event loop in another
    thread."""

    def __init__(
        self,
        config: ServerConfig,
        new_loop: Callable[[], asyncio.AbstractEventLoop],
        limits: Limits | None = None,
        tokenizer: Tokenizer | None = None,
        sampling: SamplingParams | None = None,
        processor: ProcessorRecipe | None = None,
        port: int = 0,
        facts: ModelFacts | None = None,
        settings: dict[str, Any] | None = None,
        catalog: ModelCatalog | None = None,
        **client: Any,
    ) -> None:
        self.tokenizer = tokenizer or byte_tokenizer()
        self.readiness = Readiness()
        self.engine = FakeEngine(deliver=lambda message: self.client.deliver(message))
        self.client = EngineClient(
            self.tokenizer, lambda message: self.engine.send(message), **client
        )
        self.client.deliver(READY)
        self.readiness.mark_ready()
        info = ServerInfo(
            model_name=MODEL,
            context_length=CONTEXT,
            version="0.1.0",
            started_at=time.time(),
            sampling=sampling or SamplingParams(),
            settings={"dtype": "auto", **(settings or {})},
            model=facts or ModelFacts(),
        )
        with rendering_here():
            app = create_app(
                self.client,
                self.tokenizer,
                config,
                info,
                self.readiness,
                limits,
                processor=processor,
                catalog=catalog,
            )
        self.server = make_server(app, config, limits, self.client.metrics.refused)
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._loop = new_loop()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()
        assert eventually(lambda: self.server.started), "the server does not start"
        self.call(self.readiness.mark_ready)

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(timeout=HANG_S)
        assert not self._thread.is_alive()

    def call(self, work: Callable[[], T]) -> T:
        """`work()` in the server's event loop."""

        async def run() -> T:
            return work()

        return self.wait_for(run())

    def wait_for(self, work: Awaitable[T]) -> T:
        async def run() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(HANG_S)

    def reset(self) -> None:
        """Back to the engine of the beginning."""

        def fresh() -> None:
            self.engine = FakeEngine(deliver=lambda message: self.client.deliver(message))

        assert eventually(lambda: not self.engine.running), (
            "requests are left over from the test before"
        )
        self.call(fresh)

    @property
    def connections(self) -> set[Any]:
        return self.server.server_state.connections

    def leave(self, path: str, body: dict[str, Any]) -> None:
        """A client that asks, and goes without an answer when the engine knows of it."""
        content = json.dumps(body).encode()
        before = len(self.engine.seen)
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}"
        with socket.create_connection(("127.0.0.1", self.port), timeout=HANG_S) as client:
            client.sendall(head.encode() + b"\r\n\r\n" + content)
            assert eventually(lambda: len(self.engine.seen) > before)

    def skip(self, seconds: float) -> None:
        """So much time passes at once for the server, which runs in a `SkippingLoop`."""
        assert isinstance(self._loop, SkippingLoop)
        self._loop.call_soon_threadsafe(self._loop.skip, seconds)
        self.call(lambda: None)

    async def _end_tasks(self) -> None:
        self.readiness.drain()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self.server.serve(sockets=[self._socket]))
            self._loop.run_until_complete(self._end_tasks())
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
            self._socket.close()
            self.readiness.end()


@contextlib.contextmanager
def running(
    config: ServerConfig | None = None,
    new_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
    limits: Limits | None = None,
    tokenizer: Tokenizer | None = None,
    sampling: SamplingParams | None = None,
    processor: ProcessorRecipe | None = None,
    port: int = 0,
    facts: ModelFacts | None = None,
    settings: dict[str, Any] | None = None,
    **client: Any,
) -> Iterator[RunningServer]:
    """A server for one `with` block. `port`: 0 is one that is free; `settings`: of the engine;
    `client`: options of its `EngineClient`."""
    server = RunningServer(
        config or ServerConfig(drain_s=1.0),
        new_loop,
        limits,
        tokenizer,
        sampling,
        processor,
        port,
        facts,
        settings,
        **client,
    )
    server.start()
    try:
        yield server
    finally:
        server.stop()


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock can be put forward."""

    skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_s

    def skip(self, seconds: float) -> None:
        self.skipped_s += seconds


def eventually(check: Callable[[], Any], within_s: float = HANG_S) -> bool:
    """Whether `check()` becomes true before it must be taken to hang."""
    deadline = time.monotonic() + within_s
    while not check():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
