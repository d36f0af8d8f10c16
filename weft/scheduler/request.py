"""One request as the scheduler knows it, and the columns with the numbers of requests that have a
row.

Numbers that a decode step needs are in `Columns`, one entry per row, so that a step over hundreds
of requests takes a few vector operations. Numbers that are needed when a request arrives, ends or
waits are in `Request`. Neither knows policies, features or the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from weft.arrays import BoolArray, IntArray, LongArray
from weft.memory.media.ids import content_ids
from weft.memory.prefix_cache import NO_PAGES, TOKEN_BYTES, CacheKey, Handle
from weft.messages.media import MediaItem
from weft.messages.requests import Abort, GenerateRequest
from weft.plan.step import SamplingColumns
from weft.scheduler.service import SERVICES, ServiceClass

NO_ROW = -1


def namespace_of(adapter: str, cache_salt: str) -> str:
    """The namespace in the prefix cache of requests with this adapter and this salt."""
    # Whatever its characters, no salt can reach the namespace of another adapter.
    if adapter or cache_salt.startswith("\0"):
        return f"\0{adapter}\0{cache_salt}"
    return cache_salt


def adapter_and_salt(namespace: str) -> tuple[str, str]:
    """The arguments from which `namespace_of` makes this namespace."""
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
    """Facts that follow from a request's arrival. They do not change until its end, except for
    `num_before`."""

    prompt_len: int
    seed: int
    arrival_order: int  # number of its arrival: the order of first come, first served
    arrival_s: float
    service: ServiceClass
    goes_first: bool  # before all other requests, though it never ran
    # Requests that had come before it could run: more than at its arrival if it has waited for
    # something else than the others before it, such as its grammar.
    num_before: int
    # What the prefix cache compares instead of the first token ids: up to the last token of a
    # picture, a video or a sound; empty if the prompt has none.
    key_head: bytes = b""
    # The last part of its namespace in the prefix cache: the sound to which all of its tokens
    # attend, of fixed length; empty if there is none.
    heard: str = ""


class CachedPrefix(NamedTuple):
    """The part of a request's tokens that the prefix cache owns."""

    handle: Handle  # end of the prefix in the cache
    length: int  # in tokens
    pages: IntArray  # [length / page size], from match to admission; after that the row has them
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
        prompt_len = message.prompt_len
        key_head = b""
        heard = ""
        # Features keep them; here they would be stored twice, and recorded in journals.
        if message.vectors:
            message = msgspec.structs.replace(message, vectors=b"")
        if message.media:
            key_head = media_key(message.input_ids, message.media)
            heard = "".join(f"\1{item.digest.hex()}" for item in message.media if item.num_heard)
            message = msgspec.structs.replace(message, media=without_values(message.media))
        self.message = message
        self.spec = RequestSpec(
            prompt_len,
            seed,
            arrival_order,
            arrival_s,
            SERVICES[message.background],
            goes_first,
            num_before=arrival_order,
            key_head=key_head,
            heard=heard,
        )
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
        """False: the request ends as soon as its prompt is computed (SGLang: is_prefill_only)."""
        return self.max_len > self.spec.prompt_len

    # Its key in the prefix cache

    def cache_key(self, token_ids: bytes) -> CacheKey:
        """The cache key of the request's first tokens, whose packed ids are the argument.

        This is the only place that says what the cache compares: token ids, but for a picture, a
        video or a sound, ids that follow from its content.
        """
        message = self.message
        key_head = self.spec.key_head
        if key_head:
            token_ids = key_head[: len(token_ids)] + token_ids[len(key_head) :]
        namespace = message.cache_salt + self.spec.heard
        # Nearly all requests do not need the call.
        if message.adapter or namespace.startswith("\0"):
            namespace = namespace_of(message.adapter, namespace)
        return CacheKey(namespace, token_ids)

    @property
    def reusable_len(self) -> int:
        """Number of tokens that may come from the prefix cache; at least the last one is computed.

        A request for outputs of prompt tokens (`recompute_from`) needs these tokens computed, until
        all of the outputs were reported.
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
        """The request owns no memory any more: it waits, with its tokens in `packed`."""
        self.row = NO_ROW
        self.state = RequestState.WAITING
        self.fill_len = len(self.packed) // TOKEN_BYTES
        self.kv_len = 0
        self.extend_end = 0
        self.prefix = NO_PREFIX


def without_values(media: tuple[MediaItem, ...]) -> tuple[MediaItem, ...]:
    """The items without the arrays that the encoder reads."""
    return tuple(msgspec.structs.replace(item, values=b"") for item in media)


def media_key(input_ids: bytes, media: tuple[MediaItem, ...]) -> bytes:
    """The part of a prompt's cache key up to the end of its last item."""
    pieces: list[bytes] = []
    begin = 0
    for item in media:
        if item.num_heard:
            continue
        # K and V depend on the vectors and on their positions.
        content = item.digest + repr((item.length, item.grid, item.time_step)).encode()
        ids = content_ids(content, item.length)
        start = item.start
        for first, end in item.lines:
            pieces.append(input_ids[begin * TOKEN_BYTES : first * TOKEN_BYTES])
            pieces.append(ids[(first - start) * TOKEN_BYTES : (end - start) * TOKEN_BYTES])
            begin = end
    return b"".join(pieces)


def matching_ids(requests: Mapping[int, Request], abort: Abort) -> list[int]:
    """The ids of the requests to abort. Ids that the message names need not be open."""
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
    """The seed of a request without one: splitmix64, as a signed 64-bit integer."""
    mask = (1 << 64) - 1
    z = (seed + (arrival_order + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return z - (1 << 64) if z >> 63 else z


class RowFacts(NamedTuple):
    """Columns of n rows that run together. They do not change while requests keep their rows."""

    rows: IntArray  # [n]
    as_of: int  # value of `Columns.num_changes`; if that differs, the facts may be out of date
    sampling: SamplingColumns
    # [n] the rows as numpy's index type, so that numpy need not convert them each time
    at: LongArray
    epochs: IntArray  # [n]
    ids: LongArray  # [n]
    max_len: IntArray  # [n]
    stops_at_eos: BoolArray  # [n]
    has_stop_ids: BoolArray  # [n]

    def some(self, kept: BoolArray) -> RowFacts:
        """The facts of the rows that are `kept` [n]."""
        columns: tuple[Any, ...] = tuple(column[kept] for column in self[3:])
        sampling = self.sampling.some(kept)
        return RowFacts(self.rows[kept], self.as_of, sampling, *columns)

    def repeated(self, counts: IntArray) -> RowFacts:
        """The facts of each row `counts` [n] times."""
        columns: tuple[Any, ...] = tuple(np.repeat(column, counts) for column in self[3:])
        sampling = self.sampling.repeated(counts)
        return RowFacts(np.repeat(self.rows, counts), self.as_of, sampling, *columns)


class RowTurns(Protocol):
    """Decides which decoding rows have a turn in the next step."""

    def take(self, columns: Columns, rows: IntArray) -> IntArray:
        """Those of the unfinished `rows` [n] that the next step may take. The same array if there
        are none to leave out. Asked several times before a step."""
        ...

    def beside_drafts(
        self, columns: Columns, rows: IntArray, counts: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Those of `rows` [n], which were taken last, that take part in a step with drafts, and how
        many of its drafts `counts` [n] each of them computes."""
        ...


class Columns:
    """The numbers of requests that have a row, indexed by row. Only the scheduler writes them.

    A decoding request:

        0 ........ cached_len ........ kv_len ........ known_len = seq_len, or seq_len - 1
        | the tree's pages | its own pages | pending tokens |

    `seq_len` counts every token up to the last one, known or still on the device. The first
    `kv_len` of them have K and V in the cache, or get them from a launched step. The usual decode
    row has one pending token, the one sampled last; a row may have more: forced (jump-forward)
    tokens (`Forced` in `batch.py`). While a prompt is computed, `seq_len` is the length of the
    prompt. While a step with drafts runs, `kv_len` includes the drafts and `tokens` has them, after
    the known tokens (`speculation/`).

    A free row is all zeros except for its epoch, so a new request finds no values of the old one.

    To read all running rows, use `column.take(rows)`: with int32 rows it takes half as long as
    `column[rows]`, and for bools a third.
    """

    def __init__(self, num_rows: int, max_len: int) -> None:
        def ints() -> IntArray:
            return np.zeros(num_rows, dtype=np.int32)

        self.tokens: IntArray = np.zeros((num_rows, max_len), dtype=np.int32)  # known ids
        # How often the row has been released: results for an earlier epoch belong to another
        # request.
        self.epoch = ints()
        # How often any row has been released, or a request in a row has got another limit.
        self.num_changes = 0
        self.ids: LongArray = np.zeros(num_rows, dtype=np.int64)  # Request.id
        self.requests = np.empty(num_rows, dtype=object)  # Request, or None
        self.seq_len = ints()
        self.kv_len = ints()
        self.cached_len = ints()
        self.known_len = ints()  # tokens whose ids are known
        self.prompt_len = ints()
        self.priority: LongArray = np.zeros(num_rows, dtype=np.int64)
        # Requests that had come, those that are blocked apart, when it began to decode, and of an
        # open prompt, when it was begun: later arrival orders are not lower.
        self.num_arrived: LongArray = np.zeros(num_rows, dtype=np.int64)
        self.max_len = ints()  # seq_len at which the request ends by length
        self.stops_at_eos: BoolArray = np.zeros(num_rows, dtype=np.bool_)
        self.has_stop_ids: BoolArray = np.zeros(num_rows, dtype=np.bool_)
        self.background: BoolArray = np.zeros(num_rows, dtype=np.bool_)
        # Each leaves out rows that have no turn in the next step.
        self.turns: list[RowTurns] = []
        self.sampling = SamplingColumns.zeros(num_rows)
        # All columns of a request except its tokens.
        self._numbers: list[NDArray[Any]] = [
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
            self.background,
            *self.sampling,
        ]
        self._facts: RowFacts | None = None  # the last result of `facts`

    def fill(self, request: Request) -> None:
        """Write the numbers of a request that has got its row. Its cached prefix has K and V
        already."""
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
        self.background[row] = request.message.background
        self.sampling.write(row, sampling, request.spec.seed)
        self.requests[row] = request

    def clear(self, row: int) -> None:
        """The request has left its row. Later results for it are ignored."""
        self.epoch[row] += 1
        self.num_changes += 1
        self.requests[row] = None
        self.tokens[row, : self._num_written(row)] = 0
        for column in self._numbers:
            column[row] = 0

    def reset(self) -> None:
        """Release all rows, whatever their requests."""
        self.epoch += 1
        self.num_changes += 1
        self.requests[:] = None
        # Row by row, because the whole table may be larger than the part that was ever written.
        for row in np.flatnonzero(self.known_len).tolist():
            self.tokens[row, : self._num_written(row)] = 0
        for column in self._numbers:
            column[:] = 0

    def facts(self, rows: IntArray) -> RowFacts:
        """The facts of `rows` [n].

        Most steps run the same rows as the step before. Then the columns are not read again, which
        would take 5 to 10 us for each column of 4,096 rows.
        """
        facts = self._facts
        if facts is not None and facts.rows is rows and facts.as_of == self.num_changes:
            return facts
        facts = RowFacts(
            rows=rows,
            as_of=self.num_changes,
            at=rows.astype(np.intp),
            epochs=self.epoch.take(rows),
            ids=self.ids.take(rows),
            max_len=self.max_len.take(rows),
            stops_at_eos=self.stops_at_eos.take(rows),
            has_stop_ids=self.has_stop_ids.take(rows),
            sampling=self.sampling.take(rows),
        )
        self._facts = facts
        return facts

    def _num_written(self, row: int) -> int:
        """Number of written token ids in a row: known tokens, and drafts."""
        return max(int(self.known_len[row]), int(self.kv_len[row]))

    def packed(self, row: int, length: int) -> bytes:
        """The first `length` token ids of a row, packed."""
        return self.tokens[row, :length].tobytes()

    def unfinished(self, rows: IntArray) -> IntArray:
        """The rows that the next step may take: without those that end by length with the token
        that is being sampled, and those that have no turn.

        If there are none to leave out, the same array.
        """
        rows = self.all_unfinished(rows)
        for turns in self.turns:
            rows = turns.take(self, rows)
        return rows

    def beside_drafts(self, rows: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
        """The rows of the next step, of those that it may take, and the drafts of each, of
        `counts` [n] that were made."""
        for turns in self.turns:
            rows, counts = turns.beside_drafts(self, rows, counts)
        return rows, counts

    def all_unfinished(self, rows: IntArray) -> IntArray:
        """Like `unfinished`, with the rows that have no turn."""
        # Comparing whole columns first needs one read by rows less.
        goes_on = (self.seq_len < self.max_len).take(rows)
        if np.count_nonzero(goes_on) == len(goes_on):  # `all` takes four times as long
            return rows
        return rows[goes_on]

    @property
    def num_background(self) -> int:
        """Rows of background requests."""
        return int(np.count_nonzero(self.background))

    def num_output(self, row: int) -> int:
        """Output tokens whose ids are known."""
        return int(self.known_len[row] - self.prompt_len[row])
