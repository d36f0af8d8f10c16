"""The buffers in which kernels write and read the experts of a step's tokens (`program.h`,
RouteArgs)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from weft.ops.cpp import abi
from weft.ops.cpp.abi import ExpertScores
from weft.ops.cpp.program import ProgramRecorder
from weft.ops.protocol import Router
from weft.ops.routing import Choice, Scores

SCORES = {
    Scores.SOFTMAX: ExpertScores.SOFTMAX,
    Scores.CHOSEN: ExpertScores.CHOSEN,
    Scores.SIGMOID: ExpertScores.SIGMOID,
}


class Routes(NamedTuple):
    """`ops.routing.Routed` in a program, and the order in which the kernels compute its rows."""

    experts: Tensor  # [capacity, k] int32
    weights: Tensor  # [capacity, k]
    offsets: Tensor  # [experts + 1] int32
    tokens: Tensor  # [capacity, k] int32
    sorted_rows: Tensor  # [capacity, k] int32

    @property
    def addresses(self) -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in self._asdict().items()}


def make_routes(recorder: ProgramRecorder, choice: Choice) -> Routes:
    num_chosen = choice.num_chosen
    return Routes(
        experts=recorder.buffer(num_chosen, torch.int32),
        weights=recorder.buffer(num_chosen),
        offsets=recorder.keep(torch.zeros(choice.num_experts + 1, dtype=torch.int32)),
        tokens=recorder.buffer(num_chosen, torch.int32),
        sorted_rows=recorder.buffer(num_chosen, torch.int32),
    )


def route_args(logits: Tensor, router: Router, routes: Routes) -> abi.RouteArgs:
    choice = router.choice
    args = abi.RouteArgs(
        logits=logits.data_ptr(),
        logits_stride=logits.stride(0),
        num_experts=choice.num_experts,
        num_chosen=choice.num_chosen,
        scores=SCORES[choice.scores],
        is_normed=choice.is_normed,
        scale=choice.scale,
        num_groups=choice.num_groups,
        num_groups_chosen=choice.num_groups_chosen,
        counts_one=choice.counts_one,
        **routes.addresses,
    )
    if router.choice_bias is not None:
        args.choice_bias = router.choice_bias.data_ptr()
    if router.expert_scale is not None:
        args.expert_scale = router.expert_scale.data_ptr()
    return args
