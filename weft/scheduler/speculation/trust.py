"""How many drafts are worth their cost, from the results of earlier ones and the cost of a token.

A draft is worth its cost if the chance that it and all drafts before it are right is larger than
the number of tokens that could be computed in its time. So there are few drafts where many requests
decode, and none where they turn out wrong; sometimes more are tried, because old results fade.

This module uses plain Python floats, so that a replay on another machine computes the same numbers.
"""

from __future__ import annotations

import math

from weft.scheduler.pace.step_cost import CostModel, StepLoad

# The weight of earlier results falls by this factor after each result.
FORGET = 0.9  # of a request
FORGET_SOURCE = 0.98
# And by this factor after each step in which the source was not used because it was not worth it.
FADE = 0.99
FADE_SOURCE = 0.998
WEIGHT = 1.0  # of the prior of the source, as a number of drafts of the request
# The same of a model or a head: how often it is right depends less on the text, and guesses pay
# although most of them are wrong. So chance must not make a request give it up.
WEIGHT_OF_MODEL = 12.0
WEIGHT_SOURCE = 4.0
WEIGHT_SOURCE_OF_MODEL = 8.0
FORGET_OF_MODEL = 0.97
FORGET_SOURCE_OF_MODEL = 0.99
# A trial says more than what was given up for: the weight of that falls by this factor.
DOUBT = 0.8


class HitRate:
    """The fraction of a source's drafts that were right, among those after right drafts."""

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
    """The least chance of a draft after `length` tokens to be worth its cost, in a step of
    `num_rows` rows with this load without drafts."""
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
