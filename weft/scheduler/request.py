"""One request as the scheduler knows it, and the columns that hold the numbers of those that have a row.

What a decode step touches lives in `Columns`, one entry a row, so that a step over hundreds of requests is a handful of
vector operations. What is needed when a request comes, goes or waits lives in `Request`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import numpy as np

from weft.arrays import FloatArray, IntArray, LongArray
from weft.memory.prefix_cache import NO_PAGES, Handle
from weft.messages.requests import Abort, GenerateRequest
from weft.messages.sampling import SamplingParams

NO_ROW = -1


class RequestState(Enum):
    WAITING = "waiting"  # in the queue: new, or retracted
    PREFILLING = "prefilling"  # has a row; its prompt is being computed
    DECODING = "decoding"  # has a row; part of the running batch
    FINISHED = "finished"


class Request:
    """A request from arrival to its final reply.

    The tokens of a request without a row are in `packed`; those of one with a row are in `Columns.tokens`. Positions
    count from the first token of the prompt:

        0 ......... cached_len ......... kv_len ......... fill_len
        | the tree's pages | its own pages | not computed yet |
    """

    __slots__ = (
        "admitted_s",
        "arrival_order",
        "arrival_s",
        "batch_id",
        "cached_len",
        "cached_tokens",
        "extend_end",
        "fill_len",
        "fresh_from",
        "goes_first",
        "handle",
        "id",
        "is_locked",
        "kv_len",
        "max_len",
        "namespace",
        "num_faults",
        "packed",
        "pooling",
        "prefix_pages",
        "priority",
        "prompt_len",
        "reported_len",
        "retractions",
        "rid",
        "row",
        "sampling",
        "seed",
        "shares_kv",
        "state",
        "tenant",
        "timeout_ms",
        "user",
    )

    def __init__(
        self,
        message: GenerateRequest,
        *,
        max_len: int,
        seed: int,
        arrival_order: int,
        arrival_s: float,
    ) -> None:
        self.id = message.id
        self.rid = message.rid
        self.batch_id = message.group
        self.tenant = message.tenant
        self.user = message.user
        self.timeout_ms = message.timeout_ms
        self.priority = message.priority
        self.namespace = message.cache_salt
        self.sampling: SamplingParams = message.sampling
        self.pooling = message.pooling
        self.seed = seed
        self.arrival_order = (
            arrival_order  # number of its arrival: the order of first come, first served
        )
        self.arrival_s = arrival_s
        self.admitted_s = -1.0  # when it first got a row
        self.state = RequestState.WAITING

        self.packed = (
            message.input_ids
        )  # int32 [fill_len]: the prompt, and after a retraction the output so far
        self.prompt_len = len(message.input_ids) // 4
        self.max_len = max_len  # prompt and output together
        self.shares_kv = (
            message.shares_kv
        )  # false: its ids mean nothing; the prefix cache gives and gets nothing
        self.fresh_from = 2**31 if message.fresh_from is None else message.fresh_from
        self.reported_len = (
            0  # tokens that were computed for it: what it wanted of them has been given
        )

        self.row = NO_ROW
        self.fill_len = self.prompt_len  # tokens to compute before the next one can be sampled
        self.kv_len = 0  # tokens computed, or being computed by a launched step, before decoding
        self.extend_end = 0  # kv_len after the step that is being planned
        self.cached_len = 0  # tokens of its row that the prefix cache owns
        self.prefix_pages: IntArray = (
            NO_PAGES  # [cached_len / page size], between match and admission
        )
        self.handle: Handle = None  # where they end in the cache
        self.is_locked = False
        self.cached_tokens = 0  # of the prompt, found in the cache at first admission
        self.retractions = 0
        self.goes_first = False  # before all others, though it never ran
        self.num_faults = 0  # of the scheduler, while it planned for this request

    def forget_kv(self) -> None:
        """What it held is held by nobody any more: it waits, with the tokens in `packed`."""
        self.row = NO_ROW
        self.state = RequestState.WAITING
        self.fill_len = len(self.packed) // 4
        self.kv_len = self.cached_len = self.extend_end = 0
        self.prefix_pages, self.handle, self.is_locked = NO_PAGES, None, False

    @property
    def remaining_prefill(self) -> int:
        return self.fill_len - self.kv_len

    @property
    def extend_len(self) -> int:
        """Tokens that the planned step computes for it."""
        return self.extend_end - self.kv_len

    @property
    def reusable_len(self) -> int:
        """Tokens that may be taken from the prefix cache: at least the last one is left to compute."""
        if not self.shares_kv:
            return 0
        fresh_from = (
            self.fill_len
            if self.reported_len >= self.prompt_len
            else max(self.fresh_from, self.reported_len)
        )
        return min(self.fill_len - 1, fresh_from)

    @property
    def completes(self) -> bool:
        """Whether the planned step computes the last of its tokens."""
        return self.extend_end == self.fill_len

    @property
    def is_prefilled(self) -> bool:
        """Whether all of its tokens are computed, or are being computed by a launched step."""
        return self.kv_len == self.fill_len

    @property
    def wants_tokens(self) -> bool:
        """False: it ends as soon as its prompt is computed (SGLang: is_prefill_only)."""
        return self.max_len > self.prompt_len


def chosen(requests: Mapping[int, Request], message: Abort) -> list[int]:
    """The ids that `message` is about. Those that it gives itself need not be open."""
    if message.all:
        return list(requests)
    names = set(message.names) - {""}
    named = (
        [id for id, one in requests.items() if one.rid in names or one.batch_id in names]
        if names
        else []
    )
    return [*message.ids, *named]


class Columns:
    """The numbers of requests that have a row, indexed by row. Written by the scheduler's files only.

    For a decoding request `seq_len` counts every token up to the last one, known or still on the device, and the first
    `kv_len` of them have their K and V in the cache (or are given them by a launched step). Mostly one is left for the
    next step, the token sampled last; behind it may stand others that had to follow (`Forced` in `commit.py`).
    While a prompt is computed, `seq_len` is that of the prompt.

    A row that nobody has is all zeros, but for its epoch: a request finds nothing of the row's former owner.
    """

    def __init__(self, num_rows: int, max_len: int) -> None:
        def ints() -> IntArray:
            return np.zeros(num_rows, dtype=np.int32)

        def floats() -> FloatArray:
            return np.zeros(num_rows, dtype=np.float32)

        self.tokens: IntArray = np.zeros(
            (num_rows, max_len), dtype=np.int32
        )  # [row, position] ids that are known
        self.epoch = (
            ints()
        )  # how often the row has been given up: tells a result for its former request
        self.ids: LongArray = np.zeros(num_rows, dtype=np.int64)  # Request.id
        self.requests = np.empty(num_rows, dtype=object)  # Request, or None
        self.seq_len = ints()
        self.kv_len = ints()  # tokens that have K and V, or are given them by a launched step
        self.cached_len = ints()  # of these, those whose pages the prefix cache owns
        self.known_len = ints()  # tokens whose ids are known
        self.prompt_len = ints()
        self.priority: LongArray = np.zeros(num_rows, dtype=np.int64)
        self.max_len = ints()  # seq_len at which the request ends by length
        self.stops_at_eos = np.zeros(num_rows, dtype=np.bool_)
        self.has_stop_ids = np.zeros(num_rows, dtype=np.bool_)

        self.temperature = floats()
        self.top_p = floats()
        self.top_k = ints()
        self.min_p = floats()
        self.seed: LongArray = np.zeros(num_rows, dtype=np.int64)

        others = ("tokens", "epoch", "requests")
        # What a request enters besides its tokens.
        self._numbers = [column for name, column in vars(self).items() if name not in others]

    def fill(self, request: Request) -> None:
        """Enter a request that has just got its row. Its prefix of `cached_len` tokens is there already."""
        row, sampling = request.row, request.sampling
        self.tokens[row, : request.fill_len] = np.frombuffer(request.packed, dtype=np.int32)
        self.ids[row] = request.id
        self.seq_len[row] = self.known_len[row] = request.fill_len
        self.kv_len[row] = self.cached_len[row] = request.cached_len
        self.prompt_len[row] = request.prompt_len
        self.priority[row] = request.priority
        self.max_len[row] = request.max_len
        self.stops_at_eos[row] = not sampling.ignore_eos
        self.has_stop_ids[row] = bool(sampling.stop_token_ids)
        self.temperature[row] = sampling.temperature
        self.top_p[row] = sampling.top_p
        self.top_k[row] = max(sampling.top_k, 0)
        self.min_p[row] = sampling.min_p
        self.seed[row] = request.seed
        self.requests[row] = request

    def clear(self, row: int) -> None:
        """The request has left its row: results for it that are still to come count no more."""
        self.epoch[row] += 1
        self.requests[row] = None
        self.tokens[row, : self.known_len[row]] = 0
        for column in self._numbers:
            column[row] = 0

    def reset(self) -> None:
        """All rows are given up, whoever had them."""
        self.epoch += 1
        self.requests[:] = None
        for row in np.flatnonzero(
            self.known_len
        ).tolist():  # the whole table may be larger than what was ever touched
            self.tokens[row, : self.known_len[row]] = 0
        for column in self._numbers:
            column[:] = 0

    def packed(self, row: int, length: int) -> bytes:
        """The first `length` token ids of a row, packed."""
        return self.tokens[row, :length].tobytes()

    def num_output(self, row: int) -> int:
        """Output tokens whose ids are known."""
        return int(self.known_len[row] - self.prompt_len[row])
