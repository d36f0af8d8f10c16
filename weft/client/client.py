"""The front's side of the engine: prompts in, completions out, and the calls that control it.

One `EngineClient` per engine. It numbers requests, sends them, and hands the columns of each `StepOutput` to the
completions they belong to. It lives on one event loop and is not thread-safe. It opens no socket: `send` takes what
goes to the engine, `deliver` gets what comes from it, so an in-process engine needs no more than `send=inbox.append`.

Who owns what: the client alone writes the table of open completions; whoever holds a `Generation` takes from it.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from weft.client.completion_metrics import CompletionRecorder
from weft.client.generation import Completion, Generation
from weft.client.hang_detector import HANG_AFTER_S, HangDetector
from weft.client.intake import HeldBack
from weft.client.prompt import Prompt, check_extras, check_task, to_token_params
from weft.messages.calls import CallFailed, ControlReply, ControlRequest, reply_type
from weft.messages.codec import FromEngine, ToEngine, Unreadable
from weft.messages.control import GetState
from weft.messages.replies import Finish, StepOutput, ids_of
from weft.messages.requests import Abort, BatchGenerate, GenerateRequest
from weft.messages.sampling import InvalidParam, SamplingParams, check_number, check_token_ids
from weft.messages.status import EngineFailed, EngineReady, Heartbeat, Stats
from weft.messages.weights import FIRST_VERSION, WeightsReply
from weft.observe.log import EventLog
from weft.observe.metrics import Metrics
from weft.observe.request_context import current
from weft.observe.status import StatusLine
from weft.observe.survivable import is_survivable
from weft.observe.trace import Tracer
from weft.text.stop.stopping import StopSets
from weft.text.tokenizer import ContextExceeded, Tokenizer

MAX_PENDING_TOKENS = 4_096  # that a consumer may leave unread while its request goes on
CALL_TIMEOUT_S = 10.0

log = EventLog("client")
R = TypeVar("R", bound=ControlReply)


class EngineUnavailable(Exception):
    """The engine is not ready yet, or has stopped, or does not answer. The message is for the user."""


class EngineFault(Exception):
    """The engine could not carry out a control request, or its answer could not be read: a fault of ours."""


class EngineClient:
    """Submits work to one engine and distributes what it answers."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        send: Callable[[ToEngine], None],
        *,
        metrics: Metrics | None = None,
        tracer: Tracer | None = None,
        log_requests: bool = False,
        max_pending_tokens: int = MAX_PENDING_TOKENS,
        step_timeout_s: float = 0.0,
        max_request_share: float = 0.0,
        clamp_max_tokens: bool = False,
        hang_after_s: float = HANG_AFTER_S,
    ) -> None:
        """`max_request_share`: of the engine's rows, for the completions of one request at a time; 0: no limit.
        `clamp_max_tokens`: cut what is asked for beyond the context instead of refusing it."""
        self.metrics = metrics or Metrics()
        self.stats = Stats()  # the last that the engine told
        self.stats_at = time.monotonic()  # and when
        self.log_requests = log_requests  # one line per finished request
        self.ready: EngineReady | None = None
        self.lost: str | None = None  # why there is no engine any more
        self.weight_version = FIRST_VERSION  # of the weights in use
        self.released: list[str] = []  # memory of the engine that is given back: it takes no work
        self.num_late_tokens = 0  # for requests that had ended here
        self._tokenizer = tokenizer
        self._send = send
        self.hang_detector = HangDetector(step_timeout_s, hang_after_s)
        self._recorder = CompletionRecorder(self.metrics, tracer)
        self._status = StatusLine()
        self._max_pending_tokens = max_pending_tokens
        self._max_request_share = max_request_share
        self._clamps = clamp_max_tokens
        self._numbers = itertools.count(1)
        self._open: dict[int, Completion] = {}
        self._held: dict[Generation, HeldBack] = {}  # of requests that are larger than their share
        self._let_in: list[
            GenerateRequest
        ] = []  # what goes to the engine when the message at hand is dealt with
        self._by_name: dict[str, set[int]] = {}  # rids and groups
        self._calls: dict[int, asyncio.Future[ControlReply]] = {}
        self._ready_waiters: list[asyncio.Future[None]] = []

    # ---- work

    def submit(self, prompts: Sequence[Prompt], *, stream: bool = True) -> Generation:
        """Start generating. Nothing is sent unless all prompts are valid.

        Raises `InvalidParam` for what the user got wrong, `EngineUnavailable` if there is no engine to send to.
        """
        engine = self.engine
        checked = [
            _checked(prompt, engine, self._tokenizer, clamps=self._clamps) for prompt in prompts
        ]
        completions: list[Completion] = []
        requests: list[GenerateRequest] = []
        stops = StopSets(params for _, params in checked)
        for prompt, (input_ids, params) in zip(prompts, checked, strict=True):
            self.metrics.began(prompt.params.n, params.max_new_tokens or 0)
            for request in self._requests(prompt, input_ids, params):
                requests.append(request)
                completions.append(self._completion(request, prompt, len(completions), stops))
        generation = Generation(completions, stream=stream, on_close=self._closed)
        for (
            completion
        ) in completions:  # known before anything is sent: an in-process engine may answer at once
            self._open[completion.id] = completion
            for name in {completion.rid, completion.group} - {""}:
                self._by_name.setdefault(name, set()).add(completion.id)
        share = self._share(engine)
        if len(requests) > share:
            self._held[generation] = HeldBack(requests[share:])
            del requests[share:]
        self._send(requests[0] if len(requests) == 1 else _batch(requests))
        return generation

    def abort(self, rid: str) -> int:
        """Abort all requests whose rid or group is exactly `rid`. They end by the engine's word. Returns how many there
        were."""
        ids = tuple(self._by_name.get(rid, ()))
        there = tuple(id for id in ids if not self._end_held(self._open[id]))
        if there:
            self._send(Abort(ids=there))
        return len(ids)

    def abort_all(self) -> int:
        """Abort everything that is open. Returns how many there were."""
        num_open = len(self._open)
        for completion in list(self._open.values()):
            self._end_held(completion)
        self._send(Abort(all=True))
        return num_open

    @property
    def num_open(self) -> int:
        """Completions that have not ended."""
        return len(self._open)

    @property
    def num_vector_bytes(self) -> int:
        """Of input embeddings that the engine keeps, each completion's counted by itself."""
        return sum(completion.num_vector_bytes for completion in self._open.values())

    @property
    def alive(self) -> bool:
        """Whether the engine has become ready and not stopped since."""
        return self.ready is not None and self.lost is None

    @property
    def engine(self) -> EngineReady:
        """What the engine told when it became ready. Raises `EngineUnavailable` if there is none."""
        if self.lost is not None:
            raise EngineUnavailable(f"the engine has stopped: {self.lost}")
        if self.ready is None:
            raise EngineUnavailable("the engine is not ready yet")
        if hang := self.hang_detector.hang:
            raise EngineUnavailable(hang)
        return self.ready

    async def wait_ready(self) -> EngineReady:
        """Until the engine is ready. Raises `EngineUnavailable` if it fails before."""
        while self.ready is None and self.lost is None:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._ready_waiters.append(waiter)
            await waiter
        return self.engine

    # ---- control

    async def call(self, request: ControlRequest[R], timeout_s: float = CALL_TIMEOUT_S) -> R:
        """Send a control request and wait for its reply. The number of the call is put in here.

        Raises `EngineUnavailable` if there is no engine, or no answer in time, `EngineFault` if the
        engine failed on the request.
        """
        _ = self.engine
        call = next(self._numbers)
        waiter: asyncio.Future[ControlReply] = asyncio.get_running_loop().create_future()
        self._calls[call] = waiter
        try:
            self._send(msgspec.structs.replace(request, call=call))
            answer = await asyncio.wait_for(waiter, timeout_s)
        except TimeoutError as exc:
            raise EngineUnavailable(f"the engine has not answered for {timeout_s:g} s") from exc
        finally:
            self._calls.pop(call, None)
        if isinstance(answer, CallFailed):
            raise EngineFault(answer.message)
        expected = reply_type(type(request))
        assert isinstance(answer, expected), f"call {call} got {answer}"
        return answer

    async def get_state(self, timeout_s: float = CALL_TIMEOUT_S) -> Stats:
        """The engine's numbers as they are now."""
        reply = await self.call(GetState(), timeout_s)
        self._keep(reply.stats)
        return reply.stats

    # ---- what comes from the engine

    async def run(self, receive: Callable[[], Awaitable[FromEngine | Unreadable]]) -> None:
        """Deliver everything that `receive` brings, for ever. The one task that reads from the engine.

        What cannot be read or delivered ends the call or the completions that it was for.
        """
        while True:
            message = await receive()
            if isinstance(message, Unreadable):
                log.error("message_unreadable", call=message.call or "-", requests=len(message.ids))
                self._give_up(message)
            else:
                self._deliver_or_give_up(message)
            await asyncio.sleep(0)  # a flood of messages must not keep consumers from running

    def _deliver_or_give_up(self, message: FromEngine) -> None:
        try:
            self.deliver(message)
        except BaseException as exc:
            if not is_survivable(exc):
                raise
            log.exception("message_failed", exc, type=type(message).__name__)
            ids = ids_of(message) if isinstance(message, StepOutput) else set()
            self._give_up(Unreadable(getattr(message, "call", None), frozenset(ids)))

    def _give_up(self, lost: Unreadable) -> None:
        """A message is lost: whoever it was for gets an error."""
        message = "the engine's answer could not be read"
        waiter = self._calls.pop(lost.call, None) if lost.call is not None else None
        if waiter is not None and not waiter.done():
            waiter.set_exception(EngineFault(message))
        for completion in [self._open[id] for id in lost.ids if id in self._open]:
            self._fail(completion, message)
            completion.generation.wake()

    def deliver(self, message: FromEngine) -> None:
        """One message from the engine."""
        self.hang_detector.heard()
        match message:
            case StepOutput():
                self._deliver_step(message)
            case Stats():
                self._keep(message)
            case Heartbeat():
                self.hang_detector.beat(message)
            case EngineReady():
                self.ready = message
                phases = [(phase, seconds) for phase, _, seconds in message.startup]
                self.metrics.started(
                    phases, message.page_size, message.kv_tokens // message.page_size
                )
                self._wake_ready()
            case EngineFailed():
                self.engine_lost(message.message)
            case _:  # a reply to a call
                if isinstance(message, WeightsReply):
                    self.weight_version, self.released = message.weight_version, message.released
                waiter = self._calls.pop(message.call, None)
                if waiter is not None and not waiter.done():
                    waiter.set_result(message)

    def engine_lost(self, message: str) -> None:
        """There is no engine any more: everything open ends with an error, and new work is refused."""
        if self.lost is None:
            log.error("engine_lost", reason=message, open=len(self._open))
            self.lost = message
        self.end_all(f"the engine has stopped: {message}")
        for waiter in self._calls.values():
            if not waiter.done():
                waiter.set_exception(EngineUnavailable(f"the engine has stopped: {message}"))
        self._calls.clear()
        self._wake_ready()

    def end_all(self, message: str, status: int = 503) -> None:
        """End everything open here and now with an error, without asking the engine (which aborts it too)."""
        self._held.clear()
        if self._open and self.lost is None:
            self._send(Abort(ids=tuple(self._open), message=message))
        for completion in list(self._open.values()):
            self._end(
                completion, Finish(id=completion.id, reason="error", message=message, status=status)
            )
            completion.generation.wake()

    # ---- inside

    def _requests(
        self, prompt: Prompt, input_ids: bytes, params: SamplingParams
    ) -> list[GenerateRequest]:
        """The n requests of one prompt. A given seed goes up by one for each, so that they differ."""
        return [
            GenerateRequest(
                id=next(self._numbers),
                rid=prompt.rid,
                input_ids=input_ids,
                sampling=msgspec.structs.replace(params, n=1, seed=_wrapped(params.seed, number)),
                tenant=prompt.tenant,
                user=prompt.user,
                priority=prompt.priority,
                group=prompt.group,
                cache_salt=prompt.cache_salt,
                timeout_ms=prompt.timeout_ms,
                session=prompt.session,
                fresh_from=params.fresh_from,
                vectors=prompt.vectors,
                shares_kv=not prompt.vectors,
                pooling=prompt.pooling,
            )
            for number in range(params.n)
        ]

    def _completion(
        self, request: GenerateRequest, prompt: Prompt, choice: int, stops: StopSets
    ) -> Completion:
        params = request.sampling
        before = () if prompt.vectors else prompt.ids  # with vectors the ids mean nothing
        detokenizer = self._tokenizer.detokenizer(
            skip_special_tokens=params.skip_special_tokens, prompt=before
        )
        completion = Completion(
            id=request.id,
            choice=choice,
            rid=request.rid,
            group=prompt.group,
            prompt_len=len(request.input_ids) // 4,
            params=params,
            detokenizer=detokenizer,
            matcher=stops.matcher(params),
        )
        completion.params = prompt.params
        completion.num_vector_bytes = len(prompt.vectors)
        completion.stream_interval = min(prompt.stream_interval, self._max_pending_tokens)
        completion.latency = self.metrics.latency(request.priority)
        if (http := current.get()) is not None:
            completion.arrived_s, completion.traceparent = http.arrived_s, http.traceparent
        return completion

    def _deliver_step(self, step: StepOutput) -> None:
        """Give each token to its completion, then the ends, then wake whoever waits."""
        now = time.perf_counter()
        touched: set[Generation] = set()
        stop_tokens = {
            finish.id: finish.matched for finish in step.finished if finish.matched is not None
        }
        ids = np.frombuffer(step.ids, dtype=np.int64).tolist()
        tokens = np.frombuffer(step.tokens, dtype=np.int32).tolist()
        for warned in step.warnings:
            if (completion := self._open.get(warned.id)) is not None:
                completion.warnings.append(warned.text)
        for extra in step.given:
            if (completion := self._open.get(extra.id)) is not None:
                completion.give(extra)
        to_abort = self._push_tokens(zip(ids, tokens, strict=True), stop_tokens, now, touched)
        for logprobs in step.logprobs:
            completion = self._open.get(logprobs.id)
            if completion is not None:
                completion.push_logprobs(logprobs)
        for finish in step.finished:
            completion = self._open.get(finish.id)
            if completion is not None:
                self._end(completion, finish)
                self._follow(completion)
                touched.add(completion.generation)
        to_abort = [id for id in to_abort if id in self._open]
        if to_abort:
            lens = tuple(self._open[id].num_tokens for id in to_abort)
            self._send(
                Abort(ids=tuple(to_abort), output_lens=lens, message="a stop string was found")
            )
        for generation in touched:
            generation.wake()
        self._send_let_in()

    def _share(self, engine: EngineReady) -> int:
        """How many completions of one request the engine may have at a time."""
        if not (self._max_request_share and engine.max_running_requests):
            return sys.maxsize
        return max(int(engine.max_running_requests * self._max_request_share), 1)

    def _send_let_in(self) -> None:
        requests, self._let_in = self._let_in, []
        if requests:
            self._send(requests[0] if len(requests) == 1 else _batch(requests))

    def _follow(self, completion: Completion) -> None:
        """The engine has done with a completion: the next of its request may follow."""
        held = self._held.get(completion.generation)
        following = None if held is None else held.take()
        if following is not None:
            self._let_in.append(following)

    def _end_held(self, completion: Completion) -> bool:
        """Abort a completion that the engine does not know yet. Whether it was one."""
        held = self._held.get(completion.generation)
        if held is None or not held.drop(completion.id):
            return False
        self._end(
            completion, Finish(id=completion.id, reason="abort", message="the request was aborted")
        )
        completion.generation.wake()
        return True

    def _push_tokens(
        self,
        tokens: Iterable[tuple[int, int]],
        stop_tokens: dict[int, int],
        now: float,
        touched: set[Generation],
    ) -> list[int]:
        """The hot loop: once per generated token. Returns the ids that a stop string has ended."""
        find = self._open.get
        stopped: list[int] = []
        for id, token in tokens:
            completion = find(id)
            if completion is None or completion.stopped_by is not None:
                self.num_late_tokens += 1
                continue
            if completion.last_token_at:
                completion.latency.gaps.append(now - completion.last_token_at)
            else:
                completion.first_token_at = now
                completion.latency.first_token.observe_one(
                    now - completion.arrived_s, completion.rid
                )
            completion.last_token_at = now
            try:
                if stop_tokens and stop_tokens.get(id) == token:
                    completion.push_stop(token)
                else:
                    completion.push(token)
            except BaseException as exc:
                self._break_off(completion, exc)
            if completion.stopped_by is not None:
                stopped.append(id)
            elif completion.num_pending > self._max_pending_tokens and completion.generation.stream:
                self._end_slow(completion)
            touched.add(completion.generation)
        self.metrics.end_step()
        return stopped

    def _end_slow(self, completion: Completion) -> None:
        """Its reader does not read: give up the request, so that neither memory nor the engine serve nobody."""
        message = "the client does not read what is generated"
        self.metrics.refused("max_pending_tokens")
        self._send(Abort(ids=(completion.id,), message=message))
        self._end(completion, Finish(id=completion.id, reason="abort", message=message))
        self._follow(completion)

    def _break_off(self, completion: Completion, exc: BaseException) -> None:
        """What the engine says of it cannot be taken in: it ends alone, with an error."""
        if not is_survivable(exc):
            raise exc
        log.exception("output_failed", exc, rid=completion.rid, error=type(exc).__name__)
        self._fail(completion, f"the output could not be decoded ({type(exc).__name__})")

    def _fail(self, completion: Completion, message: str) -> None:
        """End one that is open with an error, here and in the engine."""
        finish = Finish(id=completion.id, reason="error", message=message, status=500)
        self._send(Abort(ids=(completion.id,), message=message))
        self._forget(completion)
        completion.break_off(finish, self.weight_version)
        self._recorder.ended(completion, completion.ended, finish, is_told=self.log_requests)

    def _end(self, completion: Completion, finish: Finish) -> None:
        try:
            completion.finish(finish, self.weight_version)
        except BaseException as exc:
            self._break_off(completion, exc)
            return
        self._forget(completion)
        self._recorder.ended(completion, completion.ended, finish, is_told=self.log_requests)

    def _closed(self, generation: Generation) -> None:
        """The consumer has left: abort what had not ended."""
        self._held.pop(generation, None)
        left = [completion for completion in generation.completions if completion.id in self._open]
        for completion in left:
            self._forget(completion)
            completion.break_off(
                Finish(id=completion.id, reason="abort", message="the client is gone")
            )
            self._recorder.ended(completion, completion.ended, None, is_told=self.log_requests)
        if left and self.lost is None:
            self._send(
                Abort(ids=tuple(completion.id for completion in left), message="the client is gone")
            )

    def _forget(self, completion: Completion) -> None:
        del self._open[completion.id]
        for name in {completion.rid, completion.group} - {""}:
            ids = self._by_name[name]
            ids.discard(completion.id)
            if not ids:
                del self._by_name[name]

    def _keep(self, stats: Stats) -> None:
        self.stats = stats
        self.stats_at = time.monotonic()
        numbers = msgspec.structs.asdict(stats)
        self.metrics.engine.set(numbers)
        self._status.take(numbers, time.monotonic())

    def _wake_ready(self) -> None:
        for waiter in self._ready_waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._ready_waiters.clear()


def _batch(requests: Sequence[GenerateRequest]) -> BatchGenerate:
    """Several requests as one message; equal prompts stand in it once."""
    places: dict[tuple[bytes, bytes], int] = {}
    prompt_of = [
        places.setdefault((request.input_ids, request.vectors), len(places)) for request in requests
    ]
    return BatchGenerate(
        prompts=[ids for ids, _ in places],
        vectors={place: vectors for (_, vectors), place in places.items() if vectors},
        requests=[
            msgspec.structs.replace(request, input_ids=b"", vectors=b"") for request in requests
        ],
        prompt_of=prompt_of,
    )


def _checked(
    prompt: Prompt, engine: EngineReady, tokenizer: Tokenizer, *, clamps: bool
) -> tuple[bytes, SamplingParams]:
    """The prompt's ids, packed, and its parameters with the length resolved. Raises `InvalidParam`."""
    prompt.params.check(engine.vocab_size)
    check_task(prompt.params, engine)
    if prompt.priority:
        check_number("priority", "priority", prompt.priority)
    if prompt.pooling is not None:
        prompt.pooling.check(engine.vocab_size)
    check_extras(
        prompt.params,
        engine,
        has_vectors=bool(prompt.vectors),
        has_session=prompt.session is not None,
    )
    prompt_len = len(prompt.ids)
    if prompt_len == 0:
        raise InvalidParam("prompt", "the prompt is empty; it must have at least 1 token")
    context = engine.context_length
    if prompt_len + (prompt.params.max_new_tokens != 0) > context:
        raise ContextExceeded(
            "prompt",
            f"the prompt has {prompt_len:,} tokens; the context of {context:,} tokens leaves no room for it",
        )
    if prompt_len > engine.max_prompt_tokens + (prompt.params.max_new_tokens == 0):
        raise ContextExceeded(
            "prompt",
            f"the prompt has {prompt_len:,} tokens; at most {engine.max_prompt_tokens:,} fit the KV cache",
        )
    max_new = prompt.params.max_new_tokens
    if max_new is None:
        if prompt.session is None:  # else the engine knows how much comes before it
            max_new = max(context - prompt_len, 1)
    elif prompt_len + max_new > context and clamps:
        max_new = context - prompt_len
    elif prompt_len + max_new > context:
        raise ContextExceeded(
            "max_tokens",
            f"the prompt has {prompt_len:,} tokens and max_tokens is {max_new:,}; "
            f"together they exceed the context of {context:,} tokens",
        )
    ids = _as_tokens(prompt.ids, engine.vocab_size)
    params = to_token_params(
        msgspec.structs.replace(prompt.params, max_new_tokens=max_new), tokenizer
    )
    params.check(engine.vocab_size)  # min_tokens against the length just resolved
    return ids.tobytes(), params


def _as_tokens(ids: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    """int32 [n]. Raises `InvalidParam` for what is no token of the vocabulary."""
    try:
        wide = np.asarray(ids)
    except (
        ValueError,
        OverflowError,
    ):  # lists in it, or more than any of numpy's integers can hold
        wide = np.empty(0)
    if wide.dtype.kind not in "iu" or int(wide.min()) < 0 or int(wide.max()) >= vocab_size:
        check_token_ids("prompt", ids, vocab_size)  # names the first that is wrong
    return wide.astype(np.int32)


def _wrapped(seed: int | None, number: int) -> int | None:
    """`seed + number`, within 64 bits."""
    return None if seed is None else (seed + number + 2**63) % 2**64 - 2**63
