"""`TritonOps` against `PlainOps`: torch's products as they run on this processor, everything else
by the kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from weft.ops.plain import PlainOps, QuantizedMatrix
from weft.ops.protocol import Matrix, Norm, Ops
from weft.ops.quantize import FP8, floats
from weft.ops.triton.ops import TritonOps

CPU = torch.device("cpu")
IN = 64
SIZES = (48, 48)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def filled(matrix: Matrix) -> Matrix:
    for part, size in enumerate(SIZES):
        matrix.put(part, random(size, IN) + 0.1 * part)
        matrix.put_bias(part, random(size + part)[:size])
    return matrix


def both(format: str) -> tuple[tuple[TritonOps, Matrix], tuple[PlainOps, Matrix]]:
    ours = TritonOps(torch.float32, CPU, format)
    twin = PlainOps(torch.float32, CPU, format)
    return (ours, filled(ours.matrix(IN, SIZES, bias=True))), (
        twin,
        filled(twin.matrix(IN, SIZES, bias=True)),
    )


@pytest.mark.parametrize(
    ("format", "tolerance"), [("", 1e-5), ("int4", 0.03), ("int8", 0.03), ("fp8", 0.15)]
)
@pytest.mark.parametrize("num", [1, 20])
def test_products_are_those_of_the_twin(format: str, tolerance: float, num: int) -> None:
    """Errors relative to the largest output: eight bits round activations, too, row by row where
    the twin does it 32 inputs at a time, four bits round none; and what the interpreter does to
    those of fp8 tells `eight_bits.py`."""
    (ours, mine), (twin, theirs) = both(format)
    x = random(num, IN)
    norm = Norm(random(IN), 1e-6)
    before = random(num, sum(SIZES))

    def outputs(ops: Ops, matrix: Matrix) -> list[torch.Tensor]:
        normed = ops.norm(x, norm)
        activations = [
            ops.linear(x, matrix),
            ops.linear(normed, matrix),
            before.clone() + ops.linear(x, matrix),
            before.clone() + ops.linear(normed, matrix),
            ops.gated(normed, matrix),
            ops.logits(normed, matrix),
            normed,
        ]
        return [ops.computed(one) for one in activations]

    for got, want in zip(outputs(ours, mine), outputs(twin, theirs), strict=True):
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=0, atol=tolerance * float(want.abs().max()))


def test_products_of_eight_bit_floats_are_exact_where_activations_are() -> None:
    (ours, mine), _ = both("fp8")
    x = torch.randint(-7, 8, (5, IN), generator=torch.Generator().manual_seed(0)).float()
    x[:, 0] = (
        7.0  # the scale of each row is 7 / 448, so every activation is an integer of up to three bits
    )
    want = x @ torch.cat([mine.get(0), mine.get(1)]).T + torch.cat(
        [mine.get_bias(0), mine.get_bias(1)]
    )
    torch.testing.assert_close(
        ours.computed(ours.linear(x, mine)), want, rtol=2**-7, atol=2**-7
    )  # it is given in bfloat16


@pytest.mark.parametrize("num", [1, 20])
def test_rows_are_scaled_within_the_product_of_fp8_or_behind_it(num: int) -> None:
    ours = TritonOps(torch.float32, CPU, "fp8")
    x = random(num, IN)
    matrix = ours.matrix(IN, SIZES)
    for part, size in enumerate(SIZES):
        matrix.put(part, random(size, IN))
    within = ours.computed(ours.linear(x, matrix))
    behind = ours.computed(torch.zeros(num, sum(SIZES)) + ours.linear(x, matrix))
    torch.testing.assert_close(
        within, behind, rtol=2**-6, atol=1e-3
    )  # each is rounded to bfloat16 once
    ours._scales_rows = False
    assert torch.equal(ours.computed(ours.linear(x, matrix)), behind)


def test_embeddings_and_heads_have_integers_of_eight_bits_with_every_format() -> None:
    for format in ("fp8", "int8", "int4"):
        matrix = TritonOps(torch.float32, CPU, format).matrix(IN, SIZES, precise=True)
        assert isinstance(matrix, QuantizedMatrix)
        assert matrix.format == "int8"


@pytest.mark.parametrize("format", ["", "fp8", "int8", "int4"])
def test_what_was_put_is_embedded_and_given_back(format: str) -> None:
    (ours, mine), _ = both(format)
    tokens = torch.tensor([3, 50, 3])
    got = ours.computed(ours.embed(tokens, mine))
    part = mine.get(0)
    row = random(SIZES[0], IN)
    torch.testing.assert_close(got[0], part[3])
    torch.testing.assert_close(got[1], mine.get(1)[2])
    torch.testing.assert_close(part, row, rtol=0, atol={"": 0.0, "int4": 0.5}.get(format, 0.2))
    assert torch.equal(mine.get_bias(1), random(SIZES[1] + 1)[: SIZES[1]])


def test_a_single_part_can_be_put_anew_in_pieces() -> None:
    ours = TritonOps(torch.float32, CPU, "int8")
    matrix = ours.matrix(IN, (128, 32))
    rows = random(128, IN)
    for start in (64, 0):
        matrix.put(0, rows[start : start + 64], start)
    matrix.put(1, random(32, IN))
    torch.testing.assert_close(matrix.get(0, 64), rows[64:], rtol=0, atol=0.02)
    assert sum(tensor.numel() * tensor.element_size() for tensor in ours.tensors) == 160 * (IN + 4)


def test_sizes_that_the_products_do_not_take_are_kept_as_they_are() -> None:
    ours = TritonOps(torch.float32, CPU, "fp8")
    matrix = ours.matrix(IN, (17,))
    rows = random(17, IN)
    matrix.put(0, rows)
    assert torch.equal(matrix.get(0), rows)


def test_an_unknown_format_is_named() -> None:
    with pytest.raises(ValueError, match="int3; they can in fp8, int8, int4"):
        TritonOps(torch.float32, CPU, "int3")


def test_every_float_of_eight_bits_is_widened_to_itself() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(FP8).view(16, 16)
    torch.testing.assert_close(
        floats(values.t()), values.t().float(), rtol=0, atol=0, equal_nan=True
    )
