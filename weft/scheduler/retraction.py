"""Which running requests give their memory back: when it runs out (retraction), and when a waiting
request is far above them (preemption).

A retracted request keeps its output, and what it has computed stays in the prefix cache. Only what
the others then take of it is lost, from its end; the rest is a hit when it resumes. So a victim
costs what is taken (and one prefill step), and it helps by what no other request shares with it.
The cheapest gives all that is missing at once; a request that was hit before counts as dearer;
among equals it is the one that has least to lose, then the one that came last.

Against thrashing: a request that resumes is admitted the more carefully the more often it was
retracted, until all that run are promised all that they may generate (`admission.careful_ratio`).

These functions choose; `Scheduler.retract` does it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from weft.arrays import IntArray
from weft.scheduler.admission import RETRACT_DECODE_STEPS, PrefillAdder, expected_tokens
from weft.scheduler.kv import KvMemory
from weft.scheduler.request import Request

RESUME_COST = 32  # of a victim, in tokens, besides those that it must compute again: a prefill step

Rank = Callable[[Request], int]  # requests of a higher one are retracted before those of a lower


def retract_until_fits(
    kv: KvMemory, rows: IntArray, rank: Rank, retract: Callable[[Request], None]
) -> IntArray:
    """Retract at least one of the decoding `rows`, until the others have room for a while.

    Returns the others. The last one is kept, also without room.
    """
    kept = rows
    while len(kept) > 1:
        missing = kv.lacking(kept, RETRACT_DECODE_STEPS)
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
) -> list[Request]:
    """The lowest and cheapest of `below`, as many as `first` needs to come in.

    None if all of them are not enough: no request loses its place in vain. `adder` has the
    budgets of a pass in which nothing decodes.
    """
    kv.match(first)
    kv.lock(first)  # its prefix cannot be evicted for it
    lacking = adder.lacking(first)
    kv.unlock(first)
    victims: list[Request] = []
    rest = list(below)
    while lacking >= 0 or kv.rows.num_used - len(victims) >= kv.rows.limit:
        if not rest:
            return []
        missing = max(int(lacking), kv.page_size)
        victim = cheapest(rest, kv, missing, rank)
        rest.remove(victim)
        victims.append(victim)
        # It frees what it has, and what was kept for its output.
        row = np.array([victim.row], dtype=np.int32)
        lacking -= kv.freed_tokens(victim)
        lacking -= expected_tokens(kv.columns, row, ratio)
    return victims


def cheapest(requests: Iterable[Request], kv: KvMemory, missing: int, rank: Rank) -> Request:
    """The request to retract if `missing` tokens are needed."""

    def key(request: Request) -> tuple[int, float, int, int]:
        freed = kv.freed_tokens(request)
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
