"""Counts the experts that the tokens of a model get, by layer and by kind of step, from `start` to
`stop`.

Routers keep the experts of their last call (`Ops.chosen`). While nothing is recorded, a step of a
model with experts costs one more call; steps of other models do not use this module.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from weft.arrays import LongArray
from weft.config.decoder import MoeSpec
from weft.config.model import ModelConfig
from weft.executor.device import DeviceOutput
from weft.executor.runner import Pass, Run
from weft.plan.step import ForwardMode, Plan

MAX_FILES = 1_000  # files of counts in the folder
MODES = ("prefill", "decode")


class ExpertError(ValueError):
    """The recorder cannot do this now; the message gives the reason."""


class ExpertCounts(NamedTuple):
    """The number of tokens of each expert."""

    layers: tuple[int, ...]  # that have experts
    counts: LongArray  # [modes, layers, experts]
    file: str  # name of the file with these counts, in the folder; "" if there is none


class ChosenRows(NamedTuple):
    """The chosen experts of the layers of a step. Programs write into the same tensors in every
    step, so these views are reused: making them in each step would cost more than counting."""

    tensors: list[Tensor]  # per layer, [T or more, k]
    num_tokens: int
    rows: list[NDArray[np.int32]]  # per layer, views [T, k] of the tensors

    def are_of(self, tensors: list[Tensor], num_tokens: int) -> bool:
        if num_tokens != self.num_tokens:
            return False
        if len(tensors) != len(self.tensors):
            return False
        return all(map(operator.is_, tensors, self.tensors))


NOTHING_CHOSEN = ChosenRows([], 0, [])


class ExpertRecorder:
    """Counts the experts of steps. `chosen`: by layer, the experts of the last step
    [T or more, k] (`Ops.chosen`). `folder`: for the files of `dump`; None: no files.
    """

    def __init__(
        self, config: ModelConfig, chosen: Mapping[int, Tensor], folder: Path | None
    ) -> None:
        self._chosen = chosen
        self._folder = folder
        self.is_on = False
        self._layers: list[int] = []
        self._num_experts = 0
        for layer in range(config.num_layers):
            experts = config.decoder.layer(layer).mlp
            if isinstance(experts, MoeSpec):
                self._layers.append(layer)
                self._num_experts = max(self._num_experts, experts.router.num_experts)
        self._counts = self._none()
        self._seen = NOTHING_CHOSEN

    def start(self) -> None:
        """Set the counts to zero, and count from the next step on. Raises ExpertError if it is
        counting already."""
        if self.is_on:
            raise ExpertError("the expert distribution is being recorded already; stop ends that")
        self._counts = self._none()
        self.is_on = True

    def stop(self) -> None:
        """Stop counting. The counts can still be dumped. Raises ExpertError if it is not
        counting."""
        if not self.is_on:
            raise ExpertError("the expert distribution is not being recorded; start begins that")
        self.is_on = False
        self._seen = NOTHING_CHOSEN

    def look(self) -> ExpertCounts:
        """The counts since `start` or the last dump. Does not change them."""
        return ExpertCounts(tuple(self._layers), self._counts, "")

    def dump(self) -> ExpertCounts:
        """The counts since `start` or the last dump, also written to a file if there is a folder.
        Sets the counts to zero, and does not stop counting. Raises ExpertError if the folder has
        MAX_FILES files, and OSError if the file cannot be written."""
        counts = self.look()
        if self._folder is not None:
            counts = counts._replace(file=self._written(self._folder, counts))
        self._counts = self._none()
        return counts

    def count(self, plan: Plan) -> None:
        """Add the step of this plan, which must be the last computed step."""
        num_tokens = plan.num_tokens
        if not num_tokens:
            return
        computed = self._computed(plan)
        if not computed:
            return
        rows = self._rows(computed, num_tokens)
        if plan.mode is not ForwardMode.MIXED:
            self._add(MODES.index(_mode_of(plan)), computed, rows)
            return
        # In a mixed step, requests with one token are decoding.
        is_decode = np.repeat(plan.lens == 1, plan.lens)
        for mode, mask in enumerate((~is_decode, is_decode)):
            if not mask.any():
                continue
            of_mode = [of_layer[mask] for of_layer in rows]
            self._add(mode, computed, of_mode)

    def _computed(self, plan: Plan) -> list[int]:
        """The layers with experts that the step computes, as indices into `_layers`."""
        indices = range(len(self._layers))
        if plan.layers is None:
            return list(indices)
        span = range(plan.layers.first, plan.layers.last)
        return [index for index in indices if self._layers[index] in span]

    def _rows(self, computed: list[int], num_tokens: int) -> list[NDArray[np.int32]]:
        """The chosen experts [T, k] of each of these layers."""
        tensors = [self._chosen[self._layers[index]] for index in computed]
        if self._seen.are_of(tensors, num_tokens):
            return self._seen.rows
        rows = [of_layer[:num_tokens].cpu().numpy() for of_layer in tensors]
        if tensors[0].device.type == "cpu":  # on other devices, rows are copies
            self._seen = ChosenRows(tensors, num_tokens, rows)
        return rows

    def _add(self, mode: int, computed: list[int], rows: list[NDArray[np.int32]]) -> None:
        """Count the experts [tokens, k] of each layer."""
        num_layers = len(computed)
        firsts = np.arange(num_layers)[:, None] * self._num_experts
        indices = np.concatenate(rows).reshape(num_layers, -1) + firsts
        found = np.bincount(indices.ravel(), minlength=num_layers * self._num_experts)
        of_mode = self._counts[mode]
        # A slice, to add in index: the computed layers are consecutive, usually all of them.
        of_mode[computed[0] : computed[-1] + 1] += found.reshape(num_layers, -1)

    def _none(self) -> LongArray:
        return np.zeros((len(MODES), len(self._layers), self._num_experts), np.int64)

    def _written(self, folder: Path, counts: ExpertCounts) -> str:
        """Write these counts to a new file. Returns its name."""
        text = json.dumps(as_json(counts))
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(1, MAX_FILES + 1):
            name = f"expert-distribution-{number:04d}.json"
            try:
                with (folder / name).open("x") as file:
                    file.write(text)
            except FileExistsError:
                continue
            return name
        raise ExpertError(f"the folder has {MAX_FILES:,} expert distributions; move them away")


def as_json(counts: ExpertCounts) -> dict[str, object]:
    found: dict[str, object] = {"layers": list(counts.layers)}
    for mode, of_mode in zip(MODES, counts.counts, strict=True):
        found[mode] = of_mode.tolist()
    return found


def _mode_of(plan: Plan) -> str:
    return "decode" if plan.mode is ForwardMode.DECODE else "prefill"


class CountPass(Pass):
    """Counts the experts of steps while somebody records them. `recordable` computes these steps,
    if the usual ones do not keep the experts of all tokens: graphs do not, and fused steps leave
    out tokens of the last layer."""

    name = "expert counts"

    def __init__(self, recorder: ExpertRecorder, recordable: Run | None = None) -> None:
        self._recorder = recorder
        self._recordable = recordable

    def run(self, plan: Plan, then: Run) -> DeviceOutput:
        if not self._recorder.is_on:
            return then(plan)
        output = (self._recordable or then)(plan)
        self._recorder.count(plan)
        return output


def counting(recorder: ExpertRecorder | None, recordable: Run | None = None) -> list[Pass]:
    """The pass that counts, if there is a recorder."""
    return [] if recorder is None else [CountPass(recorder, recordable)]
