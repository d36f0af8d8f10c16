"""Retraction: which running requests give back their memory when it runs out, or when a waiting
request has a far higher priority (preemption).

A retracted request keeps its output, and its computed tokens stay in the prefix cache. Only the
tokens that other requests then evict are lost, from the end; the rest is a hit when the request
resumes. So the cost of a victim is the tokens taken from it (and one prefill step), and its gain is
the memory that it shares with no other request. The best victim frees all that is missing at once.
A request that was retracted before costs more. Among equal ones, the victim is the request that
frees least, then the one that arrived last.

To prevent thrashing, a request that resumes needs the more free memory the more often it was
retracted, until all running requests are promised memory for their whole output
(`admission.careful_ratio`).

These functions choose the victims; `Scheduler.retract` retracts them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from weft.arrays import IntArray
from weft.scheduler.admission import RETRACT_DECODE_STEPS, PrefillAdder, expected_tokens
from weft.scheduler.kv import KvMemory
from weft.scheduler.request import Request

# Cost of a victim, in tokens, besides the tokens that it must compute again: a prefill step.
RESUME_COST = 32

# requests of a higher rank are retracted before those of a lower one
Rank = Callable[[Request], int]


def retract_until_fits(
    kv: KvMemory, rows: IntArray, rank: Rank, retract: Callable[[Request], None]
) -> IntArray:
    """Retract at least one of the decoding `rows`, until the others have room for some steps.

    Returns the other rows. The last one is kept, even without room.
    """
    kept = rows
    while len(kept) > 1:
        missing = kv.room.lacking(kept, RETRACT_DECODE_STEPS)
        if missing <= 0 and len(kept) < len(rows):
            break
        requests = kv.columns.requests[kept]
        victim = cheapest(requests, kv, max(missing, kv.page_size), rank)
        kept = kept[kept != victim.row]
        retract(victim)
    return kept


def victims_for(
    first: Request,
    below: Iterable[Request],
    kv: KvMemory,
    adder: PrefillAdder,
    ratio: float,
    rank: Rank,
) -> list[Request] | None:
    """The requests of `below`, of lowest class and then of lowest cost, that must be retracted to
    admit `first`; an empty list if it can be admitted as it is.

    None if all of them are not enough, so that no request is retracted in vain. `adder` has the
    budgets of a pass without decoding rows.
    """
    kv.prefixes.match(first)
    kv.prefixes.lock(first)  # so that its own prefix is not evicted for it
    lacking = adder.lacking(first)
    kv.prefixes.unlock(first)
    victims: list[Request] = []
    rest = list(below)
    while lacking >= 0 or kv.rows.num_used - len(victims) >= kv.rows.limit:
        if not rest:
            return None
        missing = max(int(lacking), kv.page_size)
        victim = cheapest(rest, kv, missing, rank)
        rest.remove(victim)
        victims.append(victim)
        # It frees its memory, and the memory that was reserved for its output.
        row = np.array([victim.row], dtype=np.int32)
        lacking -= kv.room.freed_tokens(victim)
        lacking -= expected_tokens(kv.columns, row, ratio)
    return victims


def cheapest(requests: Iterable[Request], kv: KvMemory, missing: int, rank: Rank) -> Request:
    """The request to retract if `missing` tokens are needed."""

    def key(request: Request) -> tuple[int, float, int, int]:
        freed = kv.room.freed_tokens(request)
        cost = _cost(kv, request, min(freed, missing))
        came_last = -request.spec.arrival_order
        return -rank(request), cost, freed, came_last

    return min(requests, key=key)


def _cost(kv: KvMemory, request: Request, gained: int) -> float:
    """Tokens lost per token gained."""
    if not gained:
        return math.inf
    num_computed = int(kv.columns.kv_len[request.row])
    partial_page = num_computed % kv.page_size  # cannot stay in the cache
    lost = gained + partial_page + RESUME_COST
    return lost / gained * (1 + request.retractions)
