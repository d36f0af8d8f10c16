"""One request as the scheduler knows it, and the columns with the numbers of those that have a row.

What a decode step touches lives in `Columns`, one entry a row, so that a step over hundreds of
requests is a handful of vector operations. What is needed when a request comes, goes or waits
lives in `Request`. Neither knows policies, features or the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

import msgspec
import numpy as np

from weft.arrays import BoolArray, FloatArray, IntArray, LongArray
from weft.memory.media.ids import content_ids
from weft.memory.prefix_cache import NO_PAGES, TOKEN_BYTES, CacheKey, Handle
from weft.messages.media import MediaItem
from weft.messages.requests import Abort, GenerateRequest

NO_ROW = -1


def namespace_of(adapter: str, cache_salt: str) -> str:
    """The part of the prefix cache of requests with this adapter and salt."""
    # No salt reaches the part of another adapter, whatever its characters.
    if adapter or cache_salt.startswith("\0"):
        return f"\0{adapter}\0{cache_salt}"
    return cache_salt


def adapter_and_salt(namespace: str) -> tuple[str, str]:
    """Of which `namespace_of` makes this one."""
    if not namespace.startswith("\0"):
        return "", namespace
    adapter, _, cache_salt = namespace[1:].partition("\0")
    return adapter, cache_salt


class RequestState(Enum):
    WAITING = "waiting"  # in the queue: new, or retracted
    PREFILLING = "prefilling"  # has a row; its prompt is being computed
    DECODING = "decoding"  # has a row; part of the running batch
    FINISHED = "finished"


class RequestSpec(NamedTuple):
    """What follows from a request's arrival. It does not change until the request's end."""

    prompt_len: int
    seed: int
    arrival_order: int  # number of its arrival: the order of first come, first served
    arrival_s: float
    goes_first: bool  # before all others, though it never ran
    # What the prefix cache compares in the place of its first tokens: up to the last one that
    # stands for a picture, a video or a sound; nothing if there is none.
    key_head: bytes = b""


class CachedPrefix(NamedTuple):
    """The part of a request's tokens that the prefix cache owns."""

    handle: Handle  # where it ends in the cache
    length: int  # in tokens
    pages: IntArray  # [length / page size], between match and admission; then they are in the row
    is_locked: bool


NO_PREFIX = CachedPrefix(None, 0, NO_PAGES, is_locked=False)


class Request:
    """A request from arrival to its final reply: what it asked for, and how far it has come.

    The tokens of a request without a row are in `packed`; those of one with a row are in
    `Columns.tokens`. Positions count from the first token of the prompt:

        0 ......... cached_len ......... kv_len ....... extend_end ......... fill_len
        | the tree's pages | its own pages | planned step |  not computed yet  |
    """

    __slots__ = (
        "admitted_s",
        "cached_tokens",
        "extend_end",
        "fill_len",
        "id",
        "kv_len",
        "max_len",
        "message",
        "packed",
        "prefix",
        "reported_len",
        "retractions",
        "row",
        "spec",
        "state",
    )

    def __init__(
        self,
        message: GenerateRequest,
        *,
        max_len: int,
        seed: int,
        arrival_order: int,
        arrival_s: float,
        goes_first: bool = False,
    ) -> None:
        prompt_len = len(message.input_ids) // TOKEN_BYTES
        key_head = b""
        # Features keep them; here they would be held twice, and written into journals.
        if message.vectors:
            message = msgspec.structs.replace(message, vectors=b"")
        if message.media:
            key_head = media_key(message.input_ids, message.media)
            message = msgspec.structs.replace(message, media=without_values(message.media))
        self.message = message
        self.spec = RequestSpec(prompt_len, seed, arrival_order, arrival_s, goes_first, key_head)
        self.id = message.id
        # int32 [fill_len]: the prompt, and after a retraction the output so far.
        self.packed = message.input_ids
        self.max_len = max_len  # prompt and output together
        self.reported_len = 0  # tokens whose aux outputs (log probabilities...) were replied
        self.state = RequestState.WAITING
        self.row = NO_ROW
        self.fill_len = prompt_len  # tokens to compute before the next one can be sampled
        # Tokens computed, or being computed by a launched step, before it decodes.
        self.kv_len = 0
        self.extend_end = 0  # kv_len after the step that is being planned
        self.prefix = NO_PREFIX
        self.admitted_s = -1.0  # when it first got a row
        self.cached_tokens = 0  # of the prompt, found in the cache at first admission
        self.retractions = 0

    # What it is

    @property
    def wants_tokens(self) -> bool:
        """False: it ends as soon as its prompt is computed (SGLang: is_prefill_only)."""
        return self.max_len > self.spec.prompt_len

    # Its key in the prefix cache

    def cache_key(self, token_ids: bytes) -> CacheKey:
        """The key of its first tokens, of which the packed ids are given.

        The one place that says what the cache compares: the ids; where a picture, a video or a
        sound stands, others that follow from its content.
        """
        message = self.message
        key_head = self.spec.key_head
        if key_head:
            token_ids = key_head[: len(token_ids)] + token_ids[len(key_head) :]
        namespace = message.cache_salt
        # Nearly all requests do without the call.
        if message.adapter or namespace.startswith("\0"):
            namespace = namespace_of(message.adapter, namespace)
        return CacheKey(namespace, token_ids)

    @property
    def reusable_len(self) -> int:
        """Tokens that the prefix cache may give: at least the last one is left to compute.

        Whoever asked for the outputs of prompt tokens (`recompute_from`) needs them computed,
        until all of them were reported.
        """
        message = self.message
        if not message.shares_kv:
            return 0
        usable_len = self.fill_len - 1
        recompute_from = message.recompute_from
        if recompute_from is None or self.reported_len >= self.spec.prompt_len:
            return usable_len
        return min(usable_len, max(recompute_from, self.reported_len))

    # How far it has come

    @property
    def remaining_prefill(self) -> int:
        return self.fill_len - self.kv_len

    @property
    def extend_len(self) -> int:
        """Tokens that the planned step computes for it."""
        return self.extend_end - self.kv_len

    @property
    def completes(self) -> bool:
        """Whether the planned step computes the last of its tokens."""
        return self.extend_end == self.fill_len

    @property
    def is_prefilled(self) -> bool:
        """Whether all of its tokens are computed, or are being computed by a launched step."""
        return self.kv_len == self.fill_len

    def forget_kv(self) -> None:
        """It owns nothing any more: it waits, with the tokens in `packed`."""
        self.row = NO_ROW
        self.state = RequestState.WAITING
        self.fill_len = len(self.packed) // TOKEN_BYTES
        self.kv_len = 0
        self.extend_end = 0
        self.prefix = NO_PREFIX


def without_values(media: tuple[MediaItem, ...]) -> tuple[MediaItem, ...]:
    """The items without what the encoder reads of them."""
    return tuple(msgspec.structs.replace(item, values=b"") for item in media)


def media_key(input_ids: bytes, media: tuple[MediaItem, ...]) -> bytes:
    """The key of a prompt's tokens up to the end of its last item."""
    pieces: list[bytes] = []
    begin = 0
    for item in media:
        # K and V depend on the vectors, and on where they lie.
        content = item.digest + repr((item.length, item.grid, item.time_step)).encode()
        ids = content_ids(content, item.length)
        start = item.start
        for first, end in item.lines:
            pieces.append(input_ids[begin * TOKEN_BYTES : first * TOKEN_BYTES])
            pieces.append(ids[(first - start) * TOKEN_BYTES : (end - start) * TOKEN_BYTES])
            begin = end
    return b"".join(pieces)


def matching_ids(requests: Mapping[int, Request], abort: Abort) -> list[int]:
    """The ids that an abort is about. Those that it names by number need not be open."""
    if abort.all:
        return list(requests)
    names = set(abort.names) - {""}
    found = list(abort.ids)
    if names:
        for id, request in requests.items():
            if request.message.rid in names or request.message.group in names:
                found.append(id)
    return found


def seed_of(seed: int, arrival_order: int) -> int:
    """A seed for a request that brings none: splitmix64, as a signed 64-bit integer."""
    mask = (1 << 64) - 1
    z = (seed + (arrival_order + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return z - (1 << 64) if z >> 63 else z


class RowFacts(NamedTuple):
    """What stays as it is while requests have their rows, of n rows that are computed together."""

    rows: IntArray  # [n]
    as_of: int  # `Columns.num_changes`: later they may be others
    at: LongArray  # [n] the rows again: numpy would convert them for each column
    epochs: IntArray  # [n]
    ids: LongArray  # [n]
    max_len: IntArray  # [n]
    stops_at_eos: BoolArray  # [n]
    has_stop_ids: BoolArray  # [n]
    temperature: FloatArray  # [n]
    top_p: FloatArray  # [n]
    top_k: IntArray  # [n]
    min_p: FloatArray  # [n]
    seeds: LongArray  # [n]


class SamplingColumns:
    """The parameters of sampling, by row."""

    def __init__(self, num_rows: int) -> None:
        self.temperature: FloatArray = np.zeros(num_rows, dtype=np.float32)
        self.top_p: FloatArray = np.zeros(num_rows, dtype=np.float32)
        self.top_k: IntArray = np.zeros(num_rows, dtype=np.int32)
        self.min_p: FloatArray = np.zeros(num_rows, dtype=np.float32)
        self.seed: LongArray = np.zeros(num_rows, dtype=np.int64)


class Columns:
    """The numbers of requests that have a row, indexed by row. Only the scheduler writes them.

    A decoding request:

        0 ........ cached_len ........ kv_len ........ known_len = seq_len, or seq_len - 1
        | the tree's pages | its own pages | pending tokens |

    `seq_len` counts every token up to the last one, known or still on the device. The first
    `kv_len` of them have K and V in the cache, or get them from a launched step. The usual decode
    row has one pending token, the one sampled last; a row may have more: forced (jump-forward)
    tokens (`Forced` in `batch.py`). While a prompt is computed, `seq_len` is that of the prompt.
    While a step with drafts runs, they count in `kv_len` and stand in `tokens`, behind what is
    known (`speculation/`).

    A free row is all zeros but for its epoch, so a request finds nothing of the row's last owner.

    Where all running rows are read, that is `column.take(rows)`: with int32 rows it takes half as
    long as `column[rows]`, a third for bools.
    """

    def __init__(self, num_rows: int, max_len: int) -> None:
        def ints() -> IntArray:
            return np.zeros(num_rows, dtype=np.int32)

        self.tokens: IntArray = np.zeros((num_rows, max_len), dtype=np.int32)  # known ids
        # How often the row has been given up: tells a result for its former request.
        self.epoch = ints()
        # How often any row has been given up, or a request in a row has got another limit.
        self.num_changes = 0
        self.ids: LongArray = np.zeros(num_rows, dtype=np.int64)  # Request.id
        self.requests = np.empty(num_rows, dtype=object)  # Request, or None
        self.seq_len = ints()
        self.kv_len = ints()
        self.cached_len = ints()
        self.known_len = ints()  # tokens whose ids are known
        self.prompt_len = ints()
        self.priority: LongArray = np.zeros(num_rows, dtype=np.int64)
        # Requests that had arrived when it began to decode: later ones have a higher arrival order.
        self.num_arrived: LongArray = np.zeros(num_rows, dtype=np.int64)
        self.max_len = ints()  # seq_len at which the request ends by length
        self.stops_at_eos: BoolArray = np.zeros(num_rows, dtype=np.bool_)
        self.has_stop_ids: BoolArray = np.zeros(num_rows, dtype=np.bool_)
        self.sampling = SamplingColumns(num_rows)
        # All that a request enters besides its tokens.
        self._numbers = [
            self.ids,
            self.seq_len,
            self.kv_len,
            self.cached_len,
            self.known_len,
            self.prompt_len,
            self.priority,
            self.num_arrived,
            self.max_len,
            self.stops_at_eos,
            self.has_stop_ids,
            *vars(self.sampling).values(),
        ]
        self._facts: RowFacts | None = None  # that were read last

    def fill(self, request: Request) -> None:
        """Enter a request that has just got its row. Its cached prefix has K and V already."""
        row = request.row
        sampling = request.message.sampling
        cached_len = request.prefix.length
        fill_len = request.fill_len
        self.tokens[row, :fill_len] = np.frombuffer(request.packed, dtype=np.int32)
        self.ids[row] = request.id
        self.seq_len[row] = fill_len
        self.known_len[row] = fill_len
        self.kv_len[row] = cached_len
        self.cached_len[row] = cached_len
        self.prompt_len[row] = request.spec.prompt_len
        self.priority[row] = request.message.priority
        self.max_len[row] = request.max_len
        self.stops_at_eos[row] = not sampling.ignore_eos
        self.has_stop_ids[row] = bool(sampling.stop_token_ids)
        own = self.sampling
        own.temperature[row] = sampling.temperature
        own.top_p[row] = sampling.top_p
        own.top_k[row] = max(sampling.top_k, 0)
        own.min_p[row] = sampling.min_p
        own.seed[row] = request.spec.seed
        self.requests[row] = request

    def clear(self, row: int) -> None:
        """The request has left its row: results for it that are still to come count no more."""
        self.epoch[row] += 1
        self.num_changes += 1
        self.requests[row] = None
        self.tokens[row, : self._num_written(row)] = 0
        for column in self._numbers:
            column[row] = 0

    def reset(self) -> None:
        """Give up all rows, whatever their requests."""
        self.epoch += 1
        self.num_changes += 1
        self.requests[:] = None
        # Row by row: the whole table may be larger than what was ever touched.
        for row in np.flatnonzero(self.known_len).tolist():
            self.tokens[row, : self._num_written(row)] = 0
        for column in self._numbers:
            column[:] = 0

    def facts(self, rows: IntArray) -> RowFacts:
        """The facts of `rows` [n].

        Most steps run the same rows as the one before: then they are not read again, which would
        take 5 to 10 us for each column of 4,096 rows.
        """
        facts = self._facts
        if facts is not None and facts.rows is rows and facts.as_of == self.num_changes:
            return facts
        sampling = self.sampling
        facts = RowFacts(
            rows=rows,
            as_of=self.num_changes,
            at=rows.astype(np.intp),
            epochs=self.epoch.take(rows),
            ids=self.ids.take(rows),
            max_len=self.max_len.take(rows),
            stops_at_eos=self.stops_at_eos.take(rows),
            has_stop_ids=self.has_stop_ids.take(rows),
            temperature=sampling.temperature.take(rows),
            top_p=sampling.top_p.take(rows),
            top_k=sampling.top_k.take(rows),
            min_p=sampling.min_p.take(rows),
            seeds=sampling.seed.take(rows),
        )
        self._facts = facts
        return facts

    def _num_written(self, row: int) -> int:
        """Tokens of a row whose ids have been written: those that are known, and drafts."""
        return max(int(self.known_len[row]), int(self.kv_len[row]))

    def packed(self, row: int, length: int) -> bytes:
        """The first `length` token ids of a row, packed."""
        return self.tokens[row, :length].tobytes()

    def unfinished(self, rows: IntArray) -> IntArray:
        """Rows without those that will end by length with the token that is being sampled.

        The very same array if there are none of those.
        """
        # Of all rows, and then of these: one read by rows less.
        goes_on = (self.seq_len < self.max_len).take(rows)
        if goes_on.all():
            return rows
        return rows[goes_on]

    def all_unfinished(self, rows: IntArray) -> IntArray:
        """As `unfinished`, also where rows take turns (`stages/columns.py`)."""
        return self.unfinished(rows)

    def num_output(self, row: int) -> int:
        """Output tokens whose ids are known."""
        return int(self.known_len[row] - self.prompt_len[row])
