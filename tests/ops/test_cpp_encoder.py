"""The kernels of encoders against their torch twins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ops.codes import PACKED
from weft.executor.cpu.encoder_attention import MOST_DIMS_OF_SHORTS, CppBidirectional
from weft.executor.plain.encoder_attention import TorchBidirectional
from weft.models.layers.distances import Biases, empty_biases
from weft.models.layers.encoder import PLAIN_HEADS, EncoderHeads
from weft.ops.cpp import abi
from weft.ops.cpp.abi import KvFormat, WeightFormat
from weft.ops.cpp.encoder import CppEncoderOps
from weft.ops.cpp.library import Library
from weft.ops.cpp.ops import EPILOGUES
from weft.ops.elementwise import ACTIVATIONS
from weft.ops.encoder import PlainEncoderOps, Tables
from weft.ops.protocol import LayerNorm, Matrix

pytestmark = pytest.mark.pairs

TOLERANCE = {
    WeightFormat.F32: 1e-5,
    WeightFormat.BF16: 0.01,
    WeightFormat.I8: 0.02,
    WeightFormat.I4: 0.02,
    WeightFormat.I16: 0.001,
}
CPU = torch.device("cpu")


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def recorded(
    ops: CppEncoderOps, record: Callable[[], Tensor], num_tokens: int, **step: Any
) -> Tensor:
    """What the operations that `record` adds leave."""
    ops.begin(num_tokens)
    out = ops.computed(record())
    ops.finish().run(ops.library, abi.StepArgs(num_tokens=num_tokens, **step))
    return out.clone()


def filled(matrix: Matrix, in_size: int, bias: bool = True) -> Matrix:
    matrix.put(0, random(matrix.sizes[0], in_size) / in_size**0.5)
    if bias:
        matrix.put_bias(0, random(matrix.sizes[0]))
    return matrix


def activated(
    kernels: Library, x: Tensor, out_size: int, activation: str, format: WeightFormat
) -> tuple[Tensor, ...]:
    """By the kernels, and by the twin with the weights as the kernels keep them; and the product
    before."""
    ops = CppEncoderOps(kernels, format)
    twin = PlainEncoderOps(torch.float64, CPU)
    weight = filled(ops.matrix(x.shape[1], (out_size,), bias=True), x.shape[1])
    same = twin.matrix(x.shape[1], (out_size,), bias=True)
    same.put(0, weight.get(0))
    same.put_bias(0, weight.get_bias(0))
    actual = recorded(ops, lambda: ops.activated(x, weight, activation), len(x))
    return actual, twin.activated(x.double(), same, activation), twin.linear(x.double(), same)


def test_every_activation_has_a_kernel() -> None:
    assert EPILOGUES.keys() == ACTIVATIONS.keys()


@pytest.mark.parametrize("format", PACKED)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_follow_a_product(
    kernels: Library, activation: str, format: WeightFormat
) -> None:
    for rows, in_size, out_size in ((1, 64, 32), (3, 70, 45), (40, 130, 97)):
        actual, expected, product = activated(
            kernels, 3 * random(rows, in_size), out_size, activation, format
        )
        largest = float(product.abs().max())
        # A square doubles relative errors.
        bound = 2 * largest**2 if activation == "relu2" else largest
        assert (actual - expected).abs().max() < TOLERANCE[format] * bound


def one_by_one(kernels: Library, x: Tensor, activation: str) -> Tensor:
    """The activation of each number."""
    ops = CppEncoderOps(kernels, WeightFormat.F32)
    identity = ops.matrix(1, (1,))
    identity.put(0, torch.ones(1, 1))
    return recorded(ops, lambda: ops.activated(x[:, None], identity, activation), len(x))[:, 0]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_exact_to_the_last_digits(kernels: Library, activation: str) -> None:
    x = torch.linspace(-12, 12, 4001)
    expected = ACTIVATIONS[activation](x.double())
    assert (
        (one_by_one(kernels, x, activation) - expected).abs() / expected.abs().clamp(min=1)
    ).max() < 1e-6


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_not_a_number_stays_so(kernels: Library, activation: str) -> None:
    assert one_by_one(kernels, torch.tensor([torch.nan]), activation).isnan().all()


def test_far_out_gelu_is_all_or_nothing(kernels: Library) -> None:
    x = torch.tensor([-3e4, -50.0, -6.0, 6.0, 50.0, 3e4])
    assert torch.equal(one_by_one(kernels, x, "gelu"), x.clamp(min=0))


def norm_of(size: int) -> LayerNorm:
    return LayerNorm(1 + 0.3 * random(size), random(size + 1)[1:].contiguous(), 1e-12)


@pytest.mark.parametrize("size", [1, 3, 16, 48, 100, 384, 1029])
def test_layer_norm(kernels: Library, size: int) -> None:
    x = 7 + random(5, size)
    norm = norm_of(size)
    ops = CppEncoderOps(kernels, WeightFormat.F32)
    actual = recorded(ops, lambda: ops.layer_norm(x, norm), len(x))
    twin = PlainEncoderOps(torch.float64, CPU)
    expected = twin.layer_norm(
        x.double(), LayerNorm(norm.weight.double(), norm.bias.double(), norm.eps)
    )
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("format", [WeightFormat.F32, WeightFormat.BF16])
@pytest.mark.parametrize("size", [3, 48, 100])
@pytest.mark.parametrize("has_all", [True, False])
def test_embeddings_are_added_and_normed(
    kernels: Library, size: int, format: WeightFormat, has_all: bool
) -> None:
    ops = CppEncoderOps(kernels, format)
    twin = PlainEncoderOps(torch.float32, CPU)
    sizes = (50, 2, 20)
    made = [filled(ops.matrix(size, (n,), precise=True), size, bias=False) for n in sizes]
    tables = Tables(made[0], made[1] if has_all else None, made[2] if has_all else None, 2)
    same = [twin.matrix(size, (n,), precise=True) for n in sizes]
    for one, other in zip(same, made, strict=True):
        one.put(0, other.get(0))
    tokens = torch.tensor([49, 0, 7, 7, 31])
    positions = torch.tensor([0, 1, 17, 0, 1])
    kinds = torch.tensor([0, 1, 1, 0, 0])
    norm = norm_of(size) if has_all else None
    actual = recorded(
        ops,
        lambda: ops.embed_sum(tokens, positions, kinds, tables, norm),
        len(tokens),
        tokens=tokens.data_ptr(),
        positions=positions.data_ptr(),
    )
    twins = Tables(same[0], same[1] if has_all else None, same[2] if has_all else None, 2)
    expected = twin.embed_sum(tokens, positions, kinds, twins, norm)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)


KEPT_TOLERANCES = {KvFormat.F32: 1e-5, KvFormat.BF16: 2e-2, KvFormat.I16: 2e-3}


def attended(
    kernels: Library,
    qkv: Tensor,
    lens: Sequence[int],
    heads: int,
    kept: KvFormat = KvFormat.F32,
    work: EncoderHeads = PLAIN_HEADS,
) -> Tensor:
    ops = CppEncoderOps(kernels, WeightFormat.F32)
    whole = CppBidirectional(heads, qkv.shape[1] // 3 // heads, ops, kept)
    whole.prepare(np.array(lens, np.int32), CPU)
    ops.begin(len(qkv))
    out = whole.forward(qkv, work)
    whole.step.num_tokens = len(qkv)
    ops.finish().run(kernels, whole.step)
    return out.clone()


@pytest.mark.parametrize(("heads", "head_dim"), [(4, 12), (12, 32), (3, 64), (2, 80)])
@pytest.mark.parametrize("lens", [[1], [16, 2, 24, 25], [63, 300, 1, 129], [700, 5]])
@pytest.mark.parametrize("kept", KEPT_TOLERANCES)
def test_tokens_see_their_whole_prompt_and_nothing_else(
    kernels: Library, heads: int, head_dim: int, lens: list[int], kept: KvFormat
) -> None:
    qkv = random(sum(lens), 3 * heads * head_dim)
    actual = attended(kernels, qkv, lens, heads, kept)
    whole = TorchBidirectional(heads)
    whole.prepare(np.array(lens), CPU)
    expected = whole.forward(qkv)
    torch.testing.assert_close(actual, expected, rtol=0, atol=KEPT_TOLERANCES[kept])


def biases_of(heads: int, reach: int) -> Biases:
    biases = empty_biases(heads, reach, PlainEncoderOps(torch.float32, CPU))
    biases.values.copy_(random(*biases.values.shape))
    return biases


@pytest.mark.parametrize("lens", [[1], [16, 2, 24, 25], [63, 300, 1, 129], [700, 5]])
@pytest.mark.parametrize("kept", KEPT_TOLERANCES)
@pytest.mark.parametrize(
    "work",
    [
        EncoderHeads(window=1),
        EncoderHeads(window=65),
        EncoderHeads(biases=biases_of(3, 700)),
        EncoderHeads(scale=0.1, window=20, biases=biases_of(3, 700)),
    ],
    ids=["self", "window", "biases", "both"],
)
def test_distances_change_what_a_token_sees(
    kernels: Library, lens: list[int], kept: KvFormat, work: EncoderHeads
) -> None:
    heads = 3
    qkv = random(sum(lens), 3 * heads * 64)
    actual = attended(kernels, qkv, lens, heads, kept, work)
    whole = TorchBidirectional(heads)
    whole.prepare(np.array(lens), CPU)
    expected = whole.forward(qkv, work)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1.5 * KEPT_TOLERANCES[kept])


@pytest.mark.parametrize("kept", KEPT_TOLERANCES)
def test_what_a_prompt_gets_does_not_depend_on_others(kernels: Library, kept: KvFormat) -> None:
    lens = [20, 300, 70]
    heads = 3
    qkv = random(sum(lens), 3 * heads * 32)
    together = attended(kernels, qkv, lens, heads, kept)
    qkv[:20] = torch.nan
    for part, one in zip(qkv.split(lens)[1:], together.split(lens)[1:], strict=True):
        alone = attended(kernels, part.contiguous(), [len(part)], heads, kept)
        assert torch.equal(alone, one)


def test_the_largest_shorts_have_room_in_their_sums(kernels: Library) -> None:
    """All queries, keys and values are the largest of their rows, for the most dims and keys."""
    dim = MOST_DIMS_OF_SHORTS
    qkv = torch.full((256, 3 * dim), 3.0)
    qkv[:, :dim] = 0.01
    actual = attended(kernels, qkv, [256], 1, KvFormat.I16)
    torch.testing.assert_close(actual, torch.full((256, dim), 3.0), rtol=1e-3, atol=0)


def test_a_picture_with_what_is_no_number_gets_none(kernels: Library) -> None:
    qkv = random(40, 3 * 64)
    qkv[7, 70] = torch.inf  # of a key
    assert not attended(kernels, qkv, [40], 1, KvFormat.I16).isfinite().any()
