"""Every path of experts for random shapes and random routings: against the plain twin, and bit for
bit against the same kernels in one process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from tests.ops.codes import FORMATS as CODES
from tests.ops.experts import Lonely, Program, Shape, Specified, Twin, rounded_for, specified
from tests.ops.experts import random as values
from weft.ops.cpp.abi import WeightFormat
from weft.ops.cpp.joint import CppExperts, CppJoint, by_calls, fuses
from weft.ops.cpp.library import Library
from weft.ops.cpp.ops import CppOps
from weft.ops.expert_parallel import (
    ComputeExperts,
    ExpertsApart,
    PeerRank,
    experts_of,
)
from weft.ops.joint import TorchJoint
from weft.ops.plain import PlainExperts, PlainOps
from weft.ops.protocol import Experts, Ops
from weft.ops.quantize import INT8
from weft.ops.routing import Choice, Routed, Scores
from weft.ops.sharding import GroupRank, Sharded

pytestmark = pytest.mark.pairs

CPU = torch.device("cpu")
# The name of the twin's format, and the tolerance; the twin of bfloat16 keeps float32.
TWINS = {
    WeightFormat.F32: ("", 5e-5),
    WeightFormat.BF16: ("", 3e-2),
    # They may round a weight or an activation to the other side.
    WeightFormat.I8: ("int8", 1e-2),
    WeightFormat.I4: ("int4", 2e-2),
}
# Of sums in float32, relative to the largest one.
ERROR = 5e-5
SEEDS = range(4)
ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "clamped_swiglu")


def random_shape(draw: random.Random, codes: str = "") -> Shape:
    num_experts = draw.choice([2, 3, 6, 8] if codes else [2, 3, 6, 8, 8, 16, 29])
    sizes = [256, 512] if codes else [1, 16, 32, 33, 64, 96, 130]
    hidden = draw.choice(sizes)
    inner = draw.choice([*sizes, 45] if not codes else sizes)
    choice = Choice(
        num_experts=num_experts,
        num_chosen=draw.randint(1, min(num_experts, 8)),
        scores=draw.choice(list(Scores)),
        is_normed=draw.random() < 0.5,
    )
    bias = draw.random() < 0.5
    return Shape(hidden, inner, choice, draw.choice(ACTIVATIONS), bias=bias, codes=codes)


def assert_specified(found: Tensor, expected: Specified) -> None:
    largest = max(expected.values.abs().max().item(), 1.0)
    off = (found.double() - expected.values).abs() - expected.doubt
    assert off.max().item() <= ERROR * largest, (off.max().item() / largest, len(found))


def random_lens(draw: random.Random) -> list[int]:
    """Numbers of tokens: one in any case, and some that are few and many."""
    return [1, draw.randint(2, 8), draw.randint(9, 40)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("format", TWINS)
def test_experts_of_one_process(kernels: Library, format: WeightFormat, seed: int) -> None:
    draw = random.Random(seed)
    shape = random_shape(draw)
    name, tolerance = TWINS[format]
    program = Program(kernels, CppOps(kernels, format), shape, capacity=40)
    for num in random_lens(draw):
        x = values(num, shape.hidden, seed=num)
        expected = by_twin(name, shape, num)
        scale = max(expected.abs().max().item(), 1.0)
        found = program(x)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * scale)
        assert_specified(2 * (found - x), of_program(program, shape, x, format))


@lru_cache(maxsize=1)
def twin(name: str, shape: Shape) -> Twin:
    return Twin(PlainOps(torch.float32, CPU, name), shape)


@lru_cache(maxsize=32)  # for each instruction set the same
def by_twin(name: str, shape: Shape, num: int) -> Tensor:
    """What the twin of a format computes for `num` tokens."""
    return twin(name, shape)(values(num, shape.hidden, seed=num))


def of_program(program: Program, shape: Shape, x: Tensor, format: WeightFormat) -> Specified:
    ops = PlainOps(torch.float32, CPU)
    routed = ops.route(x, shape.router(ops))
    rounded = rounded_for(program.kernels, format)
    return specified(shape, program.experts, x, routed, rounded)


@pytest.mark.parametrize("seed", range(1))
@pytest.mark.parametrize("codes", ["q4_0", "q4_k", "q6_k", "q8_0", "iq4_nl", "mxfp4", "nvfp4"])
def test_experts_whose_codes_are_kept(kernels: Library, codes: str, seed: int) -> None:
    assert codes in CODES
    draw = random.Random(seed)
    shape = random_shape(draw, codes)
    ops = CppOps(kernels, WeightFormat.BF16, keeps_codes=True)
    program = Program(kernels, ops, shape, capacity=40)
    for num in random_lens(draw):
        x = values(num, shape.hidden, seed=num)
        expected = by_twin("int8", shape, num)
        tolerance = 1e-2 * max(expected.abs().max().item(), 1.0)
        found = program(x)
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=tolerance)
        assert_specified(2 * (found - x), of_program(program, shape, x, WeightFormat.I8))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("format", [WeightFormat.F32, WeightFormat.I8])
def test_experts_that_ranks_divide(kernels: Library, format: WeightFormat, seed: int) -> None:
    draw = random.Random(seed)
    shape = random_shape(draw)
    num_ranks = draw.randint(2, 3)
    # Each rank has whole groups of weights and of activations, so it rounds them as one process.
    inner = INT8.group * num_ranks
    shape = Shape(shape.hidden, inner, shape.choice, shape.activation, bias=shape.bias)
    whole = Program(kernels, CppOps(kernels, format), shape, capacity=40)
    # The operations own the link of a program, so they are kept.
    ops = [
        CppOps(
            kernels,
            format,
            placement=Sharded(GroupRank(rank, num_ranks)),
            joint=CppJoint(by_calls(Lonely(rank, num_ranks), timeout_s=1.0)),
        )
        for rank in range(num_ranks)
    ]
    ranks = [Program(kernels, each, shape, capacity=40) for each in ops]
    for num in random_lens(draw):
        x = values(num, shape.hidden, seed=num)
        total = x.clone()
        for rank in ranks:
            total += rank(x) - x
        expected = whole(x)
        scale = max(expected.abs().max().item(), 1.0)
        torch.testing.assert_close(total, expected, rtol=ERROR, atol=ERROR * scale)


# Experts of peers: rows from anywhere in the tokens, each for any expert


def random_rows(draw: random.Random, shape: Shape) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """x [T, hidden], rows [n] and experts [n]; n may be one, and rows need not begin at 0."""
    for num_tokens, num_rows in ((1, 1), (7, 1), (7, 1), (9, 2), (40, 23), (5, 60), (80, 70)):
        rows = [draw.randrange(num_tokens) for _ in range(num_rows)]
        experts = [draw.randrange(shape.choice.num_experts) for _ in range(num_rows)]
        x = values(num_tokens, shape.hidden, seed=num_rows)
        yield x, torch.tensor(rows, dtype=torch.int32), torch.tensor(experts, dtype=torch.int32)


def own_experts(ops: Ops, shapes: Sequence[Shape]) -> list[Experts]:
    return [shape.experts(ops) for shape in shapes]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("format", TWINS)
def test_experts_for_other_peers(kernels: Library, format: WeightFormat, seed: int) -> None:
    draw = random.Random(seed)
    shape = random_shape(draw)
    twin, tolerance = TWINS[format]
    ops = CppOps(kernels, format)
    layers = own_experts(ops, [shape, shape])
    compute = CppExperts(ops, layers)
    plain = PlainExperts(own_experts(PlainOps(torch.float32, CPU, twin), [shape]), torch.float32)
    for x, rows, experts in random_rows(draw, shape):
        layer = draw.randrange(2)
        expected = plain(0, x, rows, experts)
        scale = max(expected.abs().max().item(), 1.0)
        found = compute(layer, x, rows, experts)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * scale)
        routed = Routed(experts[:, None], torch.ones(len(rows), 1))
        rounded = rounded_for(kernels, format)
        assert_specified(found, specified(shape, layers[layer], x[rows], routed, rounded))


class Together:
    """An `ExpertExchange` of one process, which asks the peers in turn, in batches of any size."""

    def __init__(self, num_experts: int, num_peers: int, draw: random.Random) -> None:
        self.peers: list[ComputeExperts] = []
        self._draw = draw
        self._places = [
            experts_of(num_experts, PeerRank(rank, num_peers)) for rank in range(num_peers)
        ]

    def exchange(self, layer: int, x: Tensor, experts: Tensor, out: Tensor) -> None:
        flat = experts.flatten()
        for peer, (first, size) in zip(self.peers, self._places, strict=True):
            (pairs,) = ((flat >= first) & (flat < first + size)).nonzero(as_tuple=True)
            while len(pairs):
                now, pairs = pairs.tensor_split([self._draw.randint(1, len(pairs))])
                rows = (now // experts.shape[1]).int()
                out[now] = peer(layer, x, rows, flat[now] - first)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("format", TWINS)
def test_tokens_get_the_same_bits_from_peers(
    kernels: Library, format: WeightFormat, seed: int
) -> None:
    draw = random.Random(seed)
    shape = random_shape(draw)
    num_peers = draw.randint(1, min(3, shape.choice.num_experts))
    together = Together(shape.choice.num_experts, num_peers, draw)
    programs = []
    for rank in range(num_peers):
        apart = ExpertsApart(PeerRank(rank, num_peers))
        joint = CppJoint(peers=together, fuses=fuses(kernels))
        ops = CppOps(kernels, format, placement=apart, joint=joint)
        programs.append(Program(kernels, ops, shape, capacity=40))
        together.peers.append(CppExperts(ops, apart.local([shape.activation])))
    alone = Program(kernels, CppOps(kernels, format), shape, capacity=40)
    for num in random_lens(draw):
        x = values(num, shape.hidden, seed=num)
        for program in programs:
            assert torch.equal(program(x), alone(x)), (shape, num)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_plain_peers_compute_what_one_process_computes(seed: int) -> None:
    draw = random.Random(seed)
    shape = random_shape(draw)
    num_peers = draw.randint(1, min(3, shape.choice.num_experts))
    together = Together(shape.choice.num_experts, num_peers, draw)
    placements = [ExpertsApart(PeerRank(rank, num_peers)) for rank in range(num_peers)]
    joint = TorchJoint(peers=together)
    peers = [PlainOps(torch.float32, CPU, placement=apart, joint=joint) for apart in placements]
    layers = [shape.experts(ops) for ops in peers]
    together.peers += [
        PlainExperts(apart.local([shape.activation]), torch.float32) for apart in placements
    ]
    alone = PlainOps(torch.float32, CPU)
    for num in random_lens(draw):
        x = values(num, shape.hidden, seed=num)
        routed = alone.route(x, shape.router(alone))
        expected = alone.experts(x, routed, shape.experts(alone))
        for ops, experts in zip(peers, layers, strict=True):
            found = ops.experts(x, routed, experts)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
