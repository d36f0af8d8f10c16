"""Recognises the meanings of values of a graph: norms, products, gates, sums, attention. Torch
computes values without a meaning, so a missed one costs only time.

A value gets a meaning only if its operations are exactly those of the definition, or if its results
on test numbers are equal. The structure and the names of the model's code do not matter.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from weft.models.layers.weight import RowRun
from weft.models.transformers_backend.translate.evaluate import (
    as_rows,
    aten,
    evaluated,
    row_size,
    sources,
)
from weft.models.transformers_backend.translate.graph import (
    ATTENTION,
    CONSTANT,
    MATRIX,
    TABLE,
    WRITTEN,
    Graph,
    Length,
    TracedValue,
    Untranslatable,
)
from weft.models.transformers_backend.translate.heads import HeadReader, grouped
from weft.models.transformers_backend.translate.meaning import (
    Activation,
    Attend,
    AttendTo,
    Capped,
    Embed,
    Gate,
    Group,
    LayerNormed,
    Meaning,
    Projected,
    RmsNormed,
    Scaled,
    Sum,
)
from weft.ops.elementwise import ACTIVATIONS, GATES

# Elementwise operations on a value and numbers.
POINTWISE = {
    *(aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor, aten.neg.default),
    *(aten.pow.Tensor_Scalar, aten.square.default, aten.relu.default, aten.silu.default),
    *(aten.gelu.default, aten.tanh.default, aten.sigmoid.default, aten.erf.default),
}
# Test numbers for the comparison of activations.
GRID = torch.linspace(-8, 8, 1025)
TOLERANCE = 2e-6


class Recogniser:
    """The meanings of the values of one graph."""

    def __init__(self, graph: Graph, context_length: int) -> None:
        self.graph = graph
        self.meanings: dict[TracedValue, Meaning] = {}
        self.constants = _depending(graph, frozenset())
        self._uses = Counter(each for node in graph.nodes for each in set(node.inputs))
        positions = graph.inputs[-1]
        self.by_position = _depending(graph, frozenset({positions})) - {positions}
        self._heads = HeadReader(positions, self.by_position, context_length)
        self._matrix_uses = Counter(node.name for node in graph.nodes if node.op in (MATRIX, TABLE))

    def recognise(self) -> None:
        for node in self.graph.nodes:
            meaning = None
            if node not in self.by_position and not node.is_written:
                meaning = self._meaning(node)
            if meaning is not None:
                self.meanings[node] = meaning

    def _meaning(self, node: TracedValue) -> Meaning | None:
        if node.op == MATRIX and row_size(node):
            return Projected(node.name, (node.args[0],))
        if node.op == TABLE:
            ids, *_ = self.graph.inputs
            return Embed(node.name) if as_rows(node.args[0]) is ids else None
        if node.op == ATTENTION:
            return self._attention(node)
        if getattr(node.op, "__name__", "") == "getitem":
            return self._layer_norm(node)
        if node.op == aten.mul.Tensor:
            return self._rms_norm(node) or self._gate(node) or self._by_value(node)
        if node.op == aten.add.Tensor and not node.kwargs:
            return self._sum(node) or self._by_value(node)
        if node.op == aten.div.Tensor:
            return self._scaled(node)
        return self._by_value(node)

    def _by_value(self, node: TracedValue) -> Meaning | None:
        if node.op not in POINTWISE:
            return None
        return self._activation(node) or self._scaled(node)

    def _number(self, value: Any) -> float | None:
        """The value as a number, if it is a number or a scalar constant; else None."""
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, TracedValue) and value in self.constants and not value.shape:
            return float(evaluated(value, {}, 1))
        return None

    def _scaled(self, node: TracedValue) -> Meaning | None:
        if node.op not in (aten.mul.Tensor, aten.div.Tensor):
            return None
        value, factor = node.args
        if self._number(value) is not None and node.op == aten.mul.Tensor:
            value, factor = factor, value
        number = self._number(factor)
        if number is None or not isinstance(value, TracedValue) or not row_size(value):
            return None
        if node.op == aten.div.Tensor:
            number = 1 / number
        rows = self.meanings.get(as_rows(value))
        if isinstance(rows, Embed) and self._uses[value] == 1:
            return Embed(rows.table, rows.scale * number)
        if node is as_rows(self.graph.output) and self._own_matrix(value):
            return Capped(value.name, (value.args[0],), number, 0.0)
        return Scaled((value,), number)

    def _sum(self, node: TracedValue) -> Meaning | None:
        one, two = node.args
        if not isinstance(two, TracedValue) or one.shape != two.shape or not row_size(node):
            return None
        if one in self.by_position or two in self.by_position:
            return None
        return Sum((one, two))

    def _rms_norm(self, node: TracedValue) -> Meaning | None:
        one, two = node.args
        for x, other in ((one, two), (two, one)):
            if not isinstance(x, TracedValue) or not isinstance(other, TracedValue):
                return None
            if other in self.constants:
                inner = self.meanings.get(x)
                if not isinstance(inner, RmsNormed) or inner.weight is not None:
                    continue
                if other.shape == (inner.size,):
                    return RmsNormed(inner.inputs, other, inner.size, inner.eps)
                continue
            eps = _rms_eps(x, other)
            if eps is not None:
                size = x.shape[-1]
                assert isinstance(size, int)
                return RmsNormed((x,), None, size, eps)
        return None

    def _layer_norm(self, node: TracedValue) -> Meaning | None:
        source, index = node.args
        if source.op != aten.native_layer_norm.default or index:
            return None
        x, sizes, weight, bias, eps = source.args
        if len(sizes) != 1 or row_size(x) != sizes[0]:
            return None
        return LayerNormed((x,), weight, bias, sizes[0], eps)

    def _own_matrix(self, node: TracedValue) -> bool:
        """Whether only this value uses the matrix of a product."""
        return node.op == MATRIX and self._matrix_uses[node.name] == 1 and bool(row_size(node))

    def _gate(self, node: TracedValue) -> Meaning | None:
        one, two = node.args
        if not isinstance(two, TracedValue):
            return None
        for gate, up in ((one, two), (two, one)):
            found = self._gate_of(gate, up)
            if found is not None:
                return found
        return None

    def _gate_of(self, gate: TracedValue, up: TracedValue) -> Meaning | None:
        """activation(gate) * up, if `gate` is the output of an activation."""
        if gate.op not in POINTWISE or up in self.constants:
            return None
        bases = self._bases(gate)
        if len(bases) != 1:
            return None
        (base,) = bases
        heads = (self._heads.value(base), self._heads.value(up))
        if heads[0] is None or heads[1] is None or base.shape != up.shape:
            return None
        matrices = [head.columns.matrix for head in heads if head is not None]
        if not all(self._own_matrix(matrix) for matrix in matrices):
            return None
        inputs = {as_rows(matrix.args[0]) for matrix in matrices}
        name = self._activation_of(gate, base, GATES)
        if len(inputs) != 1 or not name:
            return None
        runs: dict[str, list[RowRun]] = {}
        sizes = []
        for part, head in enumerate(heads):
            assert head is not None
            index = head.columns.places.ravel()
            begin = int(index[0])
            if (index[1:] - index[:-1] != 1).any():
                return None
            runs.setdefault(head.columns.matrix.name, []).append(RowRun(part, 0, begin, len(index)))
            sizes.append(len(index))
        for matrix in matrices:
            if sum(run.size for run in runs[matrix.name]) != row_size(matrix):
                return None
        for parts in runs.values():
            parts.sort(key=lambda run: run.begin)
        return Gate(Group(tuple(sizes), runs, is_gated=True), name, (matrices[0].args[0],))

    def _bases(self, node: TracedValue) -> list[TracedValue]:
        """The values from which `node` is computed elementwise."""

        def passes(each: TracedValue) -> bool:
            return each.op in POINTWISE

        return sources(node, passes, self.constants.__contains__)

    def _activation(self, node: TracedValue) -> Meaning | None:
        bases = self._bases(node)
        if len(bases) != 1 or not self._own_matrix(bases[0]):
            return None
        (base,) = bases
        name = self._activation_of(node, base, ACTIVATIONS)
        return Activation(base.name, name, (base.args[0],)) if name else self._capped(node, base)

    def _activation_of(self, node: TracedValue, base: TracedValue, known: Any) -> str:
        """The name of the function that is applied to `base`; "" if it is unknown."""
        values = self._on_grid(node, base, GRID)
        if values is None:
            return ""
        for name, function in known.items():
            if (function(GRID) - values).abs().max() <= TOLERANCE * GRID.abs().max():
                return str(name)
        return ""

    def _on_grid(self, node: TracedValue, base: TracedValue, grid: Tensor) -> Tensor | None:
        """The results of the function on `grid` in place of `base`; None if it is not
        elementwise."""
        try:
            values = evaluated(node, {base: grid}, len(grid))
        except (Untranslatable, RuntimeError):
            return None  # each column has its own numbers
        return values if values.shape == grid.shape else None

    def _capped(self, node: TracedValue, base: TracedValue) -> Meaning | None:
        """cap tanh(scale x / cap): the cap is its limit, the scale its slope at 0."""
        ends = self._on_grid(node, base, torch.tensor([0.0, 1e-3, 1e30], dtype=torch.float64))
        if ends is None or ends[0] != 0 or not 0 < ends[2] < 1e20:
            return None
        cap = float(ends[2])
        scale = cap * float(torch.atanh(ends[1].double() / cap)) * 1e3
        grid = torch.linspace(-3 * cap / scale, 3 * cap / scale, 1025)
        values = self._on_grid(node, base, grid)
        assert values is not None
        if (cap * torch.tanh(grid * scale / cap) - values).abs().max() > TOLERANCE * 5 * cap:
            return None
        return Capped(base.name, (base.args[0],), scale, cap)

    def _attention(self, node: TracedValue) -> Meaning:
        query, key, value, sinks = node.args
        call = node.content
        otherwise = AttendTo((query, key, value), sinks, call)
        if value.shape != key.shape or (sinks is not None and sinks not in self.constants):
            return otherwise
        meanings: dict[TracedValue, object] = dict(self.meanings)
        q = self._heads.rotated(query, meanings)
        k = self._heads.rotated(key, meanings)
        v = self._heads.value(value)
        if q is None or k is None or v is None:
            return otherwise
        matrices = [head.columns.matrix for head in (q, k, v)]
        if not all(self._own_matrix(matrix) for matrix in matrices):
            return otherwise
        if len({as_rows(matrix.args[0]) for matrix in matrices}) != 1:
            return otherwise
        # Our kernels rotate both or none, and norm both or none.
        if q.rotation is not k.rotation or (q.norm is None) != (k.norm is None):
            return otherwise
        if q.norm is not None and k.norm is not None:
            if q.norm.eps != k.norm.eps:
                return otherwise
            is_whole = [
                head.norm is not None and head.norm.size == head.columns.places.size
                for head in (q, k)
            ]
            if is_whole[0] != is_whole[1]:
                return otherwise
        group = grouped((q, k, v))
        if group is None:
            return otherwise
        return Attend((matrices[0].args[0],), group, q.rotation, q.norm, k.norm, sinks, call)


def _rms_eps(x: TracedValue, factor: TracedValue) -> float | None:
    """eps, if `factor` is 1 / sqrt(mean(x ** 2) + eps) over the last dimension; else None."""
    if factor.op != aten.rsqrt.default:
        return None
    (total,) = factor.args
    if total.op != aten.add.Tensor or not isinstance(total.args[1], float | int):
        return None
    mean, eps = total.args
    if mean.op != aten.mean.dim or mean.args[1:] != ((-1,), True):
        return None
    square = mean.args[0]
    is_square = (
        (square.op == aten.pow.Tensor_Scalar and square.args == (x, 2))
        or (square.op == aten.square.default and square.args == (x,))
        or (square.op == aten.mul.Tensor and square.args == (x, x))
    )
    return float(eps) if is_square else None


def _depending(graph: Graph, on: frozenset[TracedValue]) -> frozenset[TracedValue]:
    """The values that depend only on the inputs `on`, or on none. If `on` is empty, values whose
    sizes depend on the step are left out."""
    found = set(on)
    for node in graph.nodes:
        if node.op == CONSTANT:
            found.add(node)
            continue
        if isinstance(node.op, str) and node.op != WRITTEN:
            continue
        if node.is_written or not all(each in found for each in node.inputs):
            continue
        if not on and _has_length(node):
            continue
        found.add(node)
    return frozenset(found)


def _has_length(node: TracedValue) -> bool:
    return any(isinstance(each, Length) for each in _flat((node.args, tuple(node.kwargs.values()))))


def _flat(value: Any) -> list[Any]:
    if isinstance(value, tuple) and not isinstance(value, Length):
        return [item for each in value for item in _flat(each)]
    return [value]
