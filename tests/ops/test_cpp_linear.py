from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import cached_property

import pytest
import torch
from torch import Tensor

from tests.ops.codes import FORMATS as CODE_FORMATS
from tests.ops.codes import PACKED, codes_as_floats, random_codes, rows_of
from weft.ops.codes import CodeFormat
from weft.ops.cpp import abi
from weft.ops.cpp.abi import Epilogue, WeightFormat
from weft.ops.cpp.library import Library
from weft.ops.cpp.matrices import PackedMatrix, Panels
from weft.ops.quantize import INT4, INT8, quantize_as, round_rows

pytestmark = pytest.mark.pairs

FLOATS = (WeightFormat.F32, WeightFormat.BF16)
STORED = tuple(CODE_FORMATS)
ALL = (*PACKED, *STORED)
Format = WeightFormat | str
PAIRS = ("avx512_bf16", "emulated_bf16")  # round what they multiply with bfloat16


@dataclass
class Packed:
    """A weight in the kernels' layout, made of parts below each other, or of a gate and an up part.

    `format` may be the name of one in which codes are stored; then these are random, and `parts`
    only say how many.
    """

    library: Library
    parts: list[Tensor]
    format: Format
    gated: bool = False
    matrix: PackedMatrix = field(init=False)

    def __post_init__(self) -> None:
        self.in_size = self.parts[0].shape[1]
        sizes = tuple(len(part) for part in self.parts)
        name = WeightFormat.BF16 if isinstance(self.format, str) else self.format
        self.matrix = PackedMatrix(
            self.library, self.in_size, sizes, False, self.gated, name, keeps_codes=True
        )
        if isinstance(self.format, str):
            self._put_codes(CODE_FORMATS[self.format])
            return
        for index, part in enumerate(self.parts):
            self.matrix.put(index, part)

    def _put_codes(self, format: CodeFormat) -> None:
        for index in range(len(self.parts)):
            self.matrix.keep_as(index, format)
        for index, part in enumerate(self.parts):
            codes = random_codes(format, len(part), self.in_size, seed=index)
            self.parts[index] = codes_as_floats(format, len(part), self.in_size, seed=index)
            self.matrix.put_codes(index, codes)

    @property
    def panels(self) -> Panels:
        (panels,) = self.matrix.pieces
        return panels

    @property
    def address(self) -> int:
        return self.panels.address

    @property
    def has_codes(self) -> bool:
        return self.panels.codes is not None

    def unpacked(self) -> list[Tensor]:
        """The parts as the packed weight has them."""
        return [self.matrix.get(index) for index in range(len(self.parts))]

    @cached_property
    def weights(self) -> Tensor:
        """All parts as they are packed, [in, out] float64."""
        return torch.cat(self.unpacked()).double().T

    def linear(
        self,
        x: Tensor,
        norm: Tensor | None = None,
        bias: Tensor | None = None,
        add: Tensor | None = None,
        threads: int | None = None,
    ) -> Tensor:
        """Into a matrix with more columns and rows than are written: the others must stay as they
        are."""
        out_size = self.matrix.out_size
        columns = out_size // 2 if self.gated else out_size
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
        num_bytes = len(x) * (4 * self.matrix.padded_in + 64) + 64
        scratch = torch.full((num_bytes,), 255, dtype=torch.uint8)
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
        """W norm(x) + bias in float64, with the input in the precision that the kernel gives it.
        Bias: one per part."""
        x = x.double()
        if norm is not None:
            x = x / (x.square().mean(dim=1, keepdim=True) + 1e-6).sqrt() * norm.double()
        if self.has_codes:
            x = round_rows(x.float()).double()
        elif self.format == WeightFormat.I16:
            x = round_to_shorts(x.float(), 4_095).double()
        elif self.format == WeightFormat.BF16 and self.library.instruction_set in PAIRS:
            x = x.float().bfloat16().double()
        y = x @ self.weights
        return y if bias is None else y + bias.double()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def round_to_shorts(rows: Tensor, most: int) -> Tensor:
    """Each 256 numbers of a row as whole numbers up to `most` times a scale."""
    found = []
    for group in rows.split(256, dim=1):
        scale = group.abs().amax(dim=1, keepdim=True) / most
        found.append(torch.where(scale > 0, (group / scale).round() * scale, 0))
    return torch.cat(found, dim=1)


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


@pytest.mark.parametrize("format", [WeightFormat.I8, WeightFormat.I4])
@pytest.mark.parametrize("in_size", [1, 100, 192])
def test_codes_that_are_chosen_are_those_of_the_plain_twin(kernels, format, in_size):
    parts = [random(40, in_size), random(33, in_size), torch.zeros(3, in_size)]
    packed = Packed(kernels, parts, format)
    for part, unpacked in zip(parts, packed.unpacked(), strict=True):
        twin = quantize_as(INT8 if format == WeightFormat.I8 else INT4, part).dequantized()
        # Sums of another order may choose another of two ways that are as good.
        is_same = (unpacked - twin).abs() <= 1e-3 * part.abs().amax()
        assert is_same.float().mean() > 0.98
        lost, lost_by_twin = ((each - part).square().sum() for each in (unpacked, twin))
        assert lost <= 1.001 * lost_by_twin + 1e-6 * part.square().sum()


def test_eight_bits_are_within_half_a_step(kernels):
    matrix = random(40, 200)
    unpacked = Packed(kernels, [matrix], WeightFormat.I8).unpacked()[0]
    group = INT8.group
    groups = torch.nn.functional.pad(matrix, (0, -200 % group)).view(40, -1, group)
    steps = groups.abs().amax(dim=2) / 127
    by_input = steps.repeat_interleave(group, dim=1)[:, :200]
    # Scales of bfloat16 may be smaller by 2 to the -9: the largest weight is a quarter of a step
    # off.
    assert ((unpacked - matrix).abs() <= 0.51 * by_input).all()


def test_four_bits_lose_less_than_steps_from_the_smallest_to_the_largest_weight(kernels):
    matrix = random(64, 512)
    unpacked = Packed(kernels, [matrix], WeightFormat.I4).unpacked()[0]
    groups = matrix.view(64, -1, 32)
    low = groups.amin(dim=2, keepdim=True)
    step = (groups.amax(dim=2, keepdim=True) - low) / 15
    usual = (((groups - low) / step).round() * step + low).view_as(matrix)
    assert (unpacked - matrix).square().sum() <= 0.9 * (usual - matrix).square().sum()


def test_weights_on_a_grid_of_four_bits_come_back_exactly(kernels):
    """As those of a checkpoint that was stored in four bits and is widened."""
    generator = torch.Generator().manual_seed(5)
    steps = torch.randint(16, (64, 8, 32), generator=generator)
    scales = (0.01 * torch.rand(64, 8, 1, generator=generator) + 1e-3).half().float()
    mins = (-8 * scales).half().float()
    matrix = (steps * scales + mins).view(64, -1)
    unpacked = Packed(kernels, [matrix], WeightFormat.I4).unpacked()[0]
    assert ((unpacked - matrix).abs() <= 2e-3 * matrix.abs().amax()).all()
    assert ((unpacked - matrix).abs() <= 1e-6).float().mean() > 0.9


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("in_size", [1, 100, 576])
def test_stored_codes_are_kept_as_they_are(kernels, name, in_size):
    packed = Packed(kernels, [torch.empty(rows, in_size) for rows in (40, 1, 70)], name)
    for part, unpacked in zip(packed.parts, packed.unpacked(), strict=True):
        assert torch.equal(unpacked, part)


def test_parts_that_are_stored_in_different_formats_stand_below_each_other(kernels):
    matrix = PackedMatrix(
        kernels, 300, (64, 40, 33), False, False, WeightFormat.BF16, keeps_codes=True
    )
    codes = []
    for part, name in enumerate(("q4_k", "q4_k", "q6_k")):
        codes.append(random_codes(CODE_FORMATS[name], matrix.sizes[part], 300, seed=part))
        matrix.keep_as(part, codes[-1].format)
    for part, each in enumerate(codes):
        matrix.put_codes(part, each)
        assert torch.equal(matrix.get(part), each.dequantized())
    assert [panels.struct.out_size for panels in matrix.pieces] == [104, 33]


def test_codes_are_widened_where_more_bits_are_kept_or_fewer_are_asked_for(kernels):
    codes = random_codes(CODE_FORMATS["q8_0"], 64, 96)
    for format, tolerance in ((WeightFormat.F32, 0.0), (WeightFormat.I4, 0.1)):
        matrix = PackedMatrix(kernels, 96, (64,), False, False, format)
        matrix.keep_as(0, codes.format)
        matrix.put_codes(0, codes)
        largest = codes.dequantized().abs().amax()
        assert (matrix.get(0) - codes.dequantized()).abs().amax() <= tolerance * largest


@pytest.mark.parametrize("name", STORED)
def test_floats_may_come_later_where_codes_are_kept(kernels, name):
    packed = Packed(kernels, [torch.empty(64, 300)], name)
    address = packed.panels.memory.data_ptr()
    packed.matrix.keep_as(0, CODE_FORMATS["q4_0"])
    rows = random(64, 300)
    packed.matrix.put(0, rows)
    assert packed.panels.memory.data_ptr() == address
    error = (packed.matrix.get(0) - rows).square().mean().sqrt()
    bits = CODE_FORMATS[name].bits
    assert error < {2: 0.9, 3: 0.3}.get(bits, 0.13), "of weights with deviation 1"


@pytest.mark.parametrize("format", FLOATS)
def test_what_fills_up_a_weight_is_zero(kernels, format):
    packed = Packed(kernels, [torch.ones(33, 70)], format)
    dtype = torch.float32 if format == WeightFormat.F32 else torch.bfloat16
    assert packed.panels.memory.view(dtype).float().sum() == 33 * 70


@pytest.mark.parametrize("format", PACKED)
@pytest.mark.parametrize("units", [1, 48, 64])
def test_gate_and_up_alternate_by_panel(kernels, format, units):
    parts = [random(units, 100), random(units, 100, seed=1)]
    gated = Packed(kernels, parts, format, gated=True)
    plain = [Packed(kernels, [part], format) for part in parts]
    for part, alone in zip(gated.unpacked(), plain, strict=True):
        assert torch.equal(part, alone.unpacked()[0])
    panels = [packed.panels.memory.view(-(-units // 32), -1) for packed in plain]
    assert torch.equal(gated.panels.memory.view(-1, 2, panels[0].shape[1])[:, 1], panels[1])


@pytest.mark.parametrize("format", ALL)
@pytest.mark.parametrize("gated", [False, True])
def test_rows_may_be_put_and_read_in_pieces(kernels, format, gated):
    rows = random(100, 70)
    packed = Packed(kernels, [rows, rows.clone()] if gated else [rows], format, gated=gated)
    whole = packed.panels.memory.clone()
    packed.panels.memory.zero_()
    for part in range(1 + gated):
        codes = None
        if isinstance(format, str):
            codes = random_codes(CODE_FORMATS[format], 100, 70, seed=part)
        expected = torch.empty(100, 70)
        for start, stop in ((0, 64), (64, 100)):
            if codes is None:
                packed.matrix.put(part, rows[start:stop], start)
            else:
                packed.matrix.put_codes(part, rows_of(codes, start, stop), start)
            expected[start:stop] = packed.matrix.get(part, start, stop)
        assert torch.equal(packed.matrix.get(part), expected)
    assert torch.equal(packed.panels.memory, whole)


@pytest.mark.parametrize("format", ALL)
@pytest.mark.parametrize("in_size", [1, 70, 320])
def test_embedding_gathers_the_rows_of_the_tokens(kernels, format, in_size):
    table = Packed(kernels, [random(100, in_size)], format)
    tokens = torch.tensor([0, 99, 31, 32, 0, 64])
    out = torch.full((7, in_size), torch.nan)
    step = abi.StepArgs(num_tokens=6, tokens=tokens.data_ptr())
    kernels.run_one(abi.EmbedArgs(table.address, out.data_ptr()), step)
    assert torch.equal(out[:6], table.unpacked()[0][tokens])
    assert out[6].isnan().all()


@pytest.mark.parametrize("format", PACKED)
@pytest.mark.parametrize("in_size", [1, 70, 600])
def test_embedding_takes_vectors_of_the_step_for_tokens_below_zero(kernels, format, in_size):
    table = Packed(kernels, [random(100, in_size)], format)
    vectors = random(3, in_size)
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
    x = 10 * random(5, size)
    weight = random(size)
    wide = torch.nn.functional.pad(x, (0, 3), value=torch.nan)
    out = torch.full((6, size + 2), torch.nan)
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
    x = random(3, size)
    weight = random(size)
    out = torch.zeros(3, size)
    x[1, -1] = 3.4e38
    pointers = (x.data_ptr(), weight.data_ptr(), out.data_ptr())
    kernels.run_one(abi.NormArgs(*pointers, size, size, size, 1e-6), abi.StepArgs(num_tokens=3))
    assert out.isfinite().all(dim=1).tolist() == [True, False, True]
    assert out[1].isnan().all()


# ---------------------------------------------------------------- linear


@pytest.mark.parametrize("format", ALL)
@pytest.mark.parametrize(("in_size", "out_size"), [(1, 1), (64, 32), (100, 70), (576, 200)])
def test_linear_is_the_plain_twin_for_any_size(kernels, format, in_size, out_size):
    packed = Packed(kernels, [random(out_size, in_size)], format)
    for num_tokens in (1, 2, 3, 4, 11, 13, 30, 100):
        x = random(num_tokens, in_size)
        actual = packed.linear(x)
        assert close(actual, packed.expected(x), packed), num_tokens


@pytest.mark.parametrize("format", ALL)
@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_linear_normalises_and_adds(kernels, format, num_tokens):
    packed = Packed(kernels, [random(70, 300)], format)
    x = random(num_tokens, 300)
    norm = random(300)
    bias = random(96)
    residual = random(num_tokens, 70)
    expected = packed.expected(x, norm, bias[:70])
    assert close(packed.linear(x, norm, bias), expected, packed)
    assert close(packed.linear(x, norm, bias, add=residual) - residual, expected, packed)


@pytest.mark.parametrize("format", ALL)
@pytest.mark.parametrize("in_size", [64, 100, 300])
def test_a_row_that_is_not_finite_stays_so_and_harms_no_other(kernels, format, in_size):
    """Wherever in the row it is: places that are filled up must not hide it."""
    packed = Packed(kernels, [random(70, in_size)], format)
    x = random(5, in_size)
    norm = random(in_size)
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


@pytest.mark.parametrize("format", ALL)
@pytest.mark.parametrize("units", [1, 48, 96])
def test_gated_linear_writes_one_column_for_each_unit(kernels, format, units):
    packed = Packed(kernels, [random(units, 130), random(units, 130, seed=1)], format, gated=True)
    padded = -(-units // 32) * 32
    biases = torch.zeros(2, padded)
    biases[:, :units] = random(2, units)
    in_panels = biases.view(2, -1, 32).transpose(0, 1).contiguous()
    for num_tokens in (1, 2, 7, 40):
        x = random(num_tokens, 130)
        norm = random(130)
        gate, up = packed.expected(x, norm, biases[:, :units].flatten()).split(units, dim=1)
        expected = torch.nn.functional.silu(gate) * up
        size = gate.abs().amax() * up.abs().amax()
        assert close(packed.linear(x, norm, in_panels), expected, packed, size), num_tokens


@pytest.mark.parametrize("format", ALL)
def test_a_token_gets_the_same_bits_whatever_is_computed_with_it(kernels, format):
    for in_size, sizes in ((192, [50, 60]), (1536, [40])):
        packed = Packed(kernels, [random(size, in_size) for size in sizes], format)
        x = random(250, in_size)
        norm = random(in_size)
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


@pytest.mark.parametrize("format", ALL)
def test_a_row_of_zeros_and_a_step_without_tokens_are_fine(kernels, format):
    packed = Packed(kernels, [random(40, 64)], format)
    assert (packed.linear(torch.zeros(2, 64)) == 0).all()
    assert packed.linear(torch.zeros(0, 64)).shape == (0, 40)


@pytest.mark.parametrize("format", [WeightFormat.I8, WeightFormat.I4])
def test_two_inputs_that_are_fifty_times_as_large_spoil_no_other_group(kernels, format):
    """The error over the part of the result that the other inputs make, against a rounding of the
    row as a whole."""
    weight = random(96, 1024)
    x = random(20, 1024)
    x[:, [100, 700]] *= 50
    packed = Packed(kernels, [weight], format)
    kept = packed.unpacked()[0].double()
    exact = x.double() @ kept.T
    scales = x.abs().amax(dim=1, keepdim=True) / 127
    by_row = ((x / scales).round() * scales).double() @ kept.T
    others = x.clone()
    others[:, [100, 700]] = 0
    signal = (others.double() @ kept.T).square().mean().sqrt()
    error = (packed.linear(x) - exact).square().mean().sqrt() / signal
    assert error < 0.05
    assert error < 0.4 * (by_row - exact).square().mean().sqrt() / signal


@pytest.mark.parametrize("format", ALL)
def test_linear_is_the_plain_twin_for_random_sizes(kernels, format):
    generator = torch.Generator().manual_seed(11)
    for largest in (700, 300, 300):
        sizes = torch.randint(1, largest, (3,), generator=generator)
        in_size, out_size, num_tokens = sizes.tolist()
        packed = Packed(kernels, [random(out_size, in_size)], format)
        x = random(num_tokens, in_size)
        together = packed.linear(x, threads=2)
        assert close(together, packed.expected(x), packed), (in_size, out_size, num_tokens)
        middle = num_tokens // 2
        alone = packed.linear(x[middle : middle + 1], threads=1)
        assert torch.equal(alone, together[middle : middle + 1]), (in_size, out_size, num_tokens)
