"""The client's record of its engine: whether it is ready and answers, its numbers, its open work.

    EngineState        its description, its latest numbers, its weights
    HangDetector       whether it hangs, judged from its messages
    OpenCompletions    the completions that have not ended

`EngineClient` writes this state from the engine's messages; all others only read it. This module
does not know how a completion ends, nor the consequence of a hang, which the launcher decides.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from weft.client.generation import Completion, Generation
from weft.messages.requests import GenerateRequest
from weft.messages.status import EngineReady, Heartbeat, Stats
from weft.messages.weights import FIRST_VERSION, WeightsReply
from weft.observe.engine_numbers import EngineNumbers
from weft.observe.metrics import Metrics

TICK_S = 0.5
LATE_S = 0.25  # a later tick was delayed by a busy machine
HANG_AFTER_S = 4.0
# However busy the machine is, a tick counts at least this part of itself.
LEAST_COUNTED = 1 / 20


class EngineLoad(Protocol):
    """The latest numbers of one engine."""

    @property
    def stats(self) -> Stats: ...

    @property
    def stats_at(self) -> float:
        """When the numbers came, on the clock `time.monotonic`."""
        ...

    @property
    def numbers(self) -> EngineNumbers:
        """The values computed from the numbers."""
        ...


class EngineUnavailable(Exception):
    """The engine is not ready yet, has stopped, or does not answer. The message is for the user."""


class EngineState:
    def __init__(self, metrics: Metrics, hang_detector: HangDetector) -> None:
        self.ready: EngineReady | None = None  # its first message
        self.lost: str | None = None  # why there is no engine any more
        self.stats = Stats()  # the latest
        self.stats_at = time.monotonic()  # when the latest numbers came
        self.weight_version = FIRST_VERSION  # of the weights in use
        self.released: list[str] = []  # memory that the engine has given back: it takes no work
        self.hang_detector = hang_detector
        self._metrics = metrics
        self._waiters: list[asyncio.Future[None]] = []  # for `ready` or `lost`

    @property
    def numbers(self) -> EngineNumbers:
        """The values computed from the latest numbers."""
        return self._metrics.engine

    @property
    def is_alive(self) -> bool:
        """Whether the engine has become ready and not stopped since."""
        return self.ready is not None and self.lost is None

    def require_ready(self) -> EngineReady:
        """The engine's own description. Raises `EngineUnavailable` if it cannot take work."""
        if self.lost is not None:
            raise EngineUnavailable(f"the engine has stopped: {self.lost}")
        if self.ready is None:
            raise EngineUnavailable("the engine is not ready yet")
        hang = self.hang_detector.hang
        if hang:
            raise EngineUnavailable(hang)
        return self.ready

    async def wait_ready(self) -> EngineReady:
        """Wait until the engine is ready. Raises `EngineUnavailable` if it fails before."""
        while self.ready is None and self.lost is None:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        return self.require_ready()

    def mark_ready(self, ready: EngineReady) -> None:
        self.ready = ready
        phases = [(phase, seconds) for phase, _, seconds in ready.startup]
        num_pages = ready.kv_tokens // ready.page_size
        self._metrics.started(phases, ready.page_size, num_pages)
        self._wake_waiters()

    def mark_lost(self, reason: str) -> None:
        """Of several reasons only the first is kept."""
        if self.lost is None:
            self.lost = reason
        self._wake_waiters()

    def record_stats(self, stats: Stats) -> None:
        self.stats = stats
        self.stats_at = time.monotonic()
        numbers = msgspec.structs.asdict(stats)
        self._metrics.engine.set(numbers, self.stats_at)

    def record_weights(self, reply: WeightsReply) -> None:
        self.weight_version = reply.weight_version
        self.released = reply.released

    def _wake_waiters(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()


# ---- whether it hangs


class HangDetector:
    """Whether the engine hangs, judged from its messages.

    A thread of the engine sends heartbeats while its steps run, so a long step is not silence.

        silence      no message for `hang_after_s`: the engine's process is stopped, or none of its
                     threads can run
        standstill   heartbeats come, but for `hang_after_s` the engine has been in one step without
                     progress: it waits for an event that does not come
        endless      one step has taken `step_timeout_s`

    Time is counted in ticks of this process: the time in which this process did not run (a laptop
    asleep, a debugger) does not count. Of a tick in which the engine got only a part of the
    processor time that it wanted, only that part counts, and at least `LEAST_COUNTED`. The
    heartbeat counts the time of a standstill in the same way (`weft/launch/heartbeat.py`). So both
    are found within `hang_after_s / LEAST_COUNTED` on a machine with any load.
    """

    def __init__(self, step_timeout_s: float = 0.0, hang_after_s: float = HANG_AFTER_S) -> None:
        """`step_timeout_s`: the longest step; 0: no bound. `hang_after_s`: the longest silence or
        standstill."""
        self._step_timeout_s = step_timeout_s
        self._hang_after_s = hang_after_s
        self._silent_ticks = 0
        self._counted_ticks = 0.0  # of these, with their weights
        self._last = Heartbeat(step_s=0.0, idle_s=0.0)
        self._companions: Sequence[HangDetector] = ()
        # Why the engine is judged to hang; empty if it is not. Each request reads it, so it is
        # computed only when something changes, which is rare.
        self.hang = ""

    @property
    def is_silent(self) -> bool:
        """Whether a tick has passed since the last message."""
        return self._silent_ticks > 0

    @property
    def idle_s(self) -> float:
        """The time without progress that the engine has reported last."""
        return self._last.idle_s

    def accompany(self, companions: Sequence[HangDetector]) -> None:
        """The engine's steps wait for the engines of `companions`, and theirs for it: none of them
        stands still while another one computes."""
        self._companions = companions

    def heard(self) -> None:
        """A message has come from the engine."""
        if self._silent_ticks:
            self._silent_ticks = 0
            self._counted_ticks = 0.0
            self._judge()

    def beat(self, beat: Heartbeat) -> None:
        self._last = beat
        self._judge()

    def tick(self, passed_s: float = TICK_S, *, processor_share: float = 1.0) -> None:
        """Another `TICK_S` is over; it really took `passed_s`.

        `processor_share`: the part that the engine got of the processor time that it wanted.
        """
        weight = max(processor_share, LEAST_COUNTED)
        if passed_s > TICK_S + LATE_S:  # this process lacks a processor, too
            weight = LEAST_COUNTED
        self._silent_ticks += 1
        self._counted_ticks += weight
        self._judge()

    def declare(self, reason: str) -> None:
        """Set the verdict from another judge that does not call `tick`. `reason`: why the engine
        takes no requests; empty if it takes them."""
        self.hang = reason

    def _judge(self) -> None:
        self.hang = self._find_hang()

    def _find_hang(self) -> str:
        if round(self._counted_ticks, 6) * TICK_S >= self._hang_after_s:
            silent_s = self._silent_ticks * TICK_S
            return f"the engine has given no sign of life for {silent_s:.0f} s"
        step_s = self._last.step_s
        idle_s = min((one.idle_s for one in self._companions), default=self.idle_s)
        if min(self.idle_s, idle_s, step_s) >= self._hang_after_s:
            return f"the engine has made no progress in a step for {step_s:.0f} s"
        if 0 < self._step_timeout_s <= step_s:
            return f"the engine has computed one step for {step_s:.0f} s"
        return ""


# ---- its open work


class OpenCompletions:
    """The completions that have not ended: by id, by name, and those whose requests still wait
    here.

    A request sends at most its share of the engine's rows, and of these only as many prompts as
    half a step computes. The other completions wait here in order, and follow when the earlier ones
    have their first tokens, or end. So a request with thousands of completions does not block all
    later requests in a queue ordered by arrival: they find half a step of its prompts before them.
    """

    def __init__(self) -> None:
        self.by_id: dict[int, Completion] = {}
        self._by_name: dict[str, set[int]] = {}  # of requests and of batches
        self.deferred: dict[Generation, DeferredRequests] = {}

    def add(self, completion: Completion) -> None:
        request = completion.spec.request
        self.by_id[request.id] = completion
        for name in {request.rid, request.group} - {""}:
            self._by_name.setdefault(name, set()).add(request.id)

    def remove(self, completion: Completion) -> None:
        """A completion has ended. The last one of a generation also drops its waiting requests."""
        request = completion.spec.request
        del self.by_id[request.id]
        for name in {request.rid, request.group} - {""}:
            ids = self._by_name[name]
            ids.discard(request.id)
            if not ids:
                del self._by_name[name]
        if self.deferred:
            self._note_end(completion)

    def _note_end(self, completion: Completion) -> None:
        generation = completion.generation
        deferred = self.deferred.get(generation)
        if deferred is None:
            return
        deferred.ended(completion.spec.request.id)
        if generation.ended:
            self.forget_deferred(generation)

    def named(self, name: str) -> list[Completion]:
        """The completions whose request or batch has exactly this name."""
        ids = self._by_name.get(name, ())
        return [self.by_id[id] for id in ids]

    @property
    def is_empty(self) -> bool:
        return not (self.by_id or self._by_name or self.deferred)

    # ---- requests beyond the share of one generation

    def defer(
        self, generation: Generation, requests: Sequence[GenerateRequest], limits: ShareLimits
    ) -> list[GenerateRequest]:
        """Keep the requests of a generation beyond its limits. Returns those that may be sent
        now."""
        deferred = DeferredRequests(requests, limits)
        sent = deferred.take()
        if deferred.num_waiting:
            self.deferred[generation] = deferred
        return sent

    def drop_deferred(self, completion: Completion) -> bool:
        """Drop the waiting request of `completion`. Returns whether it was still here."""
        deferred = self.deferred.get(completion.generation)
        return deferred is not None and deferred.drop(completion.spec.request.id)

    def forget_deferred(self, generation: Generation | None = None) -> None:
        """Drop the waiting requests of one generation, or of all."""
        if generation is None:
            self.deferred.clear()
        else:
            self.deferred.pop(generation, None)

    def note_first_token(self, completion: Completion) -> None:
        """The engine has computed the prompt of `completion`."""
        deferred = self.deferred.get(completion.generation)
        if deferred is not None:
            deferred.began(completion.spec.request.id)

    def take_deferred(self) -> list[GenerateRequest]:
        """The requests that may now be sent, because earlier ones have begun or ended."""
        following: list[GenerateRequest] = []
        for generation, deferred in list(self.deferred.items()):
            following += deferred.take()
            if not deferred.num_waiting:
                del self.deferred[generation]
        return following


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
