"""A machine with a model, as it was measured: the cost of its steps, the time of its front, and how
much its speed varies. It can be written to a file, and planned for on another machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from weft.capacity.guesses import GuessModel, Text, learn_guesses
from weft.scheduler.settings import SchedulerSettings
from weft.sim.curve import CurveFit, StepCurve, fit_curve, not_negative
from weft.sim.journal import Journal
from weft.sim.run import DoubleArray
from weft.sim.speed import MachineSpeed, SpeedSpread, Stretch
from weft.sim.trace import EOS, Arrival

MAX_STRETCHES = 400
MAX_TEXTS = 512
FRONT_ROUNDS = 20
LEAST_S = 1e-6


class FrontCost(msgspec.Struct, frozen=True, kw_only=True):
    """The time of a request before it reaches the engine, and of its first token afterwards: HTTP,
    tokenizer or parser, messages, detokenizer."""

    request_s: float = 0.0
    token_s: float = 0.0  # per token of the prompt

    def seconds(self, prompt_len: DoubleArray) -> DoubleArray:
        return self.request_s + self.token_s * prompt_len


class MeasuredMachine(msgspec.Struct, frozen=True, kw_only=True):
    """One engine on one machine."""

    name: str  # of the processor
    model: str
    options: dict[str, str | int | float | bool]  # that the server was started with
    settings: SchedulerSettings  # that it ran with
    overlaps: bool  # whether it plans a step while another one runs
    curve: StepCurve
    front: FrontCost = FrontCost()
    # Speed over time: begin, end, and usual duration of the work between them, in seconds.
    stretches: tuple[tuple[float, float, float], ...] = ()
    # How often guesses of tokens are right in texts of the model; None: not known.
    guesses: GuessModel | None = None
    num_steps: int = 0  # measured ones
    median_error: float = 0.0  # of the curve, for single steps

    def speed(self, factor: float = 1.0) -> MachineSpeed:
        """Its speed at each moment, `factor` times as fast."""
        return MachineSpeed([Stretch(*one) for one in self.stretches]).times(factor)

    @property
    def spread(self) -> SpeedSpread:
        """Its slowest and fastest tenth while it was measured, relative to the mean."""
        return self.speed().spread()

    @property
    def kv_tokens(self) -> int:
        return self.settings.num_pages * self.settings.page_size


def measured_machine(
    journal: Journal,
    *,
    name: str,
    model: str,
    options: Mapping[str, str | int | float | bool],
    front: FrontCost = FrontCost(),  # noqa: B008 it is frozen
    texts: Sequence[Text] | None = None,
) -> MeasuredMachine:
    """The machine that recorded `journal`. `texts`: that tell how often guesses are right; None:
    all in the journal. Raises ValueError if it ran no steps."""
    fitted: CurveFit = fit_curve(journal.steps)
    return MeasuredMachine(
        name=name,
        model=model,
        options=dict(options),
        settings=simulated(journal.settings),
        overlaps=journal.overlaps,
        curve=fitted.curve,
        front=front,
        stretches=merged(journal.stretches(fitted.curve)),
        guesses=guesses_in(
            texts_of(journal.arrivals) if texts is None else texts, journal.settings
        ),
        num_steps=fitted.num_steps,
        median_error=fitted.median_error,
    )


def texts_of(arrivals: Sequence[Arrival]) -> list[Text]:
    """What a model wrote, and after which prompts."""
    return [
        Text(one.prompt, one.output)
        for one in arrivals
        if one.output and isinstance(one.prompt, bytes)
    ]


def guesses_in(texts: Sequence[Text], settings: SchedulerSettings) -> GuessModel | None:
    """How often guesses were right in the last texts, or would have been; None without texts."""
    if not texts:
        return None
    last = texts[-MAX_TEXTS:]
    return learn_guesses(last, longest=settings.ngram_max, shortest=settings.ngram_min)


def simulated(settings: SchedulerSettings) -> SchedulerSettings:
    """The settings of a simulated engine: it ends outputs itself, and has no device, disk or other
    server beside it."""
    return replace(
        settings,
        eos_token_ids=(EOS,),
        tiers=None,
        handoff=None,
        draft=None,
        kv_groups=(),
        outside_control=(),
        started_with=None,
    )


def merged(stretches: Sequence[Stretch]) -> tuple[tuple[float, float, float], ...]:
    """Neighbouring stretches as one, until few are left. Pauses between them disappear: nothing is
    known of the machine's speed then."""
    at_once = -(-len(stretches) // MAX_STRETCHES)
    found = []
    now = 0.0
    for first in range(0, len(stretches), at_once or 1):
        group = stretches[first : first + at_once]
        took_s = 0.0
        usual_s = 0.0
        for one in group:
            took_s += one.ended_s - one.began_s
            usual_s += one.usual_s
        ended_s = now + took_s
        found.append((now, ended_s, usual_s))
        now = ended_s
    return tuple(found)


def fit_front(prompt_lens: Sequence[int], seconds: Sequence[float]) -> FrontCost:
    """Fit the time of the front to requests, of which some were disturbed: half of them take less
    than the result says. No requests: no time."""
    if not prompt_lens:
        return FrontCost()
    lens = np.array(prompt_lens, dtype=np.float64)
    ones = np.ones(len(lens))
    loads = np.column_stack([ones, lens])
    measured = np.array(seconds, dtype=np.float64)
    measured = np.maximum(measured, 0.0)
    scale = loads.max(axis=0)
    scaled = loads / scale
    weights = np.ones(len(measured))
    solution = np.zeros(2)
    for _ in range(FRONT_ROUNDS):
        matrix = scaled.T @ (scaled * weights[:, None])
        solution = not_negative(matrix, scaled.T @ (weights * measured))
        difference = np.abs(scaled @ solution - measured)
        weights = 1 / np.maximum(difference, LEAST_S)
    request_s, token_s = (solution / scale).tolist()
    return FrontCost(request_s=request_s, token_s=token_s)
