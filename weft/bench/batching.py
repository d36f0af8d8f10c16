"""Static against continuous batching: the same engine, the same requests, another policy.

Static batching lets nobody join a batch that decodes: all wait for its slowest request. What continuous batching gains
is a product, and the report shows its factors:

    tokens/s = rows in a decode step / seconds of a decode step * share of the time that is spent decoding

More rows do work, but a step with more rows takes longer, and new requests' prompts interrupt the decoding. With the
same requests, the rows in a step cannot grow by more than max / mean of the output lengths of a batch, on any device.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

STATIC, CONTINUOUS = "static", "fcfs"
INPUT_LEN = 64
SHORTEST, LONGEST = 100, 1_000  # output tokens

# How mixed outputs are spread between the two: evenly, or as in chats, where most answers are short and few are long.
MIXES: dict[str, Callable[[random.Random], float]] = {
    "uniform": lambda rng: rng.uniform(SHORTEST, LONGEST),
    "lognormal": lambda rng: rng.lognormvariate(math.log(150), 0.8),
}


class Scene(NamedTuple):
    """Requests that come at once. `num_rows` of them can run together."""

    name: str
    num_rows: int
    lengths: tuple[tuple[int, int], ...]  # tokens of input and output of each
    goal: float  # tokens/s of continuous batching, in those of static


class Trial(NamedTuple):
    """One run of a scene."""

    output_per_s: float  # tokens
    row_use: float  # share of the rows that decode steps use, in the mean over their time
    rows_per_step: float  # in the mean over decode steps
    decode_step_s: float
    decode_share: float  # of the whole time


class Comparison(NamedTuple):
    scene: Scene
    static: Trial
    continuous: Trial

    @property
    def ratio(self) -> float:
        return self.continuous.output_per_s / self.static.output_per_s

    @property
    def is_met(self) -> bool:
        return self.ratio >= self.scene.goal

    @property
    def why(self) -> str:
        """Where the ratio comes from."""
        static, continuous = self.static, self.continuous
        rows = continuous.rows_per_step / static.rows_per_step
        step = continuous.decode_step_s / static.decode_step_s
        share = continuous.decode_share / static.decode_share
        text = f"{rows:.2f} x the rows in a step / {step:.2f} x its time * {share:.2f} x the time spent decoding"
        if self.is_met:
            return text
        if rows < self.scene.goal:
            return f"{text}; static batching leaves too few rows idle: at equal times of a step it were {rows:.2f} x"
        return f"{text}; steps with more rows take too much longer here"


def scenes(mix: str = "uniform", scale: float = 1.0, seed: int = 0) -> list[Scene]:
    """The three scenes. `mix` is a name of MIXES; `scale` makes all outputs shorter, for slow machines."""
    rng = random.Random(seed)

    def lengths(num: int, draw: Callable[[random.Random], float]) -> tuple[tuple[int, int], ...]:
        outputs = [min(max(draw(rng), SHORTEST), LONGEST) for _ in range(num)]
        return tuple((INPUT_LEN, max(2, round(output * scale))) for output in outputs)

    return [
        Scene("uniform lengths", 16, lengths(192, lambda rng: (SHORTEST + LONGEST) / 2), 1.5),
        Scene("mixed lengths", 16, lengths(192, MIXES[mix]), 3.0),
        Scene("high concurrency", 64, lengths(768, MIXES[mix]), 2.5),
    ]


def compare(wanted: Sequence[Scene], run: Callable[[Scene, str], Trial]) -> list[Comparison]:
    """`run` plays a scene under a schedule policy."""
    return [Comparison(scene, run(scene, STATIC), run(scene, CONTINUOUS)) for scene in wanted]
