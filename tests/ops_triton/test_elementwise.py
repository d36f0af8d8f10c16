from __future__ import annotations

import pytest
import torch

from tests.ops_triton.eight_bits import carried
from weft.ops import elementwise as twin
from weft.ops.protocol import Norm
from weft.ops.quantize import quantize_fp8, quantize_int8
from weft.ops.triton.elementwise import quantize_rows, rms_norm, scaled, silu_and_mul

SIZES = [1, 16, 100, 1_025, 3_000]


def rows(num: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(num, size, generator=torch.Generator().manual_seed(size)).mul_(4).to(dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_are_normed(size: int, dtype: torch.dtype) -> None:
    x = rows(3, size, dtype)
    norm = Norm(rows(1, size, dtype)[0], 1e-6)
    torch.testing.assert_close(rms_norm(x, norm), twin.rms_norm(x, *norm))


@pytest.mark.parametrize("size", SIZES)
def test_the_gate_is_applied(size: int) -> None:
    x = rows(3, 2 * size)
    x[0, 0], x[1, 0] = -85.0, 85.0
    torch.testing.assert_close(silu_and_mul(x), twin.gate_and_mul(x, "silu"))


@pytest.mark.parametrize("size", SIZES)
def test_rows_become_integers_as_weights_do(size: int) -> None:
    x = rows(3, size)
    x[1] = 0
    kept, scales = quantize_rows(x, torch.int8, least_rows=8)
    assert len(kept) == len(scales) == 8
    want, want_scales = quantize_int8(x)
    assert torch.equal(kept[:3], want)
    torch.testing.assert_close(scales[:3], want_scales)


@pytest.mark.parametrize("size", SIZES)
def test_rows_become_floats_of_eight_bits_as_weights_do(size: int) -> None:
    x = rows(3, size)
    x[1] = 0
    kept, scales = quantize_rows(x, torch.float8_e4m3fn)
    want, want_scales = quantize_fp8(x)
    assert torch.equal(carried(kept.float(), want.float()), want.float())
    torch.testing.assert_close(scales, want_scales)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter, about NaN
def test_a_row_with_nan_has_no_scale_and_leaves_others_alone(dtype: torch.dtype) -> None:
    x = rows(3, 100)
    _, want = quantize_rows(x, dtype)
    x[1, 7] = torch.nan
    _, scales = quantize_rows(x, dtype)
    assert scales[1].isnan()
    assert torch.equal(scales[[0, 2]], want[[0, 2]])


def test_norm_and_quantisation_are_one_pass() -> None:
    x = rows(3, 100)
    norm = Norm(rows(1, 100)[0], 1e-6)
    kept, scales = quantize_rows(x, torch.int8, norm)
    torch.testing.assert_close(
        kept * scales[:, None], twin.rms_norm(x, *norm), rtol=0, atol=float(scales.max()) * 0.51
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("add", [True, False])
def test_integer_sums_become_activations(size: int, add: bool) -> None:
    random = torch.Generator().manual_seed(size)
    sums = torch.randint(-100_000, 100_000, (8, size), generator=random).int()
    row_scales, scales, bias, before = (
        torch.rand(8, generator=random),
        *(rows(1, size)[0] for _ in "ab"),
        rows(3, size),
    )
    want = sums[:3] * row_scales[:3, None] * scales + bias
    out = scaled(sums, row_scales, scales, bias, before.clone(), add)
    torch.testing.assert_close(out, want + before if add else want, rtol=1e-5, atol=0.05)
