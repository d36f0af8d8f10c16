"""Joins the replies of several engines to one control request into one reply.

    success     if one engine failed, the reply is the first failure, with the engine's rank; but a
                pin is on one engine, so `Unpin` fails only if all engines fail
    lists       concatenated
    numbers     their sum, if they count something of each engine
    the rest    the first engine's, because it is the same in all engines

A type of reply without a joiner in this module: the first failure, else the first engine's reply.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
from typing import (
    Any,
    TypeVar,
    cast,
)

from msgspec.structs import replace

from weft.json_types import JsonObject
from weft.messages.adapters import AdapterReply
from weft.messages.cache import (
    ClearCacheReply,
    ForgetPrefixReply,
    GetCacheReply,
    SaveCacheReply,
)
from weft.messages.calls import (
    CallFailed,
    ControlReply,
    SuccessReply,
)
from weft.messages.control import (
    AbortRequestReply,
    AuditReply,
    ExpertDistributionReply,
    ExplainRequestReply,
    FindPrefixReply,
    FreezeGCReply,
    GenerationReply,
    GetInternalStateReply,
    GetStateReply,
    InputReply,
    ListRequestsReply,
    LogRequestTimesReply,
    QueueStatus,
    StartProfileReply,
    StopProfileReply,
)
from weft.messages.outside import CallOutsideReply
from weft.messages.picture import Picture
from weft.messages.pins import UnpinReply
from weft.messages.sessions import KeepSessionsReply
from weft.messages.status import (
    EngineReady,
    Stats,
)
from weft.messages.weights import WeightsReply

R = TypeVar("R")
Replies = Sequence[Any]  # of one type, in the order of the engines

# Numbers in `Stats` that must not be added up: fractions, and numbers equal in all engines.
_NO_SUMS = {
    "new_token_ratio",
    "batch_is_full",
    "adapter_slots",
    "num_adapters",
}


def join(replies: Mapping[int, ControlReply]) -> ControlReply:
    """Join the replies of several engines, given by rank. There must be at least one."""
    in_order = [_with_rank(replies[rank], rank) for rank in sorted(replies)]
    for rank in sorted(replies):
        reply = replies[rank]
        if isinstance(reply, CallFailed):
            return replace(reply, message=f"engine {rank}: {reply.message}")
    first = in_order[0]
    if len(in_order) == 1:
        return first
    if isinstance(first, UnpinReply):
        return _unpinned(in_order)
    for rank in sorted(replies):
        reply = replies[rank]
        if isinstance(reply, SuccessReply) and not reply.success:
            failed = replace(reply, message=f"engine {rank}: {reply.message}")
            if isinstance(reply, AdapterReply):
                # The adapters that other engines evicted for this one are gone all the same.
                failed = replace(failed, evicted=list(dict.fromkeys(_all_of(in_order, "evicted"))))
            return failed
    joiner = JOINERS.get(type(first))
    return first if joiner is None else joiner(in_order)


def has_failed(reply: ControlReply) -> bool:
    """Whether an engine has not carried out the request."""
    if isinstance(reply, SuccessReply):
        return not reply.success
    if isinstance(reply, CallOutsideReply):
        return bool(reply.wrong)
    return isinstance(reply, CallFailed)


def _with_rank(reply: ControlReply, rank: int) -> ControlReply:
    """The reply of an engine, with its rank in each of its requests, and before its texts."""
    if isinstance(reply, ListRequestsReply):
        rows = [replace(row, dp_rank=rank) for row in reply.requests]
        return replace(reply, requests=rows)
    if isinstance(reply, ExplainRequestReply):
        found = [replace(one, dp_rank=rank) for one in reply.found]
        return replace(reply, found=found)
    if isinstance(reply, FindPrefixReply):
        return replace(reply, found=[replace(one, dp_rank=rank) for one in reply.found])
    if isinstance(reply, AuditReply):
        faults = [f"engine {rank}: {fault}" for fault in reply.faults]
        return replace(reply, faults=faults)
    if isinstance(reply, StopProfileReply) and reply.table:
        return replace(reply, table=f"engine {rank}: {reply.table}")
    return reply


def join_stats(found: Sequence[Stats]) -> Stats:
    """The `Stats` of all engines together."""
    totals: JsonObject = {}
    for name in Stats.__struct_fields__:
        if name not in _NO_SUMS:
            totals[name] = sum(getattr(one, name) for one in found)
    return replace(
        found[0],
        **totals,
        new_token_ratio=sum(one.new_token_ratio for one in found) / len(found),
        batch_is_full=all(one.batch_is_full for one in found),
    )


def join_ready(found: Sequence[EngineReady]) -> EngineReady:
    """The limits that hold for a request on any of the engines: the minimum of all."""
    return replace(
        found[0],
        max_prompt_tokens=min(one.max_prompt_tokens for one in found),
        kv_tokens=min(one.kv_tokens for one in found),
        max_running_requests=min(one.max_running_requests for one in found),
        step_tokens=min(one.step_tokens for one in found),
    )


def _summed(*names: str) -> Callable[[Replies], ControlReply]:
    """A joiner that adds up these fields."""

    def joiner(replies: Replies) -> ControlReply:
        totals = {name: sum(getattr(reply, name) for reply in replies) for name in names}
        joined: ControlReply = replace(replies[0], **totals)
        return joined

    return joiner


def _all_of(
    replies: Replies,
    name: str,
) -> list[Any]:
    return [one for reply in replies for one in getattr(reply, name)]


def _outside(replies: Replies) -> CallOutsideReply:
    found: CallOutsideReply = next(filter(has_failed, replies), replies[0])
    return found


def _requests(replies: Replies) -> ListRequestsReply:
    queues = [reply.queue for reply in replies]
    return ListRequestsReply(
        call=replies[0].call,
        queue=_queue(queues),
        requests=_all_of(replies, "requests"),
    )


def _queue(queues: Sequence[QueueStatus]) -> QueueStatus:
    totals: JsonObject = {}
    for name in QueueStatus.__struct_fields__:
        if type(getattr(queues[0], name)) is int:
            totals[name] = sum(getattr(queue, name) for queue in queues)
    open_prompts = [queue.chunked_rid for queue in queues if queue.chunked_rid is not None]
    blocked = [queue.input_state for queue in queues if queue.input_state != "unblocked"]
    paused = [queue.paused for queue in queues if queue.paused]
    return replace(
        queues[0],
        **totals,
        batch_is_full=all(queue.batch_is_full for queue in queues),
        chunked_rid=open_prompts[0] if open_prompts else None,
        input_state=blocked[0] if blocked else "unblocked",
        ramp_left_s=max(queue.ramp_left_s for queue in queues),
        paused=paused[0] if paused else "",
    )


def _audit(replies: Replies) -> AuditReply:
    numbers = ("num_pages", "free", "cached", "held", "rows", "quarantined", "total_faults")
    totals = {name: sum(getattr(reply, name) for reply in replies) for name in numbers}
    return AuditReply(
        call=replies[0].call,
        faults=_all_of(replies, "faults"),
        **totals,
    )


def _explanations(replies: Replies) -> ExplainRequestReply:
    return ExplainRequestReply(
        call=replies[0].call,
        found=_all_of(replies, "found"),
    )


def _holders(replies: Replies) -> FindPrefixReply:
    return FindPrefixReply(
        call=replies[0].call,
        found=_all_of(replies, "found"),
    )


def _state(replies: Replies) -> GetStateReply:
    stats = join_stats([reply.stats for reply in replies])
    return GetStateReply(
        call=replies[0].call,
        stats=stats,
    )


def _internal_state(replies: Replies) -> GetInternalStateReply:
    stats = join_stats([reply.stats for reply in replies])
    return cast(GetInternalStateReply, replace(replies[0], stats=stats))


def _profile_begins(replies: Replies) -> StartProfileReply:
    traces = [reply.trace for reply in replies if reply.trace]
    return cast(StartProfileReply, replace(replies[0], trace=", ".join(traces)))


def _profile_ends(replies: Replies) -> StopProfileReply:
    """The state is that of the engine with the least progress."""
    order = ("failed", "none", "writing", "done")
    last = min(replies, key=lambda reply: order.index(reply.state))
    traces = [reply.trace for reply in replies if reply.trace]
    return cast(
        StopProfileReply,
        replace(
            last,
            num_steps=sum(reply.num_steps for reply in replies),
            trace=", ".join(traces),
            table="\n".join(reply.table for reply in replies if reply.table),
        ),
    )


def _experts(replies: Replies) -> ExpertDistributionReply:
    def total(name: str) -> list[list[int]]:
        tables = [getattr(reply, name) for reply in replies]
        return [
            [sum(counts) for counts in zip(*rows, strict=True)]
            for rows in zip(*tables, strict=True)
        ]

    files = [reply.file for reply in replies if reply.file]
    return cast(
        ExpertDistributionReply,
        replace(
            replies[0],
            prefill=total("prefill"),
            decode=total("decode"),
            file=", ".join(files),
            is_recording=any(reply.is_recording for reply in replies),
        ),
    )


def _adapters(replies: Replies) -> AdapterReply:
    """An adapter that any engine evicted counts as evicted."""
    evicted = dict.fromkeys(_all_of(replies, "evicted"))
    num_requests = sum(reply.num_requests for reply in replies)
    return cast(
        AdapterReply,
        replace(
            replies[0],
            evicted=list(evicted),
            num_requests=num_requests,
        ),
    )


def _cache(replies: Replies) -> GetCacheReply:
    """The engines share one folder, so its contents are counted once."""
    own = (
        *("kv_tokens", "cached_tokens", "prompt_tokens", "memory_hit_tokens", "disk_hit_tokens"),
        *("read_bytes", "written_bytes", "dropped_blocks", "faults"),
        *("reading", "writing", "waiting_requests"),
        *("host_hit_tokens", "host_blocks", "host_bytes", "max_host_bytes"),
        *("host_read_bytes", "host_written_bytes", "host_dropped_blocks"),
        *("pinned_tokens", "max_pinned_tokens"),
    )
    totals = {name: sum(getattr(reply, name) for reply in replies) for name in own}
    closed = [reply.disk for reply in replies if reply.disk != "open"]
    return cast(
        GetCacheReply,
        replace(
            replies[0],
            **totals,
            disk=closed[0] if closed else replies[0].disk,
            disk_blocks=max(reply.disk_blocks for reply in replies),
            disk_bytes=max(reply.disk_bytes for reply in replies),
            pins=_all_of(replies, "pins"),
        ),
    )


def _forgotten(replies: Replies) -> ForgetPrefixReply:
    stored = [reply.stored for reply in replies if reply.stored]
    return ForgetPrefixReply(
        call=replies[0].call,
        tokens=sum(reply.tokens for reply in replies),
        left=max(reply.left for reply in replies),
        stored=stored[0] if stored else "",
    )


def _unpinned(replies: Replies) -> UnpinReply:
    num_tokens = sum(reply.tokens for reply in replies)
    found = max(replies, key=lambda reply: reply.success)
    return cast(UnpinReply, replace(found, tokens=num_tokens))


def _pictures(replies: Replies) -> Picture:
    return cast(Picture, replace(replies[0], others=list(replies[1:])))


def _kept_sessions(replies: Replies) -> ControlReply:
    return KeepSessionsReply(call=replies[0].call, refused=_all_of(replies, "refused"))


JOINERS: dict[type[ControlReply], Callable[[Replies], ControlReply]] = {
    KeepSessionsReply: _kept_sessions,
    AbortRequestReply: _summed("aborted"),
    AdapterReply: _adapters,
    AuditReply: _audit,
    CallOutsideReply: _outside,
    ClearCacheReply: _summed("dropped_blocks"),
    ExpertDistributionReply: _experts,
    ExplainRequestReply: _explanations,
    FindPrefixReply: _holders,
    ForgetPrefixReply: _forgotten,
    FreezeGCReply: _summed("frozen_objects"),
    GenerationReply: _summed("num_requests"),
    GetCacheReply: _cache,
    GetInternalStateReply: _internal_state,
    GetStateReply: _state,
    InputReply: _summed("held_requests"),
    ListRequestsReply: _requests,
    LogRequestTimesReply: _summed("num_requests"),
    Picture: _pictures,
    SaveCacheReply: _summed("written_bytes"),
    StartProfileReply: _profile_begins,
    StopProfileReply: _profile_ends,
    WeightsReply: _summed("num_paused_requests"),
}
