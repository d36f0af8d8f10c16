from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from weft.ops.cpp import abi
from weft.ops.cpp.abi import Epilogue, WeightFormat
from weft.ops.cpp.library import Library
from weft.ops.quantize import dequantize, quantize_int4, quantize_int8

BYTES = {WeightFormat.F32: 4.0, WeightFormat.BF16: 2.0, WeightFormat.I8: 1.0, WeightFormat.I4: 0.5}
FORMATS = tuple(WeightFormat)


@dataclass
class Packed:
    """A weight in the kernels' layout, made of parts below each other, or of a gate and an up part."""

    library: Library
    parts: list[Tensor]
    format: WeightFormat
    gated: bool = False
    group: int = 32
    weight: abi.PackedWeight = field(init=False)

    def __post_init__(self) -> None:
        in_size = self.parts[0].shape[1]
        out_size = sum(len(part) for part in self.parts)
        num_panels = 2 * -(-out_size // 2 // 32) if self.gated else -(-out_size // 32)
        padded_in = -(-in_size // 64) * 64
        self.panels = torch.zeros(
            int(num_panels * 32 * padded_in * BYTES[self.format]), dtype=torch.uint8
        )
        self.scales = torch.zeros(
            num_panels * 32 * (padded_in // self.group if self.format == WeightFormat.I4 else 1)
        )
        self.sums = torch.zeros(num_panels * 32, dtype=torch.int32)
        pointers = (self.panels.data_ptr(), self.scales.data_ptr(), self.sums.data_ptr())
        self.weight = abi.PackedWeight(
            self.format, in_size, out_size, padded_in, self.group, *pointers
        )
        for index, part in enumerate(self.parts):
            self.library.pack(self.pack_args(index, part.contiguous()))

    def pack_args(self, index: int, matrix: Tensor) -> abi.PackArgs:
        self.keep = matrix
        first = 32 * index if self.gated else sum(len(part) for part in self.parts[:index])
        is_bf16 = matrix.dtype == torch.bfloat16
        return abi.PackArgs(
            self.address, matrix.data_ptr(), is_bf16, len(matrix), first, 2 if self.gated else 1
        )

    @property
    def address(self) -> int:
        return ctypes.addressof(self.weight)

    def unpacked(self) -> list[Tensor]:
        """The parts as the packed weight has them."""
        outs = [torch.full(part.shape, torch.nan) for part in self.parts]
        for index, out in enumerate(outs):
            self.library.unpack(self.pack_args(index, out))
        return outs

    def linear(
        self,
        x: Tensor,
        norm: Tensor | None = None,
        bias: Tensor | None = None,
        add: Tensor | None = None,
        threads: int | None = None,
    ) -> Tensor:
        """Into a matrix with more columns and rows than are written: the others must stay as they are."""
        columns = self.weight.out_size // 2 if self.gated else self.weight.out_size
        y = torch.full((len(x) + 1, columns + 3), torch.nan)
        if add is not None:
            y[: len(x), :columns] = add
        epilogue = (
            Epilogue.GATED_SILU if self.gated else Epilogue.STORE if add is None else Epilogue.ADD
        )
        wide = torch.full(
            (len(x), x.shape[1] + 5), torch.nan
        )  # what is behind a row must not matter
        wide[:, : x.shape[1]] = x
        scratch = torch.full(
            (len(x) * (4 * self.weight.padded_in + 64 + 4 * self.weight.padded_in // 32) + 64,), 255
        )
        scratch = scratch.to(torch.uint8)
        args = abi.LinearArgs(
            weight=self.address,
            x=wide.data_ptr(),
            x_stride=wide.stride(0),
            norm_weight=None if norm is None else norm.data_ptr(),
            eps=1e-6,
            bias=None if bias is None else bias.data_ptr(),
            epilogue=epilogue,
            y=y.data_ptr(),
            y_stride=y.stride(0),
            scratch=-(-scratch.data_ptr() // 64) * 64,
        )
        before = torch.get_num_threads()
        torch.set_num_threads(threads or before)
        self.library.run_one(args, abi.StepArgs(num_tokens=len(x)))
        torch.set_num_threads(before)
        assert y[len(x) :].isnan().all(), "written beyond its rows"
        assert y[:, columns:].isnan().all(), "written beyond its columns"
        return y[: len(x), :columns]

    def expected(self, x: Tensor, norm: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """W norm(x) + bias in float64, with the input in the precision that the kernel gives it. Bias: one per part."""
        x = x.double()
        if norm is not None:
            x = x / (x.square().mean(dim=1, keepdim=True) + 1e-6).sqrt() * norm.double()
        if self.format in (WeightFormat.I8, WeightFormat.I4):
            scales = x.abs().amax(dim=1, keepdim=True) / 127
            x = (x / torch.where(scales == 0, 1, scales)).round() * scales
        elif self.format == WeightFormat.BF16 and "bf16" in self.library.instruction_set:
            x = x.float().bfloat16().double()
        y = x @ torch.cat(self.unpacked()).double().T
        return y if bias is None else y + bias.double()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def close(actual: Tensor, expected: Tensor, packed: Packed, size: Tensor | None = None) -> bool:
    """Relative to the largest of each row, or to `size`."""
    # A value next to a half may be rounded either way when activations are made bytes or bfloat16.
    tolerance = 2e-5 if packed.format == WeightFormat.F32 else 4e-3
    size = expected.abs().amax(dim=1, keepdim=True) if size is None else size
    return bool(((actual - expected).abs() <= tolerance * size).all())


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("format", [WeightFormat.F32, WeightFormat.BF16])
@pytest.mark.parametrize("in_size", [1, 63, 64, 130])
def test_float_weights_come_back_exactly_wherever_their_parts_begin(kernels, format, in_size):
    parts = [random(rows, in_size).bfloat16() for rows in (40, 1, 23, 70)]
    for source in (parts, [part.float() for part in parts]):
        packed = Packed(kernels, source, format)
        for part, unpacked in zip(parts, packed.unpacked(), strict=True):
            assert torch.equal(unpacked, part.float())


def test_floats_round_to_the_nearest_bfloat16(kernels):
    matrix = random(37, 100)
    assert torch.equal(
        Packed(kernels, [matrix], WeightFormat.BF16).unpacked()[0], matrix.bfloat16().float()
    )


@pytest.mark.parametrize("in_size", [1, 100, 192])
def test_eight_bits_are_those_of_the_plain_twin(kernels, in_size):
    parts = [random(40, in_size), random(33, in_size), torch.zeros(3, in_size)]
    packed = Packed(kernels, parts, WeightFormat.I8)
    for part, unpacked in zip(parts, packed.unpacked(), strict=True):
        twin = dequantize(*quantize_int8(part))
        step = part.abs().amax(dim=1, keepdim=True) / 127
        assert ((unpacked - part).abs() <= 0.5001 * step).all()
        assert (
            (unpacked - twin).abs() <= 1e-5 * step + 1e-9
        ).float().mean() > 0.999  # but for ties
    whole = torch.cat(packed.unpacked())
    scales = packed.scales[: len(whole)]
    bytes_ = (whole / torch.where(scales == 0, 1, scales)[:, None]).round()
    assert torch.equal(packed.sums[: len(whole)], (bytes_.sum(dim=1) * 128).int())


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("in_size", [1, 100, 256])
def test_four_bits_lose_no_more_than_the_usual_scale(kernels, group, in_size):
    parts = [random(40, in_size), random(33, in_size), torch.zeros(3, in_size)]
    packed = Packed(kernels, parts, WeightFormat.I4, group=group)
    for part, unpacked in zip(parts, packed.unpacked(), strict=True):
        padded = torch.nn.functional.pad(part, (0, -in_size % group)).view(len(part), -1, group)
        scale = (padded.abs().amax(dim=2, keepdim=True) / 7.5).clamp(min=1e-9)
        usual = (padded / scale).round().clamp(-8, 7) * scale
        lost = (
            torch.nn.functional.pad(unpacked - part, (0, -in_size % group))
            .view_as(padded)
            .square()
            .sum(dim=2)
        )
        lost_usually = (usual - padded).square().sum(dim=2)
        assert (lost <= 1.02 * lost_usually + 1e-9).all()
        assert lost.sum() <= 0.93 * lost_usually.sum() + 1e-9


def test_four_bits_are_better_than_those_of_the_plain_twin(kernels):
    matrix = random(64, 512)
    unpacked = Packed(kernels, [matrix], WeightFormat.I4, group=64).unpacked()[0]
    twin = dequantize(*quantize_int4(matrix))
    assert (unpacked - matrix).square().sum() <= (twin - matrix).square().sum()


@pytest.mark.parametrize("format", FORMATS)
def test_what_fills_up_a_weight_is_zero(kernels, format):
    packed = Packed(kernels, [torch.ones(33, 70)], format)
    if format in (WeightFormat.F32, WeightFormat.BF16):
        dtype = torch.float32 if format == WeightFormat.F32 else torch.bfloat16
        assert packed.panels.view(dtype).float().sum() == 33 * 70
    elif format == WeightFormat.I8:
        assert packed.panels.view(torch.int8).int().sum() == 33 * 70 * 127
        assert (packed.scales[33:] == 0).all()
        assert (packed.sums[33:] == 0).all()
    else:
        scales = packed.scales.view(2, 4, 32)
        assert (scales[1, :, 1:] == 0).all()
        assert (scales[:, 3] == 0).all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("units", [1, 48, 64])
def test_gate_and_up_alternate_by_panel(kernels, format, units):
    parts = [random(units, 100), random(units, 100, seed=1)]
    gated, plain = (
        Packed(kernels, parts, format, gated=True),
        [Packed(kernels, [part], format) for part in parts],
    )
    for part, alone in zip(gated.unpacked(), plain, strict=True):
        assert torch.equal(part, alone.unpacked()[0])
    panels = [packed.panels.view(-(-units // 32), -1) for packed in plain]
    assert torch.equal(gated.panels.view(-1, 2, panels[0].shape[1])[:, 1], panels[1])


@pytest.mark.parametrize("interleave", [1, 2])
def test_rows_may_be_put_and_read_in_pieces(kernels, interleave):
    rows = random(100, 70)
    packed = Packed(
        kernels,
        [rows, rows] if interleave == 2 else [rows],
        WeightFormat.BF16,
        gated=interleave == 2,
    )
    whole = packed.panels.clone()
    packed.panels.zero_()
    for part in range(interleave):
        for start, stop in ((0, 5), (5, 40), (40, 64), (64, 100)):
            piece = rows[start:stop].contiguous()
            first = 32 * part + start // 32 * 32 * interleave + start % 32
            args = abi.PackArgs(
                packed.address, piece.data_ptr(), False, stop - start, first, interleave
            )
            kernels.pack(args)
            args.matrix = (out := torch.full_like(piece, torch.nan)).data_ptr()
            kernels.unpack(args)
            assert torch.equal(out, piece.bfloat16().float())
    assert torch.equal(packed.panels, whole)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("in_size", [1, 70, 320])
def test_embedding_gathers_the_rows_of_the_tokens(kernels, format, in_size):
    table = Packed(kernels, [random(100, in_size)], format)
    tokens = torch.tensor([0, 99, 31, 32, 0, 64])
    out = torch.full((7, in_size), torch.nan)
    step = abi.StepArgs(num_tokens=6, tokens=tokens.data_ptr())
    kernels.run_one(abi.EmbedArgs(table.address, out.data_ptr()), step)
    assert torch.equal(out[:6], table.unpacked()[0][tokens])
    assert out[6].isnan().all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("in_size", [1, 70, 600])
def test_embedding_takes_vectors_of_the_step_for_tokens_below_zero(kernels, format, in_size):
    table, vectors = Packed(kernels, [random(100, in_size)], format), random(3, in_size)
    tokens = torch.tensor([-3, 99, -1, 5, -2, -2])
    out = torch.full((7, in_size), torch.nan)
    step = abi.StepArgs(num_tokens=6, tokens=tokens.data_ptr(), vectors=vectors.data_ptr())
    kernels.run_one(abi.EmbedArgs(table.address, out.data_ptr()), step)
    rows = table.unpacked()[0]
    assert torch.equal(
        out[:6], torch.stack([vectors[2], rows[99], vectors[0], rows[5], vectors[1], vectors[1]])
    )
    assert out[6].isnan().all()


# ---------------------------------------------------------------- norm


@pytest.mark.parametrize("size", [1, 17, 64, 200])
def test_norm_is_the_plain_twin(kernels, size):
    x, weight = 10 * random(5, size), random(size)
    wide, out = (
        torch.nn.functional.pad(x, (0, 3), value=torch.nan),
        torch.full((6, size + 2), torch.nan),
    )
    pointers = (wide.data_ptr(), weight.data_ptr(), out.data_ptr())
    kernels.run_one(
        abi.NormArgs(*pointers, size, size + 3, size + 2, 1e-6), abi.StepArgs(num_tokens=5)
    )
    expected = x / (x.square().mean(dim=1, keepdim=True) + 1e-6).sqrt() * weight
    assert torch.allclose(out[:5, :size], expected, rtol=1e-5)
    assert out[5].isnan().all()
    assert out[:, size:].isnan().all()


@pytest.mark.parametrize("size", [17, 64, 200])
def test_a_row_whose_squares_leave_the_range_of_floats_is_no_row_of_zeros(kernels, size):
    x, weight, out = random(3, size), random(size), torch.zeros(3, size)
    x[1, -1] = 3.4e38
    pointers = (x.data_ptr(), weight.data_ptr(), out.data_ptr())
    kernels.run_one(abi.NormArgs(*pointers, size, size, size, 1e-6), abi.StepArgs(num_tokens=3))
    assert out.isfinite().all(dim=1).tolist() == [True, False, True]
    assert out[1].isnan().all()


# ---------------------------------------------------------------- linear


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("in_size", "out_size"), [(1, 1), (64, 32), (100, 70), (576, 200)])
def test_linear_is_the_plain_twin_for_any_size(kernels, format, in_size, out_size):
    packed = Packed(kernels, [random(out_size, in_size)], format)
    for num_tokens in (1, 2, 3, 4, 11, 13, 30, 100):
        x = random(num_tokens, in_size)
        actual = packed.linear(x)
        assert close(actual, packed.expected(x), packed), num_tokens


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_linear_normalises_and_adds(kernels, format, num_tokens):
    packed = Packed(kernels, [random(70, 300)], format, group=64)
    x, norm, bias, residual = (
        random(num_tokens, 300),
        random(300),
        random(96),
        random(num_tokens, 70),
    )
    expected = packed.expected(x, norm, bias[:70])
    assert close(packed.linear(x, norm, bias), expected, packed)
    assert close(packed.linear(x, norm, bias, add=residual) - residual, expected, packed)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("in_size", [64, 100, 300])
def test_a_row_that_is_not_finite_stays_so_and_harms_no_other(kernels, format, in_size):
    """Wherever in the row it is: places that are filled up must not hide it."""
    packed = Packed(kernels, [random(70, in_size)], format)
    x, norm = random(5, in_size), random(in_size)
    for weight, bad in itertools.product((None, norm), (torch.nan, torch.inf, -torch.inf, 3.4e38)):
        if weight is None and bad == 3.4e38:
            continue  # nothing is wrong with it before it is squared
        expected = packed.linear(x, weight)
        for place in (0, in_size // 2, in_size - 1):
            spoilt = x.clone()
            spoilt[2, place] = bad
            actual = packed.linear(spoilt, weight)
            assert not actual[2].isfinite().any(), (bad, place)
            others = [0, 1, 3, 4]
            assert torch.equal(actual[others], expected[others])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("units", [1, 48, 96])
def test_gated_linear_writes_one_column_for_each_unit(kernels, format, units):
    packed = Packed(kernels, [random(units, 130), random(units, 130, seed=1)], format, gated=True)
    padded = -(-units // 32) * 32
    biases = torch.zeros(2, padded)
    biases[:, :units] = random(2, units)
    in_panels = biases.view(2, -1, 32).transpose(0, 1).contiguous()
    for num_tokens in (1, 2, 7, 40):
        x, norm = random(num_tokens, 130), random(130)
        gate, up = packed.expected(x, norm, biases[:, :units].flatten()).split(units, dim=1)
        expected, size = torch.nn.functional.silu(gate) * up, gate.abs().amax() * up.abs().amax()
        assert close(packed.linear(x, norm, in_panels), expected, packed, size), num_tokens


@pytest.mark.parametrize("format", FORMATS)
def test_a_token_gets_the_same_bits_whatever_is_computed_with_it(kernels, format):
    for in_size, sizes in ((192, [50, 60]), (1536, [40])):
        packed = Packed(kernels, [random(size, in_size) for size in sizes], format)
        x, norm = random(250, in_size), random(in_size)
        together = packed.linear(x, norm, threads=2)
        for first, last, threads in (
            (0, 1, 2),
            (7, 9, 1),
            (10, 13, 2),
            (20, 24, 2),
            (30, 43, 1),
            (50, 90, 2),
            (0, 250, 1),
        ):
            assert torch.equal(
                packed.linear(x[first:last], norm, threads=threads), together[first:last]
            )


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_of_zeros_and_a_step_without_tokens_are_fine(kernels, format):
    packed = Packed(kernels, [random(40, 64)], format)
    assert (packed.linear(torch.zeros(2, 64)) == 0).all()
    assert packed.linear(torch.zeros(0, 64)).shape == (0, 40)
