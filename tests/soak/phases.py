"""The phases of a run: who comes how often, and what may then happen to others."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tests.soak import attacks, behaviour, conversations, publishers
from tests.soak.behaviour import Behaviour

Fault = Literal["", "stop", "kill"]


@dataclass(frozen=True)
class Phase:
    name: str
    mix: Mapping[Behaviour, float]  # how often each is chosen, against the others
    rate: float  # arrivals a second
    may: frozenset[str] = frozenset()  # what may happen to any request
    fault: Fault = ""  # what is done to the engine meanwhile


MIXED: Mapping[Behaviour, float] = {
    behaviour.ask: 8,
    behaviour.leave: 3,
    behaviour.leave_for_good: 1,
    behaviour.salted: 1,
    behaviour.abort_one: 2,
    behaviour.greedy: 2,
    behaviour.session: 1,
    behaviour.malformed: 2,
    behaviour.too_long: 0.5,
    behaviour.look: 2,
    behaviour.read_slowly: 0.5,
}

PHASES = (
    Phase("mixed", MIXED, 8),
    Phase(
        "bursts",
        {behaviour.burst: 3, behaviour.ask: 1, behaviour.greedy: 1, behaviour.look: 1},
        1,
        frozenset({"503"}),
    ),
    Phase(
        "pressure",
        {behaviour.ask_for_much: 4, behaviour.greedy: 1, behaviour.leave: 1},
        8,
        frozenset({"503"}),
    ),
    Phase(
        "aborts",
        {
            behaviour.leave: 6,
            behaviour.leave_for_good: 2,
            behaviour.abort_one: 6,
            behaviour.abort_all: 0.5,
            behaviour.read_slowly: 1,
        },
        12,
        frozenset({"abort"}),
    ),
    Phase(
        "attacks",
        {
            attacks.extreme_number: 4,
            attacks.costly: 1,
            attacks.page_of_another_origin: 1,
            attacks.flood: 1,
            attacks.drip: 1,
            attacks.half_close: 1,
            attacks.number_in_a_query: 1,
            behaviour.malformed: 1,
            behaviour.ask: 4,
            behaviour.greedy: 2,
        },
        8,
        frozenset({"503"}),
    ),
    Phase(
        "conversations",
        {
            conversations.round_trip: 4,
            conversations.half_pairs: 1,
            conversations.schema: 3,
            conversations.lender: 1,
            publishers.adapter: 2,
            publishers.hostile_picture: 0.3,  # of a model that takes none
            behaviour.ask: 2,
            behaviour.greedy: 2,
        },
        5,
        frozenset({"503"}),
    ),
    Phase("sessions", {behaviour.session: 4, behaviour.ask: 1, behaviour.flush: 0.3}, 4),
    Phase(
        "administration",
        {
            **MIXED,
            behaviour.update_weights: 1,
            behaviour.flush: 1,
            behaviour.pause: 1,
            behaviour.block: 1,
            behaviour.set_policy: 1,
            behaviour.set_state: 0.5,
            behaviour.profile: 0.3,
            behaviour.release_memory: 0.5,
        },
        6,
        frozenset({"abort", "503"}),
    ),
    Phase("stops", MIXED, 4, frozenset({"abort", "503"}), "stop"),
)
# On a server with a model that takes pictures.
PICTURES = Phase(
    "pictures",
    {
        publishers.hostile_picture: 3,
        publishers.picture: 2,
        publishers.leave_a_picture: 2,
        behaviour.ask: 4,
        behaviour.greedy: 3,
    },
    5,
    frozenset({"503"}),
)
KILL = Phase("kill", {behaviour.ask: 3, behaviour.leave: 1, behaviour.session: 1}, 10, fault="kill")


@dataclass(frozen=True)
class Arrival:
    at_s: float  # after the begin of the phase
    who: Behaviour
    seed: int


def arrivals(phase: Phase, seconds: float, seed: str) -> list[Arrival]:
    """Who comes when, and with which random numbers: the same for the same seed."""
    rng = random.Random(seed)
    found = []
    at_s = rng.expovariate(phase.rate)
    while at_s < seconds:
        (who,) = rng.choices(list(phase.mix), list(phase.mix.values()))
        found.append(Arrival(at_s, who, rng.getrandbits(32)))
        at_s += rng.expovariate(phase.rate)
    return found
