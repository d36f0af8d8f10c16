"""The checkpoint tensors of experts. This module knows their names and the order of their values;
`moe.py` computes with them.

    one per expert           experts.0.gate_proj.weight [size, hidden], experts.0.up_proj.weight, ..
    one for all experts      experts.gate_proj.weight [experts, size, hidden], ..
    gates and ups together   experts.gate_up_proj [experts, 2 size, hidden]: an expert's gates, then
                             its ups
    inputs first             experts.gate_up_proj [experts, hidden, 2 size]; gates and ups may
                             alternate

A checkpoint may have any of the first three. Each expert has a `Weight` of its own, with its index
in the tensors that hold all experts (`Stack`): so they are read expert by expert.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from weft.config.decoder import ExpertNames
from weft.models.layers.linear import bias_weight
from weft.models.layers.weight import MatrixRows, RowRun, Stack, Weight, Weights
from weft.ops.codes import CodeFormat, Codes
from weft.ops.protocol import Experts, Matrix


class ExpertSizes(NamedTuple):
    num_experts: int
    hidden: int
    inner: int
    has_bias: bool


def expert_weights(
    prefix: str,
    names: ExpertNames,
    sizes: ExpertSizes,
    experts: Experts,
) -> Weights:
    """The tensors of all experts, expert by expert; `prefix` names the feed-forward part."""
    tensors = _gates_and_ups_together if names.is_transposed else _gates_and_ups_apart
    for expert in range(sizes.num_experts):
        yield from tensors(prefix, names, sizes, experts.gate_up, expert)
        yield from _downs(prefix, names, sizes, experts.down, expert)


def _gates_and_ups_apart(
    prefix: str,
    names: ExpertNames,
    sizes: ExpertSizes,
    matrix: Matrix,
    expert: int,
) -> Weights:
    base = f"{prefix}.{names.experts}"
    inner = sizes.inner
    shape = (inner, sizes.hidden)
    for index, name in enumerate(names.gate_up):
        part = len(names.gate_up) * expert + index
        of_both = Stack(
            f"{prefix}.{names.all_gate_up}",
            (sizes.num_experts, len(names.gate_up) * inner, sizes.hidden),
            expert,
            first=index * inner,
        )
        of_one_kind = Stack(f"{base}.{name}.weight", (sizes.num_experts, *shape), expert)
        yield _matrix_part(
            f"{base}.{expert}.{name}.weight",
            shape,
            matrix,
            part,
            (of_both, of_one_kind),
        )
        if sizes.has_bias:
            stack = Stack(f"{base}.{name}.bias", (sizes.num_experts, inner), expert)
            yield _bias_part(f"{base}.{expert}.{name}.bias", matrix, part, (stack,))


def _gates_and_ups_together(
    prefix: str,
    names: ExpertNames,
    sizes: ExpertSizes,
    matrix: Matrix,
    expert: int,
) -> Weights:
    pair = GatesAndUps(matrix, expert, sizes, alternate=names.alternate)
    of_all = f"{prefix}.{names.all_gate_up}"
    name = f"{prefix}.{names.experts}.{expert}.{names.all_gate_up.rpartition('.')[2]}"
    yield Weight(
        name,
        (2 * sizes.inner, sizes.hidden),
        pair.put,
        pair.get,
        pair.keep_as,
        pair.put_codes,
        stacks=(
            Stack(
                of_all,
                (sizes.num_experts, sizes.hidden, 2 * sizes.inner),
                expert,
                is_transposed=True,
            ),
            Stack(of_all, (sizes.num_experts, 2 * sizes.inner, sizes.hidden), expert),
        ),
    )
    if sizes.has_bias:
        yield Weight(
            f"{name}_bias",
            (2 * sizes.inner,),
            pair.put_bias,
            pair.get_bias,
            stacks=(Stack(f"{of_all}_bias", (sizes.num_experts, 2 * sizes.inner), expert),),
        )


def _downs(
    prefix: str,
    names: ExpertNames,
    sizes: ExpertSizes,
    matrix: Matrix,
    expert: int,
) -> Weights:
    base = f"{prefix}.{names.experts}"
    shape = (sizes.hidden, sizes.inner)
    of_all = f"{prefix}.{names.all_down}"
    stacks = [
        Stack(of_all, (sizes.num_experts, *shape), expert),
        Stack(f"{base}.{names.down}.weight", (sizes.num_experts, *shape), expert),
    ]
    if names.is_transposed:
        transposed = (sizes.num_experts, sizes.inner, sizes.hidden)
        # The loader takes the first stack whose shape fits: if both shapes are equal, it takes this
        # one.
        stacks.insert(0, Stack(of_all, transposed, expert, is_transposed=True))
    yield _matrix_part(
        f"{base}.{expert}.{names.down}.weight",
        shape,
        matrix,
        expert,
        tuple(stacks),
    )
    if sizes.has_bias:
        shape = (sizes.num_experts, sizes.hidden)
        biases = (
            Stack(f"{of_all}_bias", shape, expert),
            Stack(f"{base}.{names.down}.bias", shape, expert),
        )
        yield _bias_part(f"{base}.{expert}.{names.down}.bias", matrix, expert, biases)


class GatesAndUps:
    """Gates and ups of one expert as rows of one tensor: all gates and then all ups, or alternating
    rows."""

    def __init__(
        self,
        matrix: Matrix,
        expert: int,
        sizes: ExpertSizes,
        *,
        alternate: bool,
    ) -> None:
        self._matrix = matrix
        self._parts = (2 * expert, 2 * expert + 1)
        self._inner = sizes.inner
        self._alternate = alternate

    def put(
        self,
        content: Tensor,
        start: int = 0,
        scales: Tensor | None = None,
    ) -> None:
        assert scales is None, "tensors of all experts are not stored in eight bits"
        for part, rows, first in self._split(start, len(content)):
            self._matrix.put(part, content[rows], first)

    def put_codes(self, codes: Codes, start: int = 0) -> None:
        for part, rows, first in self._split(start, len(codes.values)):
            self._matrix.put_codes(part, codes.of(rows), first)

    def keep_as(self, format: CodeFormat, order: Tensor | None = None) -> None:
        for part in self._parts:
            self._matrix.keep_as(part, format, order)

    def get(self, start: int = 0, stop: int | None = None) -> Tensor:
        gates, ups = (self._matrix.get(part) for part in self._parts)
        return self._joined(gates, ups)[start:stop]

    def put_bias(
        self,
        content: Tensor,
        start: int = 0,
        scales: Tensor | None = None,
    ) -> None:
        assert start == 0
        for part, rows, _ in self._split(0, len(content)):
            self._matrix.put_bias(part, content[rows])

    def get_bias(self, start: int = 0, stop: int | None = None) -> Tensor:
        gates, ups = (self._matrix.get_bias(part) for part in self._parts)
        return self._joined(gates, ups)[start:stop]

    def _joined(self, gates: Tensor, ups: Tensor) -> Tensor:
        if self._alternate:
            return torch.stack((gates, ups), dim=1).flatten(0, 1)
        return torch.cat((gates, ups))

    def _split(self, start: int, num: int) -> list[tuple[int, slice, int]]:
        """Split `num` rows from `start` on: (part, its rows, index of the first of them in the
        part)."""
        if self._alternate:
            assert start % 2 == 0
            return [(part, slice(which, num, 2), start // 2) for which, part in self._both()]
        found = []
        for which, part in self._both():
            begin = which * self._inner
            first = max(start, begin)
            last = min(start + num, begin + self._inner)
            if first < last:
                found.append((part, slice(first - start, last - start), first - begin))
        return found

    def _both(self) -> list[tuple[int, int]]:
        return list(enumerate(self._parts))


def _matrix_part(
    name: str,
    shape: tuple[int, int],
    matrix: Matrix,
    part: int,
    stacks: tuple[Stack, ...],
) -> Weight:
    return Weight(
        name,
        shape,
        partial(matrix.put, part),
        partial(matrix.get, part),
        partial(matrix.keep_as, part),
        partial(matrix.put_codes, part),
        stacks,
        MatrixRows(matrix, (RowRun(part, 0, 0, shape[0]),)),
    )


def _bias_part(name: str, matrix: Matrix, part: int, stacks: tuple[Stack, ...]) -> Weight:
    return bias_weight(name, matrix, part)._replace(stacks=stacks)
