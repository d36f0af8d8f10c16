"""How many drafts are worth their cost: what has become of earlier ones, and what a token of a step
takes.

A draft is worth it while the chance that it is right, and all before it, is larger than the part of
a token that could be computed in its time. So few drafts are made where many requests decode, none
where they turn out wrong, and more are tried now and then, for what is known fades.

Plain Python floats: a replay on another machine must come to the same numbers.
"""

from __future__ import annotations

import math

from weft.scheduler.pace.step_cost import CostModel, StepLoad

# What was seen weighs so much less after each look.
FORGET = 0.9  # of a request
FORGET_SOURCE = 0.98
# And after each step in which the source was not asked, for it did not seem worth it.
FADE = 0.99
FADE_SOURCE = 0.998
WEIGHT = 1.0  # of what is expected of the source, in drafts of the request
WEIGHT_SOURCE = 4.0


class HitRate:
    """The part of a source's drafts that were right, of those behind right ones."""

    __slots__ = ("hits", "tries")

    def __init__(self) -> None:
        self.hits = 0.0
        self.tries = 0.0

    def learn(self, num_drafts: int, num_right: int, forget: float) -> None:
        """Of some drafts the first `num_right` were right, and the next one, if any, was wrong."""
        self.hits = self.hits * forget + num_right
        self.tries = self.tries * forget + min(num_drafts, num_right + 1)

    def fade(self, factor: float) -> None:
        self.hits *= factor
        self.tries *= factor

    def value(self, prior: float, weight: float) -> float:
        return (self.hits + weight * prior) / (self.tries + weight)


def least_chance(cost: CostModel, load: StepLoad, num_rows: int, length: int) -> float:
    """The chance that a draft behind `length` tokens must have to be worth it, in a step of
    `num_rows` rows that has this load without drafts."""
    draft_s = cost.token_s + cost.pair_s * length
    return draft_s * num_rows / cost.seconds(load)


def num_worthwhile(rate: float, least: float, most: int) -> int:
    """How many drafts, at most `most`, have a chance of at least `least` to be right.

    Each is right with the chance `rate` if the one before is.
    """
    if rate < least:
        return 0
    if rate >= 1.0 or least <= 0.0:
        return most
    return min(most, int(math.log(least) / math.log(rate)))
