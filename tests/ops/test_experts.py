"""Routers and experts: what is chosen, and the kernels of every instruction set against the plain
twin."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.codes import PACKED
from tests.ops.experts import Lonely, Program, Shape, mixed, random
from weft.ops.cpp.abi import StepArgs, WeightFormat
from weft.ops.cpp.joint import CppJoint, by_calls
from weft.ops.cpp.library import Library
from weft.ops.cpp.ops import CppOps
from weft.ops.plain import PlainOps
from weft.ops.protocol import Router
from weft.ops.routing import Choice, Scores, choose
from weft.ops.sharding import GroupRank, Sharded

pytestmark = pytest.mark.pairs

CPU = torch.device("cpu")
CHOICES = (
    Choice(num_experts=6, num_chosen=3, is_normed=True),
    Choice(num_experts=37, num_chosen=8),
    Choice(num_experts=5, num_chosen=5, scores=Scores.CHOSEN),
    Choice(num_experts=16, num_chosen=2, scores=Scores.SIGMOID, is_normed=True, scale=2.5),
    Choice(
        num_experts=64,
        num_chosen=6,
        scores=Scores.SIGMOID,
        num_groups=8,
        num_groups_chosen=3,
        scale=0.3,
    ),
)


def plain_ops(format: str = "") -> PlainOps:
    return PlainOps(torch.float32, CPU, format)


def routed_by_kernels(
    kernels: Library, logits: Tensor, choice: Choice, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Experts and weights that the kernels choose. An identity makes the logits."""
    num = choice.num_experts
    ops = CppOps(kernels, WeightFormat.F32)
    matrix = ops.exact_matrix(num, num)
    matrix.put(0, torch.eye(num))
    ops.begin(len(logits))
    x = ops.recorder.buffer(num)
    routed = ops.route(x, Router(matrix, choice, bias, layer=3))
    program = ops.finish()
    x.copy_(logits)
    program.run(kernels, StepArgs(num_tokens=len(logits)))
    assert ops.chosen[3] is routed.experts
    return routed.experts, routed.weights


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_routers_choose_as_the_plain_twin(kernels: Library, choice: Choice, has_bias: bool) -> None:
    logits = random(23, choice.num_experts)
    bias = random(choice.num_experts, seed=5) if has_bias else None
    expected = choose(logits, choice, bias)
    experts, weights = routed_by_kernels(kernels, logits, choice, bias)
    assert torch.equal(experts, expected.experts)
    torch.testing.assert_close(weights, expected.weights, rtol=1e-5, atol=1e-7)


def test_of_equal_experts_the_first_is_chosen(kernels: Library) -> None:
    choice = Choice(num_experts=40, num_chosen=4)
    logits = torch.zeros(2, 40)
    logits[0, [11, 17, 30]] = 1.0
    expected = [[11, 17, 30, 0], [0, 1, 2, 3]]
    assert choose(logits, choice).experts.tolist() == expected
    assert routed_by_kernels(kernels, logits, choice, None)[0].tolist() == expected


def test_logits_that_are_no_numbers_choose_experts_that_exist(kernels: Library) -> None:
    choice = Choice(num_experts=8, num_chosen=3)
    logits = torch.full((2, 8), torch.nan)
    logits[1, 2] = 1.0
    experts, _ = routed_by_kernels(kernels, logits, choice, None)
    for row in experts.tolist():
        assert len({expert for expert in row if 0 <= expert < 8}) == 3


def test_only_the_best_groups_are_looked_at() -> None:
    choice = Choice(
        num_experts=6, num_chosen=2, scores=Scores.SIGMOID, num_groups=3, num_groups_chosen=1
    )
    # The best expert stands in a group whose other one is bad.
    logits = torch.tensor([[5.0, -9.0, 2.0, 2.0, 1.0, 1.0]])
    assert choose(logits, choice).experts.tolist() == [[2, 3]]


def test_a_bias_of_choice_does_not_count_in_weights() -> None:
    choice = Choice(num_experts=3, num_chosen=1, scores=Scores.SIGMOID)
    found = choose(torch.tensor([[0.0, 2.0, 1.0]]), choice, torch.tensor([9.0, 0.0, 0.0]))
    assert found.experts.tolist() == [[0]]
    assert found.weights.tolist() == [[0.5]]


SHAPES = (
    Shape(),
    Shape(hidden=64, inner=200, activation="gelu_pytorch_tanh"),
    Shape(hidden=130, inner=64, activation="clamped_swiglu", bias=True),
    Shape(choice=Choice(num_experts=2, num_chosen=1)),
)
FORMATS = {
    WeightFormat.F32: ("", 2e-5),
    WeightFormat.BF16: ("", 2e-2),  # the twin keeps float32
    WeightFormat.I8: ("int8", 2e-4),
    WeightFormat.I4: ("int4", 1e-2),  # which may round a weight to the other side
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("format", FORMATS)
def test_experts_are_the_plain_twin(kernels: Library, shape: Shape, format: WeightFormat) -> None:
    twin, tolerance = FORMATS[format]
    program = Program(kernels, CppOps(kernels, format), shape, capacity=60)
    x = random(60, shape.hidden, seed=7)
    expected = mixed(plain_ops(twin), shape, x)
    for num_tokens in (1, 2, 7, 60):
        found = program(x[:num_tokens])
        torch.testing.assert_close(found, expected[:num_tokens], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("format", PACKED)
def test_the_bits_of_a_token_do_not_depend_on_its_neighbours(
    kernels: Library, format: WeightFormat
) -> None:
    shape = Shape(hidden=192, inner=96, choice=Choice(num_experts=5, num_chosen=2))
    program = Program(kernels, CppOps(kernels, format), shape, capacity=700)
    x = random(700, shape.hidden, seed=3)
    together = program(x)
    for start, end in ((0, 1), (5, 6), (3, 7), (10, 45), (400, 700)):
        assert torch.equal(program(x[start:end]), together[start:end])


@pytest.mark.parametrize("codes", ["q4_0", "q4_k", "q6_k", "q8_0", "mxfp4"])
def test_codes_of_experts_are_kept_as_they_are_stored(kernels: Library, codes: str) -> None:
    shape = Shape(hidden=256, inner=512, codes=codes)
    ops = CppOps(kernels, WeightFormat.BF16, keeps_codes=True)
    program = Program(kernels, ops, shape, capacity=9)
    x = random(9, shape.hidden, seed=7)
    # The twin keeps them, too, and rounds activations as kernels of codes do.
    expected = mixed(plain_ops("int8"), shape, x)
    tolerance = 1e-4 * expected.abs().max().item()
    torch.testing.assert_close(program(x), expected, rtol=1e-4, atol=tolerance)


def test_rows_are_gated_by_a_sigmoid(kernels: Library) -> None:
    x = random(5, 70)
    y = random(5, 33, seed=1)
    weight = random(70, seed=2) / 8
    expected = y.clone()
    plain_ops().gate_rows(expected, x, weight)
    ops = CppOps(kernels, WeightFormat.F32)
    ops.begin(5)
    ops.gate_rows(y, x, weight)
    ops.finish().run(kernels, StepArgs(num_tokens=5))
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("codes", ["", "q8_0"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_terms_of_all_ranks_are_the_output_of_the_experts(
    kernels: Library, codes: str, num_ranks: int
) -> None:
    shape = Shape(inner=192, bias=True, codes=codes)
    x = random(7, shape.hidden)
    whole = CppOps(kernels, WeightFormat.F32, keeps_codes=True)
    expected = Program(kernels, whole, shape, len(x))(x)
    total = x.clone()
    for rank in range(num_ranks):
        ops = CppOps(
            kernels,
            WeightFormat.F32,
            keeps_codes=True,
            placement=Sharded(GroupRank(rank, num_ranks)),
            joint=CppJoint(by_calls(Lonely(rank, num_ranks), timeout_s=1.0)),
        )
        total += Program(kernels, ops, shape, len(x))(x) - x
    tolerance = 1e-4 * max(expected.abs().max().item(), 1.0)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=tolerance)
