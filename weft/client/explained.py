"""Explanations of requests from one engine or several, with the front's part of their times: of a
request whose prompt another engine had computed, the cause is that it was sent to the wrong one.

The engines are asked one after the other: first the one that had the request, then all for its
prompt. Only the front knows that there are several.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from msgspec.structs import replace

from weft.client.front_times import Fronts, on_this_clock, with_front
from weft.messages.calls import ControlReply, ControlRequest
from weft.messages.control import (
    CacheCause,
    ExplainRequest,
    Explanation,
    FindPrefix,
    FindPrefixReply,
    PrefixHolder,
)

OTHER_ENGINE = "other engine"
# Causes that would be the same on any engine.
ON_ANY_ENGINE = frozenset({"found", "cache off", "not shared", "recomputed"})
ADVICE = "--load-balance-method cache_aware sends prompts where they are cached"

R = TypeVar("R", bound=ControlReply)


class CallsEngines(Protocol):
    @property
    def engines(self) -> Sequence[object]: ...

    @property
    def fronts(self) -> Fronts: ...

    def call(self, request: ControlRequest[R], timeout_s: float = ...) -> Awaitable[R]: ...


async def explained(
    client: CallsEngines, rid: str, *, number: int = -1, viewer: str | None = None
) -> list[Explanation]:
    """The explanations of `ExplainRequest`. Raises as `EngineClient.call`."""
    has_others = len(client.engines) > 1
    asked = ExplainRequest(rid, number=number, viewer=viewer, with_prompt=has_others)
    asked_s = time.perf_counter()
    found = (await client.call(asked)).found
    came_s = time.perf_counter()
    if has_others:
        found = [await _with_others(client.call, one, viewer) for one in found]
    explained: list[Explanation] = []
    for one in found:
        front = client.fronts.get(one.id)
        if front is not None:
            one = with_front(on_this_clock(one, asked_s, came_s), front, came_s)
        explained.append(one)
    return explained


async def _with_others(
    call: Callable[[FindPrefix], Awaitable[FindPrefixReply]],
    one: Explanation,
    viewer: str | None,
) -> Explanation:
    """An explanation, whose cause may be another engine; its prompt is not needed any more."""
    cause = one.cache_cause
    asked = FindPrefix(
        namespace=one.namespace, prompt=one.prompt, before_s=one.admitted_s, viewer=viewer
    )
    one = replace(one, prompt=b"", namespace="")
    if cause is None or cause.cause in ON_ANY_ENGINE or not asked.prompt:
        return one
    holders = (await call(asked)).found
    others = [holder for holder in holders if holder.dp_rank != one.dp_rank]
    if not others:
        return one
    best = max(others, key=_usable_tokens)
    missed = best.usable_tokens - one.cached_tokens
    if missed <= cause.missed_tokens:
        return one
    return replace(one, cache_cause=_elsewhere(one, cause, best, missed))


def _elsewhere(one: Explanation, cause: CacheCause, best: PrefixHolder, missed: int) -> CacheCause:
    missed_s = None
    if one.stages.decode_s is not None and one.stages.prefill_s is not None:
        missed_s = one.stages.prefill_s * missed / (one.prompt_tokens - one.cached_tokens)
    whose = f"request {best.rid!r}" if best.rid else "another request"
    return replace(
        cause,
        cause=OTHER_ENGINE,
        rid=best.rid,
        same_tokens=best.same_tokens,
        changed_tokens=0,
        replaced_tokens=0,
        missed_tokens=missed,
        missed_s=missed_s,
        ours=[],
        theirs=[],
        words=(
            f"engine {best.dp_rank} had computed its first {best.same_tokens:,} tokens for "
            f"{whose}, and it was sent to engine {one.dp_rank}"
        ),
        advice=ADVICE,
    )


def _usable_tokens(holder: PrefixHolder) -> int:
    return holder.usable_tokens
