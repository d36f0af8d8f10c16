"""Why a prompt was not in the cache, as far as it was not: the remembered request whose sequence is
most like it, the token at which they part, what is different there, and what that has cost.

All comes from the history and is computed when it is asked for. Nothing is compared while requests
run, so requests pay nothing for it.

    earlier   ████████████ date 1 ████████████████████
    this one  ████████████ date 2 ████████████████████ new question
              └─ cached ──┘       └─ missed: the same, behind a change ─┘
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from weft.arrays import IntArray
from weft.config.numbers import counted
from weft.memory.prefix_cache import TOKEN_BYTES, CacheKey, find_tokens, shared_len
from weft.messages.control import CacheCause, PrefixHolder
from weft.scheduler.history import RequestTrace
from weft.scheduler.request import NO_ROW, Request
from weft.scheduler.scheduler import Scheduler
from weft.scheduler.times import NEVER

RUN_LEN = 16  # tokens that are the same again, so that it is no accident
NUM_SHOWN = 24  # tokens of both sequences, from the one on at which they part
MAX_RUNS_LEN = 65_536  # tokens after the first different one that are looked at for runs
MAX_SPAN = 2_048  # tokens after the first different one in which a change may end


class Cause(StrEnum):
    FOUND = "found"
    CACHE_OFF = "cache off"
    NOT_SHARED = "not shared"
    RECOMPUTED = "recomputed"
    FIRST_SEEN = "first seen"
    CONTINUED = "continued"
    NEW_TEXT = "new text"
    OTHER_NAMESPACE = "other namespace"
    OTHER_MEDIA = "other media"
    CHANGED = "changed"
    INSERTED = "inserted"
    DROPPED = "dropped"
    REORDERED = "reordered"
    EMPTIED = "emptied"
    COMPUTING = "being computed"
    NO_RESUME_POINT = "no resume point"
    EVICTED = "evicted"
    OTHER_ENGINE = "other engine"  # found by the front, which asks the other engines


# Every cause, and what one can do about it; docs/guides/why-slow.md explains them.
ADVICE = {
    Cause.FOUND: "",
    Cause.CACHE_OFF: "start weft without --no-prefix-cache",
    Cause.NOT_SHARED: "",
    Cause.RECOMPUTED: "ask for log probabilities of the prompt only where they are needed",
    Cause.FIRST_SEEN: "",
    Cause.CONTINUED: "",
    Cause.NEW_TEXT: "",
    Cause.OTHER_NAMESPACE: "use the same cache_salt and adapter for prompts that may share",
    Cause.OTHER_MEDIA: "put what is always the same before pictures, videos and sounds",
    Cause.CHANGED: "move what changes, such as a date or a counter, behind what stays the same",
    Cause.INSERTED: "put new text at the end of the prompt",
    Cause.DROPPED: "keep earlier messages as they were; some templates drop earlier reasoning",
    Cause.REORDERED: "send tools and messages always in the same order",
    Cause.EMPTIED: "",
    Cause.COMPUTING: "send such requests one after the other, or the first one a little earlier",
    Cause.NO_RESUME_POINT: "with more memory, more snapshots of states or tails of windows stay",
    Cause.OTHER_ENGINE: "",  # it depends on the router: `weft/client/explained.py`
    Cause.EVICTED: "more KV memory, --cache-dir, or a pin would have kept it",
}


class Nearest(NamedTuple):
    """An earlier request, and how many of the first tokens it has in common with this one."""

    trace: RequestTrace
    prompt: bytes  # of this request
    tokens: bytes  # of the earlier one
    num_same: int  # in pages, if the earlier request is not shown
    is_shown: bool  # its name and its text may be shown

    @property
    def name(self) -> str:
        return f"request {self.trace.rid!r}" if self.is_shown else "another request"


class Divergence(NamedTuple):
    """Where two sequences part, `ours` tokens of this one stand instead of `theirs`; then
    `num_same` tokens are the same again."""

    cause: Cause
    ours: int
    theirs: int
    num_same: int


def cause_of(
    scheduler: Scheduler, trace: RequestTrace, viewer: str | None = None
) -> CacheCause | None:
    """Why not more of a request's prompt came from the cache; None if it was not admitted yet.

    `viewer`: the tenant who asks; empty: nobody knows who. Requests of others in other namespaces
    do not exist for them, and of those in the same namespace they see how many pages both begin
    with, which the usage of their own request tells them anyway. Nothing after these pages is
    compared: a client that learns where its guess at a text of others ends, or what of it stands
    anywhere in that text, guesses the text token by token. None: an administrator.
    """
    reuse = trace.reuse
    if reuse is None:
        return None
    kv = scheduler.kv
    page_size = kv.page_size
    cached = trace.cached_tokens
    limit = reuse.reusable_len // page_size * page_size
    if not kv.cache.shares:
        off = _found(trace, Cause.CACHE_OFF)
        # Models that make vectors may have no cache without the option.
        return off if scheduler.settings.pooling is None else replace(off, advice="")
    if limit - cached < page_size and reuse.reusable_len >= trace.prompt_tokens - 1:
        return _found(trace, Cause.FOUND)
    key = _key_of(scheduler, trace)
    if not reuse.reusable_len or key is None:
        return _found(trace, Cause.NOT_SHARED)
    if limit <= cached:
        missed = (trace.prompt_tokens - 1) // page_size * page_size - cached
        return _found(trace, Cause.RECOMPUTED, missed=missed)
    prompt = key.tokens[: trace.prompt_tokens * TOKEN_BYTES]
    earlier = _earlier(scheduler, trace)
    same, other = _nearest(scheduler, earlier, key.namespace, prompt, viewer)
    num_same = 0 if same is None else same.num_same
    if other is not None and _usable(other, page_size, limit) > max(num_same, cached):
        missed = _usable(other, page_size, limit) - cached
        return _found(trace, Cause.OTHER_NAMESPACE, near=other, missed=missed)
    if same is None:
        return _found(trace, Cause.FIRST_SEEN)
    usable = _usable(same, page_size, limit)
    if usable > cached:
        return _found(trace, _why_lost(trace, same.trace), near=same, missed=usable - cached)
    if not same.is_shown:
        return _found(trace, Cause.NEW_TEXT, near=same)
    change = _change(prompt, same)
    if change.cause == Cause.NEW_TEXT and num_same < page_size:
        return _found(trace, Cause.FIRST_SEEN)
    missed = min(change.num_same, limit - cached) // page_size * page_size
    return _found(trace, change.cause, near=same, missed=missed, change=change)


def _usable(near: Nearest, page_size: int, limit: int) -> int:
    return min(near.num_same, limit) // page_size * page_size


def _found(
    trace: RequestTrace,
    cause: Cause,
    *,
    near: Nearest | None = None,
    missed: int = 0,
    change: Divergence | None = None,
) -> CacheCause:
    """`missed`: tokens that would have been cached otherwise."""
    computed = trace.prompt_tokens - trace.cached_tokens
    missed_s = None
    if trace.first_token_s != NEVER and computed:
        missed_s = trace.prefill_s * missed / computed
    return CacheCause(
        cause=cause,
        rid=near.trace.rid if near is not None and near.is_shown else "",
        same_tokens=0 if near is None else near.num_same,
        changed_tokens=0 if change is None else change.ours,
        replaced_tokens=0 if change is None else change.theirs,
        missed_tokens=missed,
        missed_s=missed_s,
        ours=[] if near is None else _ids(near.prompt, near.num_same),
        theirs=_ids(near.tokens, near.num_same) if near is not None and near.is_shown else [],
        words=_words(trace, cause, near, missed, change),
        advice=ADVICE[cause] if missed or cause == Cause.CACHE_OFF else "",
    )


def _words(
    trace: RequestTrace,
    cause: Cause,
    near: Nearest | None,
    missed: int,
    change: Divergence | None,
) -> str:
    name = "" if near is None else near.name
    num_same = 0 if near is None else near.num_same
    same = f"its first {num_same:,} tokens are those of {name}"
    if num_same == 1:
        same = f"its first token is that of {name}"
    match cause:
        case Cause.FOUND:
            return "all that could come from the cache did"
        case Cause.CACHE_OFF:
            return "the prefix cache is off"
        case Cause.NOT_SHARED:
            return "K and V of its prompt do not follow from tokens alone, so they are not shared"
        case Cause.RECOMPUTED:
            return (
                f"{counted(missed, 'token')} of its prompt were computed again, because their log "
                "probabilities or vectors were asked for"
            )
        case Cause.FIRST_SEEN:
            return "no remembered request begins like it"
        case Cause.OTHER_NAMESPACE:
            return f"{same}, which has another cache salt or adapter"
        case Cause.EMPTIED:
            return f"{same}; the cache was emptied after that"
        case Cause.COMPUTING:
            return f"{same}, which was being computed when this one was admitted"
        case Cause.NO_RESUME_POINT:
            return f"{same}; they are cached, but no state or window is kept at their end"
        case Cause.EVICTED:
            return f"{same}; they were evicted since then"
        case Cause.CONTINUED:
            return f"it continues {name}, whose {counted(num_same, 'token')} it has"
        case Cause.NEW_TEXT:
            return f"{same}; then it has other text"
    assert change is not None
    return f"{same}; then {_shown(change)}"


def _shown(change: Divergence) -> str:
    ours = counted(change.ours, "token")
    again = f"and {counted(change.num_same, 'token')} after that are the same again"
    match change.cause:
        case Cause.OTHER_MEDIA:
            return f"it has another picture, video or sound, {again}"
        case Cause.INSERTED:
            return f"it has {counted(change.ours, 'new token')}, {again}"
        case Cause.DROPPED:
            return f"it leaves out {counted(change.theirs, 'token')}, {again}"
        case Cause.REORDERED:
            return f"{counted(change.num_same, 'token')} are the same in another order"
    return f"it has {ours} instead of {counted(change.theirs, 'other')}, {again}"


# ---- the remembered requests


def prompt_of(scheduler: Scheduler, trace: RequestTrace) -> CacheKey:
    """The prompt of a request as the cache compares it; empty if it is not remembered."""
    key = _key_of(scheduler, trace)
    if key is None:
        return CacheKey("", b"")
    return key.first(trace.prompt_tokens)


def find_holder(
    scheduler: Scheduler, namespace: str, prompt: bytes, before_s: float, viewer: str | None
) -> PrefixHolder | None:
    """The remembered request that begins most like a prompt of another engine, of those that were
    admitted before `before_s`. `viewer`: as for `cause_of`."""
    earlier = [one for one in scheduler.history.traces() if NEVER < one.admitted_s < before_s]
    same, _ = _nearest(scheduler, earlier, namespace, prompt, viewer)
    if same is None:
        return None
    page_size = scheduler.kv.page_size
    usable = _usable(same, page_size, len(prompt) // TOKEN_BYTES - 1)
    rid = same.trace.rid if same.is_shown else ""
    return PrefixHolder(same_tokens=same.num_same, usable_tokens=usable, rid=rid)


def _key_of(scheduler: Scheduler, trace: RequestTrace) -> CacheKey | None:
    """The sequence of a request as the cache compares it; None if it is not remembered."""
    request = scheduler.requests.get(trace.id)
    if request is None or request.spec.arrival_order != trace.arrival_order:
        return trace.key
    if not request.message.shares_kv:
        return None
    return request.cache_key(_known(scheduler, request))


def _known(scheduler: Scheduler, request: Request) -> bytes:
    if request.row == NO_ROW:
        return request.packed
    columns = scheduler.kv.columns
    return columns.packed(request.row, int(columns.known_len[request.row]))


def _earlier(scheduler: Scheduler, trace: RequestTrace) -> Iterator[RequestTrace]:
    """Remembered requests that were admitted before this one."""
    for other in scheduler.history.traces():
        was_admitted = other.admitted_s > NEVER
        if was_admitted and _order(other) < _order(trace):
            yield other


def _order(trace: RequestTrace) -> tuple[float, int]:
    return trace.admitted_s, trace.arrival_order


def _nearest(
    scheduler: Scheduler,
    earlier: Iterable[RequestTrace],
    namespace: str,
    prompt: bytes,
    viewer: str | None,
) -> tuple[Nearest | None, Nearest | None]:
    """Of `earlier` requests, the one with most of the same first tokens in the same namespace, and
    in others. Of equal ones one that is shown, and of these the one that ended first, because its
    tokens were there for the longest time."""
    page_size = scheduler.kv.page_size
    found: dict[bool, Nearest] = {}
    ours = memoryview(prompt)  # its slices are no copies
    for other in earlier:
        key = _key_of(scheduler, other)
        if key is None:
            continue
        is_same = key.namespace == namespace
        is_shown = viewer is None or _is_of(other, viewer)
        if not is_same and not is_shown:
            continue
        best = found.get(is_same, Nearest(other, prompt, b"", 0, is_shown))
        end = best.num_same * TOKEN_BYTES
        if not key.tokens.startswith(ours[:end]):
            continue  # it has fewer tokens in common
        num_same = common_len(prompt, key.tokens)
        if not is_shown:
            num_same = num_same // page_size * page_size
        near = Nearest(other, prompt, key.tokens, num_same, is_shown)
        if num_same and _rank(near) >= _rank(best):
            found[is_same] = near
    return found.get(True), found.get(False)


def _rank(near: Nearest) -> tuple[int, bool, float]:
    return near.num_same, near.is_shown, _age(near.trace)


def _is_of(trace: RequestTrace, tenant: str) -> bool:
    """Whether a request is of this tenant; nobody's request is of no tenant."""
    return bool(tenant) and trace.reuse is not None and trace.reuse.tenant == tenant


def _age(trace: RequestTrace) -> float:
    """Larger for a request that ended earlier; an open one is the youngest."""
    return -math.inf if trace.finished_s == NEVER else -trace.finished_s


def common_len(one: bytes, other: bytes) -> int:
    """How many of the first tokens of two packed sequences are the same."""
    return shared_len(one, 0, len(one), other, TOKEN_BYTES) // TOKEN_BYTES


def _ids(tokens: bytes, begin: int) -> list[int]:
    """The first ids from `begin` on, without those that stand for media."""
    ids = np.frombuffer(tokens, dtype=np.int32)[begin : begin + NUM_SHOWN]
    return [id for id in ids.tolist() if id >= 0]


def _why_lost(trace: RequestTrace, other: RequestTrace) -> Cause:
    """Why tokens of an earlier request were not found."""
    assert trace.reuse is not None
    if other.reuse is not None and other.reuse.num_emptied != trace.reuse.num_emptied:
        return Cause.EMPTIED
    if other.finished_s == NEVER or other.finished_s > trace.admitted_s:
        return Cause.COMPUTING
    if trace.reuse.matched_len > trace.cached_tokens:
        return Cause.NO_RESUME_POINT
    return Cause.EVICTED


# ---- what is different


def _change(prompt: bytes, near: Nearest) -> Divergence:
    """What is different after the tokens that two sequences have in common."""
    start = near.num_same * TOKEN_BYTES
    ours = prompt[start:]
    theirs = near.tokens[start:]
    if not theirs:
        return Divergence(Cause.CONTINUED, 0, 0, 0)
    num_moved = _num_moved(ours, theirs)
    num_ours, num_theirs = _span(ours, theirs)
    num_again = common_len(ours[num_ours * TOKEN_BYTES :], theirs[num_theirs * TOKEN_BYTES :])
    if num_again < RUN_LEN and not num_moved:
        return Divergence(Cause.NEW_TEXT, 0, 0, 0)
    if num_again * 2 < num_moved:
        return Divergence(Cause.REORDERED, 0, 0, num_moved)
    cause = Cause.CHANGED
    if _is_media(ours) and _is_media(theirs):
        cause = Cause.OTHER_MEDIA
    elif not num_theirs:
        cause = Cause.INSERTED
    elif not num_ours:
        cause = Cause.DROPPED
    return Divergence(cause, num_ours, num_theirs, num_again)


def _is_media(tokens: bytes) -> bool:
    """Whether the first token stands for a part of a picture, a video or a sound."""
    first = int(np.frombuffer(tokens, dtype=np.int32, count=1)[0])
    return first < 0  # the cache compares digests instead of ids there


def _span(ours: bytes, theirs: bytes) -> tuple[int, int]:
    """The tokens of both sequences after which they are the same again: few, before many; all of
    them if there are no `RUN_LEN` such tokens near. Texts of tools are alike, so the first run may
    be one by accident, and a short one."""
    run = RUN_LEN * TOKEN_BYTES
    best = len(ours) // TOKEN_BYTES, len(theirs) // TOKEN_BYTES
    least = sum(best)  # tokens before, less those that are the same again
    end = MAX_SPAN * TOKEN_BYTES + run
    last = min(len(ours) - run, MAX_SPAN * TOKEN_BYTES)
    start = 0
    while start <= last:
        at = find_tokens(theirs, ours[start : start + run], end=end)
        if at < 0:
            start += TOKEN_BYTES
            continue
        num_again = common_len(ours[start:], theirs[at:])
        span = start // TOKEN_BYTES, at // TOKEN_BYTES
        if sum(span) - num_again < least:
            best = span
            least = sum(span) - num_again
        start += num_again * TOKEN_BYTES
    return best


def _num_moved(ours: bytes, theirs: bytes) -> int:
    """How many tokens of `ours` stand in `theirs` in runs of `RUN_LEN`, wherever they are. Of both,
    only the first tokens count."""
    most = MAX_RUNS_LEN * TOKEN_BYTES
    known = {run.tobytes() for run in _runs(theirs[:most])}
    own = _runs(ours[:most])[::RUN_LEN]
    return sum(RUN_LEN for run in own if run.tobytes() in known)


def _runs(tokens: bytes) -> IntArray:
    """[n, RUN_LEN]: all runs of tokens, one from each position."""
    values = np.frombuffer(tokens, dtype=np.int32)
    if len(values) < RUN_LEN:
        return np.empty((0, RUN_LEN), dtype=np.int32)
    return np.lib.stride_tricks.sliding_window_view(values, RUN_LEN)
