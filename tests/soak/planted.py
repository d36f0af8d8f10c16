"""Faults that are planted into a server, which the soak run has to notice."""

from __future__ import annotations

import asyncio

from tests.soak import behaviour
from tests.soak.behaviour import Behaviour
from tests.soak.driver import soak_planted
from tests.soak.phases import Phase

SECONDS = 1.0  # of arrivals

# plant -> every how many calls it does wrong; of the behaviours of the run that which tells, and
# how often it comes
PLANTED: dict[str, tuple[int, Behaviour, float]] = {
    "piece_behind_the_next": (20, behaviour.ask, 8),
    "tokens_exchanged": (50, behaviour.ask, 8),
    "pages_exchanged": (4, behaviour.greedy, 8),
    "token_changed_by_retraction": (1, behaviour.ask_for_much, 10),
    "token_lost_by_retraction": (1, behaviour.ask_for_much, 10),
    "leaving_not_told": (2, behaviour.leave_for_good, 2),
    "salt_ignored": (2, behaviour.salted, 4),
    "page_leaked": (400, behaviour.ask, 8),
}


def is_noticed(plant: str) -> bool:
    every, who, rate = PLANTED[plant]
    phase = Phase(plant, {who: 1.0}, rate, frozenset({"503"}))
    return bool(asyncio.run(soak_planted(plant, every, phase, seconds=SECONDS)).num_faults)


def try_all() -> list[str]:
    """Those that are not noticed; prints a line for each."""
    lived = []
    for plant in PLANTED:
        noticed = is_noticed(plant)
        print(f"{plant}: {'noticed' if noticed else 'NOT NOTICED'}", flush=True)
        if not noticed:
            lived.append(plant)
    return lived
