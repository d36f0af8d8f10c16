"""Experts and models that are computed in parts and as one."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.ops.placed import CONFIG, TOKENS, Device, Process, QueriesOnly
from weft.models.decoder import Decoder
from weft.ops.expert_parallel import ComputeExperts, ExpertsApart
from weft.ops.joint import TorchJoint
from weft.ops.plain import PlainExperts, PlainOps
from weft.ops.protocol import Ops

CPU = torch.device("cpu")
ACTIVATIONS = ("silu", "silu")


def torch_joint(process: Process) -> TorchJoint:
    return TorchJoint(*process.connections)


def plain_ops(process: Process, number: int = 0) -> PlainOps:
    placement = process.placement
    return PlainOps(torch.float32, CPU, placement=placement, joint=torch_joint(process))


def plain_experts(ops: Ops, placement: ExpertsApart) -> ComputeExperts:
    return PlainExperts(placement.local(ACTIVATIONS), torch.float32)


def torch_logits(ops: Ops, decoder: Decoder, attention: QueriesOnly) -> Tensor | None:
    hidden = decoder.forward(TOKENS, torch.arange(len(TOKENS)), attention)
    return decoder.logits(hidden) if ops.layer_range(CONFIG.num_layers).is_last else None


PLAIN = Device(plain_ops, plain_experts, torch_logits)
