"""The front's side of the engine: requests in, completions out, and calls that control the engine.

One `EngineClient` per engine. A request's way through it:

    submit ─▶ checked ─▶ numbered ─▶ send ─▶ (engine) ─▶ deliver ─▶ TokenDeliveries ─▶ Generation
                                                  one StepOutput for all    wakes its consumer

It belongs to one event loop and is not thread-safe. It opens no socket: `send` takes messages for
the engine, `deliver` gets messages from it, so an in-process engine only needs `send=inbox.append`.
How a completion gets its tokens, and how it ends, is in `deliveries.py`; a consumer reads from its
`Generation`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from weft.client.calls import CALL_TIMEOUT_S, EngineFault, PendingCalls
from weft.client.completion_metrics import CompletionRecorder
from weft.client.deferred import ShareLimits
from weft.client.deliveries import TokenDeliveries
from weft.client.engine_state import (
    HANG_AFTER_S,
    EngineLoad,
    EngineState,
    EngineUnavailable,
    HangDetector,
)
from weft.client.explained import explained
from weft.client.front_times import MAX_FRONT_TIMES, Fronts, FrontTimes
from weft.client.generation import Completion, CompletionSpec, Generation, TextDelivery
from weft.client.requests import (
    checked,
    media_bytes,
    numbered,
    unpack_ids,
    without_prompt,
)
from weft.client.slow_requests import SlowRequests
from weft.messages.calls import ControlReply, ControlRequest
from weft.messages.codec import FromEngine, ToEngine, Unreadable
from weft.messages.control import GetState
from weft.messages.replies import StepOutput, ids_of
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.messages.sessions import SessionChanges
from weft.messages.status import EngineFailed, EngineReady, Heartbeat, Stats
from weft.messages.weights import WeightsReply
from weft.observe.log import EventLog
from weft.observe.metrics import Metrics
from weft.observe.request_context import current
from weft.observe.survivable import is_survivable
from weft.observe.trace import Tracer
from weft.text.stop.answer import AnswerMatcher
from weft.text.stop.stopping import StopSets
from weft.text.tokenizer import Tokenizer

MAX_PENDING_TOKENS = 4_096  # unread tokens that a consumer may have while its request continues

log = EventLog("client")
R = TypeVar("R", bound=ControlReply)


class ClientLimits(NamedTuple):
    max_pending_tokens: int
    max_request_share: float  # of the engine's rows, for one request at a time; 0: no limit
    clamps_max_tokens: bool  # cut a length beyond the context instead of refusing it


class SessionKeeper(Protocol):
    """Stores what the engine tells about its sessions."""

    def note(self, changes: SessionChanges) -> None: ...

    async def settled(self) -> None:
        """Wait until all that was noted is stored. Raises if it could not be."""

    async def restore(self, client: EngineClient) -> None:
        """Give the engine the sessions of its predecessor."""


class EngineClient:
    """Submits work to one engine and distributes its outputs."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        send: Callable[[ToEngine], None],
        *,
        metrics: Metrics | None = None,
        tracer: Tracer | None = None,
        log_requests: bool = False,
        log_slow_s: float = 0.0,
        max_pending_tokens: int = MAX_PENDING_TOKENS,
        step_timeout_s: float = 0.0,
        max_request_share: float = 0.0,
        clamp_max_tokens: bool = False,
        hang_after_s: float = HANG_AFTER_S,
    ) -> None:
        """`log_slow_s`: the log explains a request whose first token comes later; 0: none.

        The limits are those of `ClientLimits`, and of `HangDetector`."""
        self.metrics = metrics or Metrics()
        self.state = EngineState(self.metrics, HangDetector(step_timeout_s, hang_after_s))
        # One for each engine behind this client; the launcher of several writes it.
        self.engines: Sequence[EngineLoad] = (self.state,)
        self.calls = PendingCalls()
        self.session_keeper: SessionKeeper | None = None  # None: they end with the engine
        self._tokenizer = tokenizer
        self.send = send  # sends a message that has no reply
        slow: SlowRequests | None = None
        if log_slow_s:
            misses = self.metrics.completions.misses
            slow = SlowRequests(partial(explained, self), misses, log_slow_s)
        self.recorder = CompletionRecorder(self.metrics, tracer, slow)
        self.fronts: Fronts = self.recorder.fronts
        self._limits = ClientLimits(max_pending_tokens, max_request_share, clamp_max_tokens)
        self._numbers = itertools.count(1)
        self.deliveries = TokenDeliveries(
            send,
            self.state,
            self.recorder,
            self.metrics,
            max_pending_tokens,
            log_requests=log_requests,
        )

    @property
    def engine(self) -> EngineReady:
        """The engine's own description. Raises `EngineUnavailable` if it cannot take work."""
        return self.state.require_ready()

    @property
    def num_open(self) -> int:
        """Completions that have not ended."""
        return len(self.deliveries.open.by_id)

    @property
    def num_embed_bytes(self) -> int:
        """Bytes of input embeddings that the engine keeps. Each completion counts its own; those of
        pictures, videos and sounds count once for all completions of a prompt."""
        return sum(one.spec.num_embed_bytes for one in self.deliveries.open.by_id.values())

    # ---- requests

    def submit(
        self,
        requests: Sequence[GenerateRequest],
        deliveries: Sequence[TextDelivery] = (),
        *,
        stream: bool = True,
        valid: SamplingParams | None = None,
    ) -> Generation:
        """Start generating. Nothing is sent unless all requests are valid.

        `deliveries`: one for each request; without, each token is delivered at once.
        `valid`: parameters that were checked before the work on the prompts.
        Raises `InvalidParam` for mistakes of the user, `EngineUnavailable` without an engine.
        """
        engine = self.state.require_ready()
        clamps = self._limits.clamps_max_tokens
        has_stops = False
        has_session = False
        to_send: list[GenerateRequest] = []
        for request in requests:
            one_to_send = checked(
                request,
                engine,
                self._tokenizer,
                clamps=clamps,
                valid=valid,
                stats=self.state.stats,
            )
            to_send.append(one_to_send)
            if request.sampling.stop or request.sampling.stop_regex:
                has_stops = True
            if request.session is not None:
                has_session = True
        stops: StopSets | None = None
        if has_stops:
            stops = StopSets(request.sampling for request in requests)
        generation = Generation(stream=stream, on_close=self.deliveries.close)
        if has_session and self.session_keeper is not None:
            generation.before_end = self.session_keeper.settled
        sent: list[GenerateRequest] = []
        metrics = self.metrics.completions
        http = current.get()
        # What an HTTP request asks after it had an answer, such as the next window of a sound,
        # begins now.
        is_first = http is None or not http.is_in_engine
        for index, request in enumerate(requests):
            metrics.params_n.observe_one(request.sampling.n)
            metrics.params_max_tokens.observe_one(to_send[index].sampling.max_new_tokens or 0)
            delivery = deliveries[index] if deliveries else TextDelivery()
            of_request = numbered(to_send[index], self._numbers)
            for one in of_request:
                completion = self._completion(
                    one.id,
                    request,
                    generation,
                    delivery,
                    stops,
                    is_first=is_first,
                )
                # Entered before anything is sent, because an in-process engine may answer at once.
                self.deliveries.open.add(completion)
            sent += of_request
        if self._limits.max_request_share and len(sent) > 1:
            sent = self._defer(sent, generation, engine)
        self.deliveries.send_requests(sent)
        return generation

    def _completion(
        self,
        id: int,
        request: GenerateRequest,
        generation: Generation,
        delivery: TextDelivery,
        stops: StopSets | None,
        *,
        is_first: bool,
    ) -> Completion:
        started_s = time.perf_counter()
        http = current.get()
        sampling = request.sampling
        ids = unpack_ids(request.input_ids)
        arrived_s = started_s
        front = FrontTimes(started_s)
        if http is not None and is_first:
            arrived_s = http.arrived_s
            front = FrontTimes(arrived_s, dict(http.spent), elsewhere=http.elsewhere)
            http.is_in_engine = True
        fronts = self.recorder.fronts
        fronts[id] = front
        if len(fronts) > MAX_FRONT_TIMES:
            del fronts[next(iter(fronts))]
        num_embed_bytes = len(request.vectors)
        if request.media:  # shared by its completions
            num_embed_bytes = media_bytes(request) // sampling.n
        spec = CompletionSpec(
            request=without_prompt(request, id),
            choice=len(generation.completions),
            prompt_len=len(ids),
            latency=self.metrics.completions.latencies.of(
                request.priority, background=request.background
            ),
            started_s=started_s,
            arrived_s=arrived_s,
            front=front,
            num_embed_bytes=num_embed_bytes,
            stream_interval=min(delivery.stream_interval, self._limits.max_pending_tokens),
            traceparent="" if http is None else http.traceparent,
        )
        detokenizer = self._tokenizer.detokenizer(
            skip_special_tokens=sampling.skip_special_tokens,
            prompt=() if request.vectors else ids,  # with vectors the ids mean nothing
        )
        matcher = None if stops is None else stops.matcher(sampling)
        if matcher is not None and delivery.reasoning is not None:
            matcher = AnswerMatcher(matcher, delivery.reasoning())
        return Completion(spec, generation, detokenizer, matcher)

    def _defer(
        self,
        requests: list[GenerateRequest],
        generation: Generation,
        engine: EngineReady,
    ) -> list[GenerateRequest]:
        """Keep back requests beyond their share of the engine. Returns the requests that may be
        sent now."""
        if not engine.max_running_requests:
            return requests
        share = int(engine.max_running_requests * self._limits.max_request_share)
        # The other half of the next step is for the requests of others.
        limits = ShareLimits(max(share, 1), engine.step_tokens // 2, engine.page_size)
        sent = self.deliveries.open.defer(generation, requests, limits)
        if len(sent) < len(requests):
            deferred_s = time.perf_counter()
            sent_ids = {request.id for request in sent}
            for request in requests:
                if request.id not in sent_ids:
                    self.deliveries.open.by_id[request.id].spec.front.deferred_s = deferred_s
        return sent

    # ---- what comes from the engine

    async def run(self, receive: Callable[[], Awaitable[FromEngine | Unreadable]]) -> None:
        """Deliver all messages that `receive` returns, for ever. It must be the only task that
        reads.

        If a message cannot be read or delivered, its call or its completions end.
        """
        while True:
            message = await receive()
            if isinstance(message, Unreadable):
                log.error("message_unreadable", call=message.call or "-", requests=len(message.ids))
                self._give_up(message)
            else:
                self._deliver_or_give_up(message)
            await asyncio.sleep(0)  # many messages must not keep consumers from running

    def _deliver_or_give_up(self, message: FromEngine) -> None:
        try:
            self.deliver(message)
        except BaseException as exc:
            if not is_survivable(exc):
                raise
            log.exception("message_failed", exc, type=type(message).__name__)
            ids: set[int] = set()
            if isinstance(message, StepOutput):
                ids = ids_of(message)
            call = getattr(message, "call", None)
            self._give_up(Unreadable(call, frozenset(ids)))

    def _give_up(self, lost: Unreadable) -> None:
        """A message is lost: end its call, or its completions, with an error."""
        message = "the engine's answer could not be read"
        if lost.call is not None:
            self.calls.fail(lost.call, EngineFault(message))
        self.deliveries.give_up(lost.ids, message)

    def deliver(self, message: FromEngine) -> None:
        """Process one message from the engine."""
        self.state.hang_detector.heard()
        match message:
            case StepOutput():
                self.deliveries.step(message)
            case Stats():
                self.state.record_stats(message)
            case Heartbeat():
                self.state.hang_detector.beat(message)
            case EngineReady():
                self.state.mark_ready(message)
            case EngineFailed():
                self.engine_lost(message.message)
            case SessionChanges():
                if self.session_keeper is not None:
                    self.session_keeper.note(message)
            case _:
                self._deliver_reply(message)

    def _deliver_reply(self, reply: ControlReply) -> None:
        if isinstance(reply, WeightsReply):
            self.state.record_weights(reply)
        self.calls.resolve(reply)

    def engine_lost(self, reason: str) -> None:
        """The engine is gone: end all open completions with an error and refuse new requests."""
        if self.state.lost is None:
            log.error("engine_lost", reason=reason, open=self.num_open)
        self.close(reason)

    def close(self, reason: str) -> None:
        """Nothing is sent to the engine any more: end all open completions and calls with an error,
        and refuse new ones."""
        self.state.mark_lost(reason)
        message = f"the engine has stopped: {reason}"
        self.deliveries.end_all(message)
        self.calls.fail_all(EngineUnavailable(message))

    # ---- control

    async def call(
        self,
        request: ControlRequest[R],
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> R:
        """Send a control request, and wait for its reply.

        Raises `EngineUnavailable` without an engine or without a reply in time, `EngineFault` if
        the engine failed on it.
        """
        self.state.require_ready()
        return await self.calls.call(self.send, request, timeout_s)

    async def get_state(self, timeout_s: float = CALL_TIMEOUT_S) -> Stats:
        """The engine's current numbers."""
        reply = await self.call(GetState(), timeout_s)
        self.state.record_stats(reply.stats)
        return reply.stats
