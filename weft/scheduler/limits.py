"""All limits of a request: the reasons to refuse it on arrival, the limits that end it later, and
the time after which a client whom the queue refused should try again.

    arrival ── refusal ── queue ── max_queue_s ── row ── max_run_s ── max_len, end-of-sequence
                 └ retry_after_s ┘        └──────── timeout_ms ────────┘

This module finds the requests that exceed a limit; the scheduler ends them. The length of the queue
is limited by the queue.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from weft.arrays import BoolArray
from weft.config.numbers import MAX_LABEL_IDS, NUMBERS
from weft.memory.prefix_cache import TOKEN_BYTES
from weft.messages.requests import GenerateRequest, PoolingParams
from weft.scheduler.request import Request
from weft.scheduler.settings import PoolingLimits, SchedulerSettings

MAX_STALE = 1_024  # deadlines of ended requests that the heap may have before it is cleaned

DRAIN_WINDOW_S = 30.0
MAX_ADMISSIONS = 1_024  # number of admissions to remember: of a fast queue, the latest are enough
MIN_RETRY_S = 1
MAX_RETRY_S = 60


class Refusal(NamedTuple):
    message: str
    status: int  # as an HTTP status


PRIORITY = NUMBERS["priority"]
TOP_K = NUMBERS["top_k"]
SEED = NUMBERS["seed"]
QUEUE_IS_FULL = Refusal("The request queue is full.", 503)


class RequestLimits:
    """`capacity`: tokens that fit into the KV pool."""

    def __init__(self, settings: SchedulerSettings, capacity: int) -> None:
        self.max_len = min(settings.context_length, capacity)  # prompt and output together
        self.deadlines = Deadlines(max_queue_s=settings.max_queue_s, max_run_s=settings.max_run_s)
        self.drain = QueueDrain()
        self.is_eos: BoolArray = np.zeros(settings.vocab_size, dtype=np.bool_)  # [vocab_size]
        self.is_eos[list(settings.eos_token_ids)] = True

    def refusal(
        self,
        message: GenerateRequest,
        settings: SchedulerSettings,
        left: Callable[[], str] = str,
    ) -> Refusal | None:
        """Why a request can never run and is refused; None if it can run. `left`: returns what is
        left of memory, in words."""
        vocab_size = settings.vocab_size
        num_tokens = message.prompt_len
        if not num_tokens:
            return Refusal("the prompt is empty", 400)
        # Without a sign, ids below 0 are the largest: one search instead of two.
        prompt = np.frombuffer(message.input_ids, dtype=np.uint32, count=num_tokens)
        if prompt.max() >= vocab_size:
            ids = prompt.view(np.int32)
            lowest = int(ids.min())
            bad = lowest if lowest < 0 else int(ids.max())
            return Refusal(
                f"the prompt has token id {bad}; 0 to {vocab_size - 1:,} are allowed", 400
            )
        max_new = message.sampling.max_new_tokens
        new = 1 if max_new is None else max_new
        if num_tokens + new > self.max_len:
            is_memory_short = self.max_len < settings.context_length
            return Refusal(
                f"the prompt has {num_tokens:,} tokens and {new:,} are to be generated; "
                f"together at most {self.max_len:,} fit{left() if is_memory_short else ''}",
                400,
            )
        if settings.media is not None and settings.media.heard_len and not message.media:
            return Refusal("this model answers about a sound, and the request has none", 400)
        why_not = _out_of_range(message)
        # Without a pooling model and a request for vectors nothing can be wrong.
        if not why_not and (settings.pooling is not None or message.pooling is not None):
            why_not = _misuse(message, settings)
        return Refusal(why_not, 400) if why_not else None

    def max_len_of(self, message: GenerateRequest, prompt_len: int) -> int:
        """The longest prompt and output of a request together, in tokens."""
        max_new = message.sampling.max_new_tokens
        return self.max_len if max_new is None else prompt_len + max_new

    def shrink(self, context_length: int, capacity: int) -> None:
        """Reduce the limits after a loss of KV memory."""
        self.max_len = min(context_length, capacity)


# Refused on arrival


def _out_of_range(message: GenerateRequest) -> str:
    """Why a number of the request does not fit its column in the scheduler; empty if all fit.

    The front checks the same ranges before, so a client usually gets the error from there.
    """
    sampling = message.sampling
    wrong = PRIORITY.wrong("priority", message.priority)
    wrong = wrong or TOP_K.wrong("top_k", sampling.top_k)
    if sampling.seed is not None:
        wrong = wrong or SEED.wrong("seed", sampling.seed)
    return wrong


def _misuse(message: GenerateRequest, settings: SchedulerSettings) -> str:
    """Why the model cannot compute what the request asks for; empty if it can.

    A model may generate no tokens, make no vectors, or make vectors of another form.
    """
    limits = settings.pooling
    asked = message.pooling
    wants_tokens = message.sampling.max_new_tokens != 0
    if limits is not None and wants_tokens:
        gives = "scores of labels (POST /v1/classify)"
        if limits.is_embedding:
            gives = "vectors (POST /v1/embeddings)"
        return f"this model generates no tokens; it makes {gives}"
    if limits is not None and (message.vectors or _wants_states(message)):
        return (
            "this model serves neither input embeddings nor hidden states "
            "nor log probabilities of prompts"
        )
    if asked is None:
        return ""
    if wants_tokens:
        return "tokens are asked for together with a vector of the prompt; max_new_tokens must be 0"
    if asked.label_ids:
        return _wrong_labels(asked, settings)
    if limits is None:
        return (
            "this model generates tokens; "
            "it makes vectors if the server is started with --task embed"
        )
    return _wrong_form(message, asked, limits)


def _wants_states(message: GenerateRequest) -> bool:
    sampling = message.sampling
    return sampling.prompt_logprobs is not None or sampling.hidden_states is not None


def _wrong_labels(asked: PoolingParams, settings: SchedulerSettings) -> str:
    if settings.pooling is not None:
        return "label tokens are for a model that generates; this one does not"
    for label in asked.label_ids:
        if not 0 <= label < settings.vocab_size:
            highest = settings.vocab_size - 1
            return f"label_token_ids has token id {label}; 0 to {highest:,} are allowed"
    num_ids = len(asked.label_ids)
    if num_ids > MAX_LABEL_IDS:
        return f"label_token_ids has {num_ids:,} ids; at most {MAX_LABEL_IDS:,} are allowed"
    return ""


def _wrong_form(message: GenerateRequest, asked: PoolingParams, limits: PoolingLimits) -> str:
    dimensions = asked.dimensions
    if dimensions and not limits.is_embedding:
        return f"dimensions is {dimensions}; this model makes no vectors"
    if dimensions and not limits.can_be_cut:
        return f"dimensions is {dimensions}; what this model makes cannot be cut"
    if dimensions and not 0 < dimensions <= limits.size:
        return f"dimensions is {dimensions}; 1 to {limits.size:,} are allowed"
    types = asked.token_type_ids
    if not types:
        return ""
    if not limits.num_token_types:
        return "token_type_ids are given, but this model knows no kinds of segments"
    if len(types) * TOKEN_BYTES != len(message.input_ids):
        num_tokens = message.prompt_len
        return (
            f"token_type_ids has the length {len(types):,}; {num_tokens:,} is expected, an entry "
            "for each token"
        )
    if max(types) >= limits.num_token_types:
        return f"token_type_ids has {max(types)}; 0 to {limits.num_token_types - 1} are allowed"
    return ""


# Ended by the clock


class DeadlineKind(IntEnum):
    OWN = 0  # `timeout_ms` of the request, from its arrival
    QUEUE = 1  # the longest wait for the first admission
    RUN = 2  # the longest run from the first admission


class Deadline(NamedTuple):
    when_s: float
    arrival_order: int
    id: int
    kind: DeadlineKind
    span_s: float


class Expired(NamedTuple):
    """A request that exceeds a time limit."""

    request: Request
    message: str
    status: int  # as an HTTP status: 503 if it has never run, else 408


class Deadlines:
    """The time limits of requests. They are checked when the next step is chosen, and a request is
    ended in any state.

    For a request that was retracted to the queue only its own limit and `max_run_s` count, and for
    one of a class that is not timed its own alone. The deadlines are in a heap; those of ended
    requests are dropped when they reach its top.
    """

    def __init__(self, *, max_queue_s: float, max_run_s: float) -> None:
        """0: no limit."""
        self._max_queue_s = max_queue_s or math.inf
        self._max_run_s = max_run_s or math.inf
        self._heap: list[Deadline] = []

    def arrived(self, request: Request) -> None:
        timeout_ms = request.message.timeout_ms
        arrival_s = request.spec.arrival_s
        if timeout_ms:
            self._push(arrival_s, request, DeadlineKind.OWN, timeout_ms / 1_000)
        if self._max_queue_s < math.inf and request.spec.service.is_timed:
            self._push(arrival_s, request, DeadlineKind.QUEUE, self._max_queue_s)

    def admitted(self, request: Request) -> None:
        """The request was admitted for the first time."""
        if self._max_run_s < math.inf and request.spec.service.is_timed:
            self._push(request.admitted_s, request, DeadlineKind.RUN, self._max_run_s)

    def forget(self, request: Request) -> None:
        """The request could not be queued."""
        arrival_order = request.spec.arrival_order
        self._heap = [entry for entry in self._heap if entry.arrival_order != arrival_order]
        heapq.heapify(self._heap)

    def end_s(self, request: Request) -> float:
        """The time at which an open request is ended, as far as known; infinite without a limit."""
        timeout_ms = request.message.timeout_ms
        arrival_s = request.spec.arrival_s
        own_s = arrival_s + timeout_ms / 1_000 if timeout_ms else math.inf
        if not request.spec.service.is_timed:
            return own_s
        if request.admitted_s < 0:
            return min(own_s, arrival_s + self._max_queue_s)
        return min(own_s, request.admitted_s + self._max_run_s)

    @property
    def next_s(self) -> float:
        """The time of the next check; infinite without deadlines. It may be the deadline of a
        request that has ended."""
        return self._heap[0].when_s if self._heap else math.inf

    def expired(self, requests: Mapping[int, Request], now: float) -> Iterator[Expired]:
        """The open requests that exceed a time limit. The caller ends each one before it takes the
        next."""
        heap = self._heap
        while heap and heap[0].when_s <= now:
            late = self._late(heap[0], requests)
            if late is not None:
                yield late
            heapq.heappop(heap)  # only now, so that a request whose end raised is found again
        if len(heap) > 4 * len(requests) + MAX_STALE:
            self._heap = [entry for entry in heap if entry.id in requests]
            heapq.heapify(self._heap)

    @staticmethod
    def _late(deadline: Deadline, requests: Mapping[int, Request]) -> Expired | None:
        """The request that a deadline ends; None if it has ended, or was admitted before a deadline
        of the queue."""
        request = requests.get(deadline.id)
        if request is None or request.spec.arrival_order != deadline.arrival_order:
            return None
        has_run = request.admitted_s >= 0
        if deadline.kind is DeadlineKind.QUEUE and has_run:
            return None
        return Expired(request, _why_late(deadline, has_run), 408 if has_run else 503)

    def _push(self, from_s: float, request: Request, kind: DeadlineKind, span_s: float) -> None:
        deadline = Deadline(
            when_s=from_s + span_s,
            arrival_order=request.spec.arrival_order,
            id=request.id,
            kind=kind,
            span_s=span_s,
        )
        heapq.heappush(self._heap, deadline)


def _why_late(deadline: Deadline, has_run: bool) -> str:
    span_s = deadline.span_s
    match deadline.kind:
        case DeadlineKind.QUEUE:
            return f"the request waited for {span_s:g} s, as long as --max-queue-s allows"
        case DeadlineKind.RUN:
            return f"the request ran for {span_s:g} s, as long as --max-run-s allows"
        case DeadlineKind.OWN:
            missing = "ended" if has_run else "begun"
            return f"the request has not {missing} within its timeout of {span_s:g} s"


# When to come again


class QueueDrain:
    """How fast the queue drains, measured by the admissions of the last half minute.

    The time is an argument, so that a replay gets the same result.
    """

    def __init__(self) -> None:
        # Times of first admissions.
        self._admitted: deque[float] = deque(maxlen=MAX_ADMISSIONS)
        self._has_begun = False

    def admitted(self, now: float) -> None:
        self._has_begun = True
        self._admitted.append(now)

    def retry_after_s(self, num_waiting: int, now: float) -> int:
        """Seconds until the requests that wait now will probably be admitted.

        At least a second and at most a minute. A minute, too, if no request was admitted for a
        while; a second if none was ever admitted.
        """
        admitted = self._admitted
        while admitted and admitted[0] < now - DRAIN_WINDOW_S:
            admitted.popleft()
        if not admitted:
            return MAX_RETRY_S if self._has_begun and num_waiting else MIN_RETRY_S
        rate = len(admitted) / max(now - admitted[0], 1.0)
        return min(max(math.ceil(num_waiting / rate), MIN_RETRY_S), MAX_RETRY_S)
