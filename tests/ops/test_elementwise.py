"""Each operation against a twin in numpy and float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from weft.ops.elementwise import apply_rotary, gate_and_mul, rms_norm, rotary_angles, rotary_tables

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE)


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def assert_close(actual: torch.Tensor, expected: np.ndarray) -> None:
    assert (
        np.abs(actual.double().numpy() - expected).max()
        <= TOLERANCE[actual.dtype] * np.abs(expected).max()
    )


@DTYPES
def test_rms_norm(dtype):
    x = random(5, 3, 48, dtype=dtype)
    weight = random(48, dtype=dtype)
    wide = x.double().numpy()
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight.double().numpy()
    assert_close(rms_norm(x, weight, 1e-5), expected)


@DTYPES
def test_silu_and_mul(dtype):
    x = random(5, 64, dtype=dtype)
    gate, up = np.split(x.double().numpy(), 2, axis=-1)
    assert_close(gate_and_mul(x, "silu"), gate / (1 + np.exp(-gate)) * up)


@DTYPES
def test_rotary_turns_pairs_as_complex_numbers(dtype):
    x = random(4, 3, 16, dtype=dtype)
    positions = torch.tensor([0, 1, 7, 100])
    inv_freq = 0.1 ** torch.arange(8).float()
    wide = x.double().numpy()
    turn = 1.25 * np.exp(1j * np.outer(positions.numpy(), inv_freq.double().numpy()))[:, None]
    turned = (wide[..., :8] + 1j * wide[..., 8:]) * turn
    actual = apply_rotary(x, *rotary_tables(*rotary_angles(positions, inv_freq, 1.25), dtype))
    assert actual.dtype == dtype
    error = np.abs(actual.double().numpy() - np.concatenate((turned.real, turned.imag), -1)).max()
    assert error <= (2e-2 if dtype == torch.bfloat16 else 1e-5) * np.abs(turned).max()
