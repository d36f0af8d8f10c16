"""The encoder of pictures, videos and sounds in simulation: it computes nothing, stores what plans
require, and takes the time that its cost gives.

It knows nothing of the content of a picture, only its digest.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from weft.config.options import SettingsError, did_you_mean
from weft.plan.inputs import EncodeAhead, EncoderInput, MediaVectors
from weft.plan.step import Plan, Result, find

# Pieces of the work on one picture; a device can stop between two pieces.
PIECES = 100


class EncoderCost(NamedTuple):
    """Seconds per picture, tile, video or sound, and per token that represents it."""

    item_s: float
    token_s: float

    def seconds(self, num_items: int, num_tokens: int) -> float:
        return self.item_s * num_items + self.token_s * num_tokens

    @property
    def text(self) -> str:
        """The value for `--encoder-cost`."""
        return f"{self.item_s:.6g},{self.token_s:.6g}"


# cpu: SmolVLM-256M on two cores (340 ms for 64 tokens of 16 patches). gpu: the encoder of
# Qwen2.5-VL (0.6 B weights, four patches per token) on an H100 at 0.25 PFLOP/s.
ENCODER_PRESETS = {
    "cpu": EncoderCost(item_s=0.0, token_s=0.0053),
    "gpu": EncoderCost(item_s=0.004, token_s=2e-5),
}


def read_encoder_cost(text: str) -> EncoderCost:
    """Read a preset's name, or a,b. Raises SettingsError."""
    if text in ENCODER_PRESETS:
        return ENCODER_PRESETS[text]
    try:
        values = [float(word) for word in text.split(",")]
        is_possible = all(0 <= value < math.inf for value in values)
        if len(values) != 2 or not is_possible:
            raise ValueError(text)
    except ValueError as exc:
        hint = did_you_mean(text, ENCODER_PRESETS)
        raise SettingsError(
            f"--encoder-cost is {text!r}; {', '.join(ENCODER_PRESETS)} or seconds a,b of a "
            f"picture and of each of its tokens are expected{hint}"
        ) from exc
    return EncoderCost(*values)


class OpenItem(NamedTuple):
    """The item that is being encoded."""

    digest: bytes
    left_s: float
    piece_s: float


class SimulatedEncoder:
    """Follows plans, like the store of a device (`executor/media/store.py`)."""

    def __init__(self, cost: EncoderCost) -> None:
        self._cost = cost
        self._encoded: set[bytes] = set()  # digests
        self._open: OpenItem | None = None
        self.num_runs = 0
        self.num_tokens = 0  # encoded tokens
        self.busy_s = 0.0

    def step(self, plan: Plan) -> tuple[float, tuple[bytes, ...]]:
        """Seconds of the encoder during and after a step, and the items of `Plan.ahead` that are
        ready."""
        seconds = 0.0
        op = find(plan.inputs, MediaVectors)
        if op is not None:
            seconds = self._take(op)
        encoded: tuple[bytes, ...] = ()
        if plan.ahead is not None:
            seconds += self._work_ahead(plan.ahead)
            encoded = tuple(one.digest for one in plan.ahead.encode if one.digest in self._encoded)
        self.busy_s += seconds
        return seconds, encoded

    def _take(self, op: MediaVectors) -> float:
        if op.drops_all:
            self._encoded.clear()
            self._open = None
        self._encoded.difference_update(op.drop)
        seconds = 0.0
        for one in op.encode:
            if one.digest not in self._encoded:
                seconds += self._work(one, math.inf)
        assert self._encoded.issuperset(op.items), "a step takes what is not encoded"
        return seconds

    def _work_ahead(self, ahead: EncodeAhead) -> float:
        seconds = 0.0
        for one in ahead.encode:
            is_first = seconds == 0.0
            if one.digest not in self._encoded and (is_first or seconds < ahead.seconds):
                seconds += self._work(one, ahead.seconds - seconds)
        return seconds

    def _work(self, one: EncoderInput, seconds: float) -> float:
        """Work on an item for `seconds`, but at least for one piece. Returns the time taken."""
        if self._open is None or self._open.digest != one.digest:
            whole_s = self._cost.seconds(1, one.length)
            self._open = OpenItem(one.digest, whole_s, whole_s / PIECES)
            self.num_runs += 1
            self.num_tokens += one.length
        left_s = self._open.left_s
        spent_s = min(max(seconds, self._open.piece_s), left_s)
        if spent_s < left_s:
            self._open = self._open._replace(left_s=left_s - spent_s)
            return spent_s
        self._open = None
        self._encoded.add(one.digest)
        return left_s


class EncoderTime(NamedTuple):
    """The items that were encoded within `seconds` of the encoder's time."""

    num_items: int
    num_tokens: int
    seconds: float


class EncoderTimes:
    """Measures the encoder's time per item from plans and results."""

    def __init__(self) -> None:
        self.measured: list[EncoderTime] = []
        self._encoded: set[bytes] = set()
        self._open_s = 0.0  # encoder seconds since an item was last ready

    def note(self, plan: Plan, result: Result) -> None:
        """A step has ended."""
        lengths: dict[bytes, int] = {}
        op = find(plan.inputs, MediaVectors)
        if op is not None:
            if op.drops_all:
                self._encoded.clear()
            self._encoded.difference_update(op.drop)
            lengths |= {one.digest: one.length for one in op.encode}
        if plan.ahead is not None:
            ready = set(result.encoded)
            ahead = [one for one in plan.ahead.encode if one.digest in ready]
            lengths |= {one.digest: one.length for one in ahead}
        self._open_s += result.encoder_s
        new = [length for digest, length in lengths.items() if digest not in self._encoded]
        self._encoded.update(lengths)
        if new and self._open_s > 0:
            self.measured.append(EncoderTime(len(new), sum(new), self._open_s))
        if new:
            self._open_s = 0.0
