"""Every device with every placement: several processes compute what one computes. Triton's device:
`tests/ops_triton/test_placement.py`."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from tests.ops.placed import (
    CONFIG,
    PLACEMENTS,
    TOKENS,
    Device,
    Process,
    QueriesOnly,
    assert_same,
    logits_of,
    whole,
)
from tests.ops.placements import ACTIVATIONS, PLAIN, plain_ops
from weft.models.decoder import Decoder
from weft.ops.cpp.abi import StepArgs, WeightFormat
from weft.ops.cpp.joint import CppExperts, CppJoint, by_calls, by_pipe, fuses
from weft.ops.cpp.library import Library
from weft.ops.cpp.ops import CppOps
from weft.ops.expert_parallel import ComputeExperts, ExpertsApart
from weft.ops.placement import UNSPLIT
from weft.ops.protocol import Ops
from weft.ops.stages import AbsentMatrix


def cpp_joint(kernels: Library, process: Process) -> CppJoint:
    ranks, peers, pipe = process.connections
    return CppJoint(
        None if ranks is None else by_calls(ranks, timeout_s=60.0),
        peers,
        None if pipe is None else by_pipe(pipe, timeout_s=60.0),
        fuses(kernels),
    )


def cpp_ops(library_file: Path, folder: Path, process: Process, number: int) -> CppOps:
    # A library runs one program at a time, so each process has its own.
    own = folder / f"{number}.so"
    if not own.exists():
        shutil.copy(library_file, own)
    kernels = Library(own)
    joint = None
    if process.placement is not UNSPLIT:
        joint = cpp_joint(kernels, process)
    return CppOps(kernels, WeightFormat.F32, placement=process.placement, joint=joint)


def cpp_experts(ops: Ops, placement: ExpertsApart) -> ComputeExperts:
    return CppExperts(cast(CppOps, ops), placement.local(ACTIVATIONS))


def cpp_logits(ops: Ops, decoder: Decoder, attention: QueriesOnly) -> Tensor | None:
    ops = cast(CppOps, ops)
    # For more tokens than the step has.
    ops.begin(20)
    hidden = decoder.forward(torch.empty(20), torch.empty(20), attention)
    found = decoder.logits(hidden) if ops.layer_range(CONFIG.num_layers).is_last else None
    program = ops.finish()
    program.run(ops.library, StepArgs(num_tokens=len(TOKENS), tokens=TOKENS.data_ptr()))
    return None if found is None else found[: len(TOKENS)].clone()


def cpp(library_file: Path, folder: Path) -> Device:
    return Device(partial(cpp_ops, library_file, folder), cpp_experts, cpp_logits)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", ["plain", "cpp"])
def test_processes_together_compute_what_one_computes(
    library_file: Path, tmp_path: Path, name: str, placement: str
) -> None:
    device = PLAIN if name == "plain" else cpp(library_file, tmp_path)
    (expected,) = logits_of(device, whole())
    (specified,) = logits_of(PLAIN, whole())
    found = logits_of(device, PLACEMENTS[placement]())
    # Ranks add terms in another order than one process; others compute the same sums.
    is_exact = placement != "sharded" and name == "cpp"
    assert_same(found, expected, is_exact=is_exact)
    assert_same(found, specified, is_exact=False)


def test_a_process_stores_only_its_part() -> None:
    """The bytes of matrices of all processes are those of the whole model, or hardly more."""

    def num_values(process: Process) -> int:
        ops = plain_ops(process)
        Decoder(CONFIG, ops)
        return sum(one.numel() for one in ops.tensors)

    (everything,) = map(num_values, whole())
    for name, processes in PLACEMENTS.items():
        parts = [num_values(process) for process in processes()]
        assert sum(parts) >= everything
        assert name == "whole" or max(parts) < 0.7 * everything


def test_a_matrix_of_another_stage_takes_values_and_has_none() -> None:
    matrix = AbsentMatrix(8, (16, 4))
    matrix.put(1, torch.ones(4, 8))
    assert not matrix.tensors
    assert matrix.get(1).shape == (4, 8)
    assert matrix.get(1).isnan().all()
