"""Faults that are planted into a server, which the soak run has to notice."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from tests.soak import behaviour
from tests.soak.behaviour import Behaviour
from tests.soak.driver import soak_planted
from tests.soak.phases import Phase

SECONDS = 1.0  # of arrivals


class Planted(NamedTuple):
    """How a plant does wrong, and what tells."""

    every: int  # every how many calls it does wrong
    who: Behaviour  # of the behaviours of the run that which tells
    rate: float  # how often it comes
    told: str  # what a fault of the run says of it: anything else is a fault of the plant


PLANTED = {
    "piece_behind_the_next": Planted(20, behaviour.ask, 8, " said "),
    "tokens_exchanged": Planted(50, behaviour.ask, 8, " said "),
    "pages_exchanged": Planted(4, behaviour.greedy, 8, "greedy text"),
    "token_changed_by_retraction": Planted(1, behaviour.ask_for_much, 10, " said "),
    "token_lost_by_retraction": Planted(1, behaviour.ask_for_much, 10, " said "),
    "leaving_not_told": Planted(2, behaviour.leave_for_good, 2, "generated to its end"),
    "salt_ignored": Planted(2, behaviour.salted, 4, "another salt's prompt"),
    "page_leaked": Planted(400, behaviour.ask, 8, "audit after"),
}


def is_noticed(plant: str) -> bool:
    every, who, rate, told = PLANTED[plant]
    phase = Phase(plant, {who: 1.0}, rate, frozenset({"503"}))
    report = asyncio.run(soak_planted(plant, every, phase, seconds=SECONDS))
    return any(told in fault for fault in report.faults)


def try_all() -> list[str]:
    """Those that are not noticed; prints a line for each."""
    lived = []
    for plant in PLANTED:
        noticed = is_noticed(plant)
        print(f"{plant}: {'noticed' if noticed else 'NOT NOTICED'}", flush=True)
        if not noticed:
            lived.append(plant)
    return lived
