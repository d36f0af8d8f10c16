from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from weft.ops.cpp import abi
from weft.ops.cpp.abi import KvFormat
from weft.ops.cpp.library import Library
from weft.ops.quantize import quantize_int8

pytestmark = pytest.mark.pairs

HEADS = 5
KV_HEADS = 3
NUM_SLOTS = 40
DTYPES = {KvFormat.F32: torch.float32, KvFormat.BF16: torch.bfloat16, KvFormat.I8: torch.int8}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, D]; cos and sin [T, rotary_dim / 2]"""
    half = cos.shape[1]
    first = x[..., :half]
    second = x[..., half : 2 * half]
    rest = x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


class Case:
    def __init__(
        self, num_tokens: int, head_dim: int, rotary_dim: int, format: KvFormat, norm: bool
    ) -> None:
        random = torch.Generator().manual_seed(num_tokens + head_dim)
        self.head_dim = head_dim
        self.format = format
        self.eps = 1e-6
        self.qkv = torch.randn(num_tokens, HEADS + 2 * KV_HEADS, head_dim, generator=random)
        self.positions = torch.randint(100, (num_tokens,), generator=random)
        self.slots = torch.randperm(NUM_SLOTS, generator=random)[:num_tokens]
        self.norms = [torch.rand(head_dim, generator=random) + 0.5 for _ in "qk"] if norm else []
        angles = torch.arange(100)[:, None] * torch.rand(rotary_dim // 2, generator=random)
        self.cos, self.sin = angles.cos().contiguous(), angles.sin().contiguous()
        self.rotary_dim = rotary_dim
        self.side_by_side = False
        self.q_scale: Tensor | None = None
        shape = (NUM_SLOTS, KV_HEADS, head_dim)
        self.k, self.v = (torch.full(shape, 77, dtype=DTYPES[format]) for _ in "kv")
        self.k_scale, self.v_scale = (
            torch.full(shape[:2], torch.nan),
            torch.full(shape[:2], torch.nan),
        )

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [T, .., D] in float64"""
        q, k, v = self.qkv.double().split_with_sizes([HEADS, KV_HEADS, KV_HEADS], dim=1)
        if self.norms:
            q, k = (
                torch.nn.functional.rms_norm(x, x.shape[-1:], w.double(), self.eps)
                for x, w in zip((q, k), self.norms, strict=True)
            )
        cos = self.cos[self.positions].double()
        sin = self.sin[self.positions].double()
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def run(self, kernels: Library) -> Tensor:
        """q as it was written back; k and v go to the cache"""
        num_tokens = len(self.qkv)
        size = (HEADS + 2 * KV_HEADS) * self.head_dim
        qkv = torch.full((num_tokens, size + 3), torch.nan)
        qkv[:, :size] = self.qkv.flatten(1)
        pointers = (x.data_ptr() for x in (self.k, self.v, self.k_scale, self.v_scale))
        cache = abi.KvCache(self.format, KV_HEADS, self.head_dim, *pointers)
        norms = [w.data_ptr() for w in self.norms] or [0, 0]  # null: no norm
        args = abi.RotaryStoreArgs(
            ctypes.addressof(cache), qkv.data_ptr(), size + 3, HEADS, *norms, self.eps, self.rotary_dim,
            self.cos.data_ptr(), self.sin.data_ptr(), self.side_by_side,
            None if self.q_scale is None else self.q_scale.data_ptr(),
        )  # fmt: skip
        step = abi.StepArgs(
            num_tokens=num_tokens, positions=self.positions.data_ptr(), slots=self.slots.data_ptr()
        )
        kernels.run_one(args, step)
        return qkv[:, : HEADS * self.head_dim].view(num_tokens, HEADS, self.head_dim)

    def untouched(self) -> Tensor:
        return torch.ones(NUM_SLOTS, dtype=torch.bool).index_fill(0, self.slots, False)


@pytest.mark.parametrize("format", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(128, 128), (64, 64), (80, 32), (34, 34), (96, 0)]
)
def test_heads_are_normalised_rotated_and_stored(
    kernels: Library, head_dim: int, rotary_dim: int, norm: bool, format: KvFormat
) -> None:
    case = Case(13, head_dim, rotary_dim, format, norm)
    q, k, v = case.expected()
    torch.testing.assert_close(case.run(kernels).double(), q, rtol=0, atol=1e-5)
    for stored, scale, expected in ((case.k, case.k_scale, k), (case.v, case.v_scale, v)):
        assert (stored[case.untouched()] == 77).all()
        assert scale[case.untouched()].isnan().all()
        here = stored[case.slots].double()
        if format == KvFormat.I8:
            torch.testing.assert_close(
                scale[case.slots].double(), expected.abs().amax(-1) / 127, rtol=1e-5, atol=0
            )
            assert (here.abs().amax(-1) == 127).all()
            here *= scale[case.slots][..., None]
            assert ((here - expected).abs() <= 0.501 * scale[case.slots][..., None]).all()
        else:
            rtol = {KvFormat.F32: 1e-5, KvFormat.BF16: 2**-8}[format]
            torch.testing.assert_close(here, expected, rtol=rtol, atol=1e-5)


def test_bf16_is_rounded_to_the_nearest(kernels: Library) -> None:
    case = Case(9, 96, 0, KvFormat.BF16, norm=False)
    case.run(kernels)
    k = case.qkv[:, HEADS : HEADS + KV_HEADS]
    v = case.qkv[:, HEADS + KV_HEADS :]
    assert torch.equal(case.k[case.slots], k.bfloat16())
    assert torch.equal(case.v[case.slots], v.bfloat16())


def test_bytes_are_those_of_the_specification(kernels: Library) -> None:
    case = Case(9, 80, 0, KvFormat.I8, norm=False)
    case.qkv = (case.qkv * 64).round() / 64
    case.qkv[..., 5] = (
        127 / 32
    )  # the largest: scales are powers of two, and nothing is rounded in between
    case.run(kernels)
    expected, scales = quantize_int8(case.qkv[:, HEADS : HEADS + KV_HEADS].flatten(0, 1))
    assert torch.equal(case.k_scale[case.slots].flatten(), scales)
    assert torch.equal(case.k[case.slots].flatten(0, 1), expected)


def test_a_row_that_is_not_finite_stays_so(kernels: Library) -> None:
    for bad in (torch.nan, torch.inf):
        case = Case(2, 64, 0, KvFormat.I8, norm=False)
        case.qkv[1, HEADS, 7] = bad
        case.run(kernels)
        assert not case.k_scale[case.slots[1], 0].isfinite()
        assert case.k_scale[case.slots[0]].isfinite().all()


def test_a_row_of_zeros_is_stored_as_zeros(kernels: Library) -> None:
    case = Case(1, 64, 0, KvFormat.I8, norm=False)
    case.qkv.zero_()
    case.run(kernels)
    assert (case.k[case.slots] == 0).all()
    assert (case.k_scale[case.slots] == 0).all()


def test_no_tokens_are_no_work(kernels: Library) -> None:
    case = Case(0, 64, 64, KvFormat.F32, norm=True)
    case.run(kernels)
    assert (case.k == 77).all()


def test_pairs_side_by_side_and_queries_that_grow(kernels: Library) -> None:
    case = Case(13, 80, 32, KvFormat.F32, norm=True)
    case.side_by_side = True
    case.q_scale = torch.linspace(1, 2, 100)
    turned = case.expected()[:2]
    # Half-split pairs of values that were put in halves, put back.
    order = torch.cat((torch.arange(0, 32, 2), torch.arange(1, 32, 2), torch.arange(32, 80)))
    back = torch.argsort(order)
    plain = Case(13, 80, 32, KvFormat.F32, norm=True)
    plain.qkv = case.qkv[..., order]
    plain.norms = [weight[order] for weight in case.norms]
    q, k, _ = plain.expected()
    scale = case.q_scale[case.positions].double()[:, None, None]
    assert not torch.allclose(q[..., back], turned[0])
    torch.testing.assert_close(case.run(kernels).double(), q[..., back] * scale, rtol=0, atol=2e-5)
    torch.testing.assert_close(case.k[case.slots].double(), k[..., back], rtol=0, atol=2e-5)
