"""Admission of waiting requests to a prefill batch: the budgets of one pass (SGLang: PrefillAdder).

There are three budgets: memory (`rem_total_tokens`, `cur_rem_tokens`), the tokens of one step
(`max_prefill_tokens`) and the length of a chunk; `rem_step_tokens` is what is left of the smaller
of the last two. Memory is reserved in advance: each request will also need pages for its output.
For running requests the reserve is an expectation, the sum of min(tokens left, CLIP_MAX_NEW_TOKENS)
* new_token_ratio; if it turns out too small, a decode step retracts requests. Without a prefix
cache, requests that ignore EOS need less: `reserve/completions.py`. Admission knows no queue and no
policy.

    KV pool:  | running and locked | promised to running | promised here | rem_total_tokens |
                                   |<------------------ available -------------------------->|
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np

from weft.arrays import IntArray
from weft.memory.allocator import num_pages_for
from weft.memory.prefix_cache import TOKEN_BYTES, Handle
from weft.scheduler.groups.protocol import GroupBudget, Lack, Shortage
from weft.scheduler.kv import KvMemory
from weft.scheduler.pace.pace import StepBudget
from weft.scheduler.request import Columns, Request
from weft.scheduler.reserve.completions import (
    CompletionBudget,
    TightestMoment,
    has_known_length,
)
from weft.scheduler.settings import CLIP_MAX_NEW_TOKENS

INIT_RATIO = 0.7
MIN_FACTOR = 0.14
DECAY_STEPS = 600
RETRACT_DECODE_STEPS = 20  # after a retraction, memory should last for this many steps
MIN_CAREFUL_RATIO = 1 / 16


class NewTokenRatio:
    """The fraction of their `max_new_tokens` that running requests are expected to use (SGLang:
    new_token_ratio).

    It starts high, falls with every decode step that fits in memory, and is set again from the
    observed lengths when a step does not fit.
    """

    def __init__(self, conservativeness: float) -> None:
        self.init = min(INIT_RATIO * conservativeness, 1.0)
        self.min = self.init * MIN_FACTOR
        self._decay = (self.init - self.min) / DECAY_STEPS
        self.current = self.init

    def decay(self) -> None:
        """A decode step fitted."""
        self.current = max(self.current - self._decay, self.min)

    def raise_after_retraction(self, *, num_decoded: int, num_requests: int, max_new: int) -> None:
        """Requests were retracted; the others have generated `num_decoded` of `max_new` tokens."""
        expected = (num_decoded + RETRACT_DECODE_STEPS * num_requests) / (max_new + 1)
        self.current = min(1.0, expected)

    def learn(self, columns: Columns, kept: IntArray) -> None:
        """Requests were retracted; `kept` are the rows of the others."""
        prompt_len = columns.prompt_len[kept]
        self.raise_after_retraction(
            num_decoded=int((columns.known_len[kept] - prompt_len).sum()),
            num_requests=len(kept),
            max_new=int((columns.max_len[kept] - prompt_len).sum()),
        )

    def reset(self) -> None:
        """No request runs."""
        self.current = self.init


def expected_tokens(columns: Columns, rows: IntArray, ratio: float) -> float:
    """Tokens that running requests are still expected to generate.

    A request that ignores EOS is expected to reach its limit.
    """
    # Subtracting whole columns first needs one read by rows less. Below 0: it wants no token.
    left = (columns.max_len - columns.seq_len).take(rows)
    left = np.minimum(np.maximum(left, 0), CLIP_MAX_NEW_TOKENS)
    # Sums of integers are the same on every machine.
    at_eos = int(left[columns.stops_at_eos.take(rows)].sum())
    return int(left.sum()) - at_eos + at_eos * ratio


def spare_tokens(kv: KvMemory, ratio: float) -> float:
    """Tokens of memory that running requests are not expected to need."""
    columns = kv.columns
    rows = np.flatnonzero(columns.max_len).astype(np.int32)  # rows of open prompts, too
    reserved = expected_tokens(columns, rows, ratio)
    pending = int((columns.seq_len[rows] - columns.kv_len[rows]).sum())
    return kv.room.available - pending - reserved


def careful_ratio(ratio: float, retractions: int) -> float:
    """The fraction of their output for which running requests need memory before a request may
    resume that was retracted `retractions` times: it doubles each time, up to 1."""
    if not retractions:
        return ratio
    return min(1.0, max(ratio, MIN_CAREFUL_RATIO) * 2.0**retractions)


class AddResult(Enum):
    CONTINUE = "continue"  # the next request may be tried
    NO_TOKEN = "no_token"  # memory is used up
    OTHER = "other"  # a budget of this step is used up
    PASSED_OVER = "passed over"  # only this request must wait; others may go before it


class Head(NamedTuple):
    """The first tokens that a request has to compute, and their position in the cache."""

    namespace: str
    handle: Handle
    tokens: bytes  # packed


class PieceBudget(Protocol):
    """Limits of a feature on the pieces of prompts that one pass takes.

    A piece begins at the end of the request's cached tokens. It is whole pages, or all that is left
    to compute.
    """

    def limit(self, request: Request, num_tokens: int, *, is_first: bool) -> int:
        """Length of the next piece of a request, if `num_tokens` fit into the step. It may be less,
        down to 0; or more, for the first piece of a step, if fewer tokens cannot be computed."""
        ...

    def border(self, request: Request, num_tokens: int) -> int:
        """The longest piece of whole pages up to `num_tokens`."""
        ...

    def spend(self, request: Request, num_tokens: int) -> None:
        """The step computes `num_tokens` tokens of a request."""
        ...


class PrefillAdder:
    """The budgets of one pass, and the requests that it has picked.

    `reserved` are tokens that running requests are expected to need. `mixed_tokens` and `mixed_kv`
    are the tokens and the memory that decode requests take that join this step. `is_alone`: no
    request runs and no chunk is open. `budget`: how long the step may take, where prompts are cut.
    `groups`: the budgets of layers with memory of their own. `pieces`: the budgets of the features
    in use. `completions`: decides on the memory of the pool for requests with a known length, if
    others run.
    """

    def __init__(
        self,
        kv: KvMemory,
        *,
        reserved: float,
        max_prefill_tokens: int,
        chunked_prefill_size: int | None,
        is_alone: bool,
        mixed_tokens: int = 0,
        mixed_kv: int = 0,
        budget: StepBudget | None = None,
        groups: Sequence[GroupBudget] = (),
        pieces: Sequence[PieceBudget] = (),
        completions: CompletionBudget | None = None,
    ) -> None:
        self._kv = kv
        self._page_size = kv.page_size
        self._total_offset = mixed_kv + reserved
        self._current_offset = mixed_kv
        # Prompts are cut only if a chunk has a length; then the smaller of the two budgets counts.
        self._may_cut = chunked_prefill_size is not None
        step_tokens = max_prefill_tokens
        if chunked_prefill_size is not None:
            step_tokens = min(chunked_prefill_size, max_prefill_tokens)
        self.rem_step_tokens = step_tokens - mixed_tokens
        self._is_alone = is_alone
        self._budget = budget
        self._groups = groups
        self._pieces = pieces
        self._completions = completions
        self.can_run: list[Request] = []
        self.new_chunked_req: Request | None = None
        self.input_tokens = 0
        self.shortage: Shortage | None = None  # of the last refused request

    @property
    def rem_total_tokens(self) -> float:
        """Memory left, minus the tokens that are expected to be generated."""
        left = self._kv.room.rest - self._total_offset
        for group in self._groups:
            left = min(left, group.tokens_left)
        return left

    @property
    def cur_rem_tokens(self) -> int:
        """Memory left for this step alone."""
        return self._kv.room.available - self._current_offset

    def add_chunked_req(self, request: Request) -> Request | None:
        """Go on with the open chunk as far as the budgets allow. Returns it while its prompt is
        unfinished.

        Where memory allows no progress it is left out of the batch and waits for running requests
        to end.
        """
        assert self._may_cut
        rest = request.remaining_prefill
        limit = self._step_limit(request)
        if self._pieces and limit > 0:
            limit = self._piece_limit(request, limit)
        if rest <= limit and self._pages_of(rest) <= self.cur_rem_tokens:
            self._take(request, rest, reserve=self._expected_new(request))
            return None
        cut = self._cut(request, min(limit, self.cur_rem_tokens))
        if 0 < cut < rest:
            self._take(request, cut, reserve=0)
        elif self._floor(limit) <= 0 and rest > limit:
            self.shortage = self._cut_short(rest, limit)
        else:
            self.shortage = self._no_page()
        return request

    def add_one_req(self, request: Request, *, has_chunked_req: bool) -> AddResult:
        """Take a waiting, matched request if the budgets allow, whole or its first chunk.

        Its prefix is locked if it is taken. Memory is tested again under the lock, for locking
        makes the prefix unevictable.
        """
        extend = request.remaining_prefill
        reserve = 0
        # A request that runs alone may use all there is: that it fits was made sure at arrival.
        if not self._is_alone or self.can_run:
            reserve = self._expected_new(request)
        if not self._fits(request, extend, reserve):
            return self._no_token(request, extend, reserve)
        self._kv.prefixes.lock(request)
        refused = self._add_locked(request, extend, reserve, has_chunked_req)
        if refused is not None:
            self._kv.prefixes.unlock(request)
            return refused
        # What this very step takes is less than that. Where completions are simulated, the next
        # request may fit all the same.
        if self.rem_total_tokens <= 0 and self._completions is None:
            return AddResult.NO_TOKEN
        if self.rem_step_tokens <= 0:
            return AddResult.OTHER
        return AddResult.CONTINUE

    def _add_locked(
        self, request: Request, extend: int, reserve: int, has_chunked_req: bool
    ) -> AddResult | None:
        """Take the request, or say why not."""
        # Where there is no prefix, locking has changed nothing.
        if (request.prefix.length or self._groups) and not self._fits(request, extend, reserve):
            return self._no_token(request, extend, reserve)
        if not self._may_cut:
            # Without chunks a prompt runs whole: the first of a batch may exceed the step's budget.
            charged = self._pages_of(extend)
            if self.can_run and charged > self.rem_step_tokens:
                self.shortage = Shortage(Lack.TOKENS, charged, max(self.rem_step_tokens, 0))
                return AddResult.OTHER
            if self._pieces and self._piece_limit(request, extend) < extend:
                return self._wait_for_encoder(extend)
            self._take(request, extend, reserve)
            return None
        limit = self._step_limit(request)
        if self._pieces and limit > 0:
            fitting = min(limit, extend)
            limit = self._piece_limit(request, limit)
            is_open = has_chunked_req or self.new_chunked_req is not None
            if limit < fitting and (is_open or not limit):
                return self._wait_for_encoder(extend)
        if extend <= limit:
            self._take(request, extend, reserve)
            return None
        cut = self._cut(request, limit)
        if cut <= 0:
            self.shortage = self._cut_short(extend, limit)
            return AddResult.OTHER
        # At most one prompt is open. A cut by time leaves tokens over, so the walk may come here
        # again.
        if has_chunked_req or self.new_chunked_req is not None:
            self.shortage = Shortage(Lack.OPEN_PROMPT, extend, limit)
            return AddResult.OTHER
        self._take(request, cut, reserve=0)
        self.new_chunked_req = request
        return None

    def _no_token(self, request: Request, extend: int, reserve: int) -> AddResult:
        """Note how much memory was there. Called before the lock is given back: that changes it."""
        for group in self._groups:
            shortage = group.shortage(request, extend, reserve)
            if shortage is not None:
                self.shortage = shortage
                return AddResult.NO_TOKEN
        completions = self._completions
        is_alone = self._is_alone and not self.can_run
        if completions is not None and not is_alone and has_known_length(request):
            # It may fit after any step, even if no request ends, so the batch is not full.
            needed, available = self._tightest(completions, request, extend)
            self.shortage = Shortage(Lack.COMPLETIONS, needed, available, self._kv.room.available)
            return AddResult.OTHER
        needed = self._pages_of(extend)
        if reserve or not is_alone:
            # One token is left over: what runs must be able to go on.
            needed += self._page_size + reserve + 1
        available = max(math.floor(self.rem_total_tokens), 0)
        self.shortage = self._memory_shortage(needed, available)
        return AddResult.NO_TOKEN

    def _no_page(self) -> Shortage:
        """There is no memory for another page of the open prompt."""
        cur_rem_tokens = self.cur_rem_tokens
        for group in self._groups:
            shortage = group.no_page(cur_rem_tokens)
            if shortage is not None:
                return shortage
        available = max(cur_rem_tokens, 0)
        return self._memory_shortage(self._page_size, available)

    def _memory_shortage(self, needed: int, available: int) -> Shortage:
        kv = self._kv
        return Shortage(
            Lack.MEMORY, needed, available, kv.room.available, evictable=kv.room.evictable
        )

    def _cut_short(self, extend: int, limit: int) -> Shortage:
        """Not a page of a prompt fits into the step: for time, if its tokens allowed more."""
        lack = Lack.TIME if limit < self.rem_step_tokens else Lack.TOKENS
        return Shortage(lack, extend, max(limit, 0))

    def lacking(self, request: Request) -> float:
        """Memory that a request lacks to be admitted while others run. It may come in below 0."""
        extend = request.remaining_prefill
        reserve = self._expected_new(request)
        needed = self._pages_of(extend) + self._page_size + reserve
        lacking = needed - (self._kv.room.rest - self._total_offset)
        if self._completions is not None and has_known_length(request):
            tightest = self._tightest(self._completions, request, extend)
            lacking = tightest.needed - tightest.available - 1  # below 0: it fits
        for group in self._groups:
            lacking = max(lacking, group.lacking(request, extend, reserve))
        return lacking

    def _fits(self, request: Request, extend: int, reserve: int) -> bool:
        charged = self._pages_of(extend)
        left = self._kv.room.rest - self._total_offset
        is_alone = self._is_alone and not self.can_run
        if not reserve and is_alone:
            fits = charged <= left
        elif self._completions is not None and not is_alone and has_known_length(request):
            fits = self._tightest(self._completions, request, extend).fits
        else:
            # Besides its tokens a page of slack: the last one may be begun and not full.
            fits = charged + self._page_size + reserve < left
        for group in self._groups:
            fits = fits and group.fits(request, extend, reserve, is_alone=is_alone)
        return fits

    def _take(self, request: Request, extend: int, reserve: int) -> None:
        for group in self._groups:
            group.take(request, extend, reserve)
        charged = self._pages_of(extend)
        self._total_offset += charged + self._page_size + reserve
        self._current_offset += charged
        self.rem_step_tokens -= charged
        if self._completions is not None:
            self._completions.take(request, extend, reserve)
        if self._budget is not None:
            self._budget.spend(request.kv_len, extend)
        for pieces in self._pieces:
            pieces.spend(request, extend)
        self.input_tokens += extend
        request.extend_end = request.kv_len + extend
        self.can_run.append(request)

    def _step_limit(self, request: Request) -> int:
        """As many of the next tokens of a prompt as the step has room and time for."""
        if self._budget is None:
            return self.rem_step_tokens
        return min(self.rem_step_tokens, self._budget.limit(request.kv_len))

    def _tightest(
        self, completions: CompletionBudget, request: Request, extend: int
    ) -> TightestMoment:
        """The simulation of all completions with one more request."""
        # Features may cut a prompt shorter.
        is_unsplit = not self._may_cut
        if not is_unsplit and not self._pieces:
            is_unsplit = extend <= self._step_limit(request)
        return completions.tightest(request, extend, is_unsplit=is_unsplit)

    def _piece_limit(self, request: Request, num_tokens: int) -> int:
        """How many of the next `num_tokens` of a prompt, which fit into the step, features let it
        compute."""
        is_first = not self.can_run
        for pieces in self._pieces:
            num_tokens = pieces.limit(request, num_tokens, is_first=is_first)
        return num_tokens

    def _cut(self, request: Request, num_tokens: int) -> int:
        """Whole pages of its next `num_tokens`, as features let them be cut."""
        cut = self._floor(num_tokens)
        for pieces in self._pieces:
            cut = pieces.border(request, cut)
        return cut

    def _wait_for_encoder(self, extend: int) -> AddResult:
        self.shortage = Shortage(Lack.ENCODER, extend, 0)
        return AddResult.PASSED_OVER

    def _pages_of(self, num_tokens: int) -> int:
        """Tokens that the pages for `num_tokens` have room for."""
        return num_pages_for(num_tokens, self._page_size) * self._page_size

    def _floor(self, num_tokens: int) -> int:
        return num_tokens // self._page_size * self._page_size

    @staticmethod
    def _expected_new(request: Request) -> int:
        return min(request.max_len - request.fill_len, CLIP_MAX_NEW_TOKENS)


class PrefixSharing:
    """Keeps requests of one batch from computing the same new prefix twice (in-batch prefix
    caching). One object for each pass.

    Two requests would do that if their cached prefixes end at the same node and the tokens after
    it begin alike. The first goes; the others wait for the next pass, in which they find its
    prefix in the cache.
    """

    MIN_SHARED = 32  # tokens that must be alike for the wait to pay
    # A pass ends after as many, or it would look at every member of a large family.
    MAX_DEFERRED = 64

    def __init__(self, kv: KvMemory) -> None:
        cache = kv.cache
        self._shares = cache.shares
        self._span = max(self.MIN_SHARED, cache.page_size) * TOKEN_BYTES
        self._heads: set[Head] = set()
        self.num_deferred = 0

    def defers(self, request: Request) -> bool:
        """Whether a picked request computes the beginning of what this one lacks."""
        # Before the first is picked there is nothing to wait for.
        if not self._heads or self._head(request, request.reusable_len) not in self._heads:
            return False
        self.num_deferred += 1
        return True

    def picked(self, request: Request) -> None:
        if not self._shares or not request.message.shares_kv:
            return
        head = self._head(request, request.fill_len)
        if len(head.tokens) == self._span:
            self._heads.add(head)

    def _head(self, request: Request, length: int) -> Head:
        """Where the cached prefix ends, and what comes after it of the first `length` tokens."""
        key = request.cache_key(request.packed)
        start = request.prefix.length * TOKEN_BYTES
        end = min(start + self._span, length * TOKEN_BYTES)
        return Head(key.namespace, request.prefix.handle, key.tokens[start:end])


class CopySharing(PrefixSharing):
    """For memory that can resume a prefix only where a copy of a state was left: a request waits
    for the prefix of another one only if that one will leave a copy in the part that both have in
    common."""

    def __init__(self, kv: KvMemory) -> None:
        super().__init__(kv)
        self._kv = kv
        # of picked requests, up to their next copy
        self._beginnings: list[tuple[str, bytes]] = []

    def defers(self, request: Request) -> bool:
        namespace, tokens = request.cache_key(request.packed)
        # The last token is computed even if it is cached.
        reusable = tokens[: request.reusable_len * TOKEN_BYTES]
        found = request.prefix.length * TOKEN_BYTES
        for other_namespace, beginning in self._beginnings:
            if len(beginning) <= found or other_namespace != namespace:
                continue
            if reusable.startswith(beginning):
                self.num_deferred += 1
                return True
        return False

    def picked(self, request: Request) -> None:
        if not self._shares or not request.message.shares_kv:
            return
        namespace, tokens = request.cache_key(request.packed)
        length = self._kv.prefixes.next_copy(request)
        if length > request.kv_len:
            self._beginnings.append((namespace, tokens[: length * TOKEN_BYTES]))


def new_sharing(kv: KvMemory) -> PrefixSharing:
    """The sharing of a pass, by what this memory can resume."""
    if kv.prefixes.resumes_everywhere:
        return PrefixSharing(kv)
    return CopySharing(kv)
