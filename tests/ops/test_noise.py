from __future__ import annotations

import numpy as np
import pytest
import torch

from weft.ops.noise import gumbel, row_keys

MASK = 0xFFFFFFFF


def draw(seeds: list[int], positions: list[int], num_tokens: int) -> torch.Tensor:
    keys = row_keys(np.array(seeds, dtype=np.int64), np.array(positions, dtype=np.int32))
    return gumbel(torch.from_numpy(keys), num_tokens)


def splitmix_twin(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return x ^ (x >> 31)


def gumbel_twin(seed: int, position: int, token: int) -> float:
    key = splitmix_twin(splitmix_twin(seed & (2**64 - 1)) ^ position)
    x = (token * 0x9E3779B9 + (key & MASK)) & MASK
    x ^= x >> 16
    x = (x * 0x21F0AAAD + (key >> 32)) & MASK
    x ^= x >> 15
    x = (x * 0xD35A2D97) & MASK
    x ^= x >> 15
    u = min(((x & 0x7FFFFFFF) + 0.5) / 2**31, 1 - 2**-24)
    return float(-np.log(-np.log1p(-u)))


def test_noise_is_the_function_that_it_says():
    cases = [(0, 0), (1, 5), (-1, 100_000), (2**62, 17), (-(2**63), 2**31 - 1)]
    actual = draw([seed for seed, _ in cases], [position for _, position in cases], 50)
    expected = [
        [gumbel_twin(seed, position, token) for token in range(50)] for seed, position in cases
    ]
    assert np.allclose(actual.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_noise_of_a_row_does_not_depend_on_the_others_or_the_vocabulary():
    together = draw([1, 2, 3], [9, 9, 10], 1_000)
    assert torch.equal(together[1:2], draw([2], [9], 1_000))
    assert torch.equal(together[2:, :77], draw([3], [10], 77))


def test_noise_is_gumbel_distributed_and_always_finite():
    noise = draw([3] * 500, list(range(500)), 2_000).double()
    assert noise.isfinite().all()
    assert abs(float(noise.mean()) - np.euler_gamma) < 5e-3
    assert abs(float(noise.var()) - np.pi**2 / 6) < 1e-2
    for value in (-1.0, 0.0, 2.0, 5.0, 8.0):  # the tail is what decides
        probability = 1 - np.exp(-np.exp(-value))
        deviation = np.sqrt(probability * (1 - probability) / noise.numel())
        assert abs(float((noise > value).double().mean()) - probability) < 5 * deviation


def test_the_largest_hash_gives_small_noise_and_not_minus_infinity():
    """Here u would be rounded to 1: a token that is alone after top-k could not be drawn."""
    assert float(draw([0], [227], 43_855)[0, 43_854]) == pytest.approx(-np.log(24 * np.log(2)))


def test_noise_of_neighbours_is_not_related():
    """Of successive positions, of successive seeds, and of successive tokens."""
    positions = draw([7] * 2_000, list(range(2_000)), 100)
    seeds = draw(list(range(2_000)), [7] * 2_000, 100)
    pairs = [
        (positions[1:], positions[:-1]),
        (seeds[1:], seeds[:-1]),
        (seeds[:, 1:], seeds[:, :-1]),
    ]
    for one, other in pairs:
        correlation = torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1]
        assert abs(float(correlation)) < 5 / np.sqrt(one.numel())
