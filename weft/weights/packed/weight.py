"""A matrix whose codes, scales and zero points are separate tensors, in any layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from weft.config.model import BadCheckpoint
from weft.config.quantized import Quantization
from weft.models.layers.weight import Weight
from weft.ops.codes import CodeFormat, Codes, Scales
from weft.weights.pieces import PieceBuffer, is_finite, piece_rows, read_all
from weft.weights.safetensors import ITEM_BYTES, Content, TensorEntry
from weft.weights.scales import StoredTensor
from weft.weights.stored import put_codes

SCALE_TYPES = ("F32", "F16", "BF16")
# (start, stop, buffer) -> codes [n, in] of the outputs start..stop, valid until the next call.
ReadCodes = Callable[[int, int, PieceBuffer], Tensor]


class Misfit(ValueError):
    """The tensors of a matrix do not fit the model, or each other; the message names a tensor."""


class Grouping(NamedTuple):
    """The meaning of a matrix's codes: their format, scales and order."""

    format: CodeFormat
    scales: Tensor  # [out, groups]
    mins: Tensor | None = None  # the same, float32
    order: Tensor | None = None  # [in] int32: the input of each column of the codes


class PackedTensors:
    """The tensors of one module, by the endings of their names."""

    def __init__(self, module: str, stored: Mapping[str, StoredTensor]) -> None:
        self.module = module
        self._stored = stored

    def __contains__(self, ending: str) -> bool:
        return f"{self.module}.{ending}" in self._stored

    def tensor(self, ending: str, dtype: str, *shapes: tuple[int, ...]) -> StoredTensor:
        """The tensor with this ending. Raises Misfit unless it exists with this type and one of
        these shapes."""
        found = self.any_type(ending, *shapes)
        entry = found[1]
        if entry.dtype != dtype:
            raise Misfit(f"{entry.name} {entry.dtype} instead of {dtype}")
        return found

    def any_type(self, ending: str, *shapes: tuple[int, ...]) -> StoredTensor:
        name = f"{self.module}.{ending}"
        if name not in self._stored:
            raise Misfit(f"{name} is missing")
        content, entry = self._stored[name]
        if shapes and entry.shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise Misfit(f"{entry.name} {list(entry.shape)} instead of {expected}")
        return content, entry

    def found(self, *endings: str) -> list[StoredTensor]:
        """The tensors with these endings that exist."""
        names = [f"{self.module}.{ending}" for ending in endings]
        return [self._stored[name] for name in names if name in self._stored]


class PackedCodes(NamedTuple):
    """A `StoredWeight` matrix of codes."""

    shape: tuple[int, int]
    tensors: list[StoredTensor]  # all of its tensors, the codes first
    codes: ReadCodes
    grouping: Callable[[], Grouping]  # reads scales and zero points; raises BadCheckpoint

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for _, entry in self.tensors)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(entry.name for _, entry in self.tensors)

    def offer(self, weight: Weight) -> None:
        if weight.keep_as is not None:
            grouping = self._finite_grouping()
            weight.keep_as(grouping.format, grouping.order)

    def put_into(self, weight: Weight, buffer: PieceBuffer) -> None:
        grouping = self._finite_grouping()
        scales = Scales(grouping.scales)
        mins = None
        if grouping.mins is not None:
            mins = Scales(grouping.mins)
        out_size, in_size = self.shape
        step = piece_rows(in_size)
        for start in range(0, out_size, step):
            stop = min(start + step, out_size)
            rows = slice(start, stop)
            values = self.codes(start, stop, buffer)[:, :in_size]
            if grouping.order is not None:
                values = values.index_select(1, grouping.order)
            codes = Codes(
                format=grouping.format,
                values=values,
                scales=scales.of(rows),
                mins=None if mins is None else mins.of(rows),
                order=grouping.order,
            )
            put_codes(weight, codes, start)

    def require_finite(self, buffer: PieceBuffer) -> None:
        """Checks only the scales, because codes are always finite; and that no tensor is cut
        off."""
        self._finite_grouping()
        for content, entry in self.tensors:
            _require_bytes(content, entry)

    def _finite_grouping(self) -> Grouping:
        grouping = self.grouping()
        if not is_finite(grouping.scales):
            content, entry = self.tensors[0]
            module = entry.name.rpartition(".")[0]
            raise BadCheckpoint(f"{content.label}: {module} has scales that are not finite")
        return grouping


def _require_bytes(content: Content, entry: TensorEntry) -> None:
    """Raise BadCheckpoint if the file ends before the tensor does."""
    item = min(ITEM_BYTES[entry.dtype], entry.num_bytes)
    last = bytearray(item)
    content.read_into(entry.start + entry.num_bytes - item, memoryview(last))


def format_of(
    bits: int, group: int, scales: Tensor, zeros: Tensor | None
) -> tuple[CodeFormat, Tensor | None]:
    """The format of codes with these scales [out, groups] and zero points (None: the middle of the
    codes); and minimums, if zero points differ.

    A minimum is -scale * zero, which is exact in float32, so weights equal scale * (code - zero).
    """
    middle = 2 ** (bits - 1)
    if zeros is None:
        return CodeFormat(bits, group, middle, scale_type=scales.dtype), None
    first = int(zeros.flatten()[0])
    if bool((zeros == first).all()):
        return CodeFormat(bits, group, first, scale_type=scales.dtype), None
    mins = scales.float() * -zeros.float()
    return CodeFormat(bits, group, has_mins=True, scale_type=torch.float32), mins


def grouping_of(
    bits: int,
    group: int,
    scales: Tensor,
    zeros: Tensor | None,
    index: StoredTensor | None = None,
) -> Grouping:
    """The `Grouping` of codes with these scales [out, groups] and zero points. `index`: the group
    of each input. Raises BadCheckpoint."""
    format, mins = format_of(bits, group, scales, zeros)
    order = None
    if index is not None:
        order = order_of(index, format.group, scales.shape[1])
    return Grouping(format, scales, mins, order)


def bits_of(
    words: TensorEntry, expected: Mapping[int, tuple[int, ...]], config: Quantization
) -> int:
    """The bits of codes: from the config; if matrices differ, from the shape of the words
    (`expected`, by bits). Raises Misfit."""
    if config.bits and not config.varies:
        return config.bits
    for bits, shape in expected.items():
        if words.shape == shape:
            return bits
    raise Misfit(f"{words.name} {list(words.shape)} instead of {list(expected[4])}")


def group_of(
    scales: TensorEntry, by_output: tuple[int, ...], shape: tuple[int, int], config: Quantization
) -> int:
    """The number of inputs that share a scale; 0: all. `by_output`: the shape of the scales as
    [out, groups]. Raises Misfit."""
    out_size, in_size = shape
    if scales.dtype not in SCALE_TYPES:
        raise Misfit(f"{scales.name} {scales.dtype} instead of one of {', '.join(SCALE_TYPES)}")
    expected = -(-in_size // (config.group or in_size))
    is_of_outputs = len(by_output) == 2 and by_output[0] in (out_size, 1)
    if is_of_outputs and by_output[1] == expected and not (config.varies and expected == 1):
        return config.group
    num_groups = by_output[-1] if is_of_outputs else 0
    if not config.varies or not num_groups or in_size % num_groups:
        wanted = [out_size, expected]
        if by_output != scales.shape:  # they are stored transposed
            wanted.reverse()
        raise Misfit(f"{scales.name} {list(scales.shape)} instead of {wanted}")
    return 0 if num_groups == 1 else in_size // num_groups


def num_words(size: int, bits: int) -> int:
    """The number of 32-bit words that hold `size` codes of `bits` bits."""
    return -(-size * bits // 32)


def order_of(index: StoredTensor, group: int, num_groups: int) -> Tensor | None:
    """The inputs [in], sorted by group, from the group of each input; None if inputs are in that
    order already. Raises BadCheckpoint."""
    content, entry = index
    of_input = read_all(content, entry, torch.int32)
    if bool((of_input == -1).all()):  # present, but unused
        return None
    if bool((of_input < 0).any()) or bool((of_input >= num_groups).any()):
        raise BadCheckpoint(
            f"{content.label}: {entry.name} has numbers of groups that are not in "
            f"0 to {num_groups - 1:,}"
        )
    if group == 0:
        return None
    expected = torch.arange(len(of_input), dtype=torch.int32) // group
    if torch.equal(of_input, expected):
        return None
    in_order, order = of_input.sort(stable=True)
    if not torch.equal(in_order, expected):
        raise BadCheckpoint(f"{content.label}: {entry.name} has groups of other sizes than {group}")
    return order.int()
