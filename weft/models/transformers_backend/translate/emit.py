"""Passes the work of a graph to `Ops`, which computes or records it. Operations of torch go to the
`Host`, in the order in which they must run between the others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from weft.models.layers.attention import Heads, PagedAttention
from weft.models.layers.rope import Rope
from weft.models.transformers_backend.translate.constants import Constants
from weft.models.transformers_backend.translate.evaluate import (
    as_rows,
    computed,
    concrete,
    row_size,
)
from weft.models.transformers_backend.translate.graph import CONSTANT, TracedValue
from weft.models.transformers_backend.translate.meaning import (
    Activation,
    Attend,
    AttendTo,
    Capped,
    Embed,
    Gate,
    Group,
    HeadRotation,
    LayerNormed,
    Meaning,
    Projected,
    RmsNormed,
    Scaled,
    Sum,
)
from weft.models.transformers_backend.translate.plan import Work
from weft.ops import fusion
from weft.ops.protocol import LayerNorm, Matrix, Norm, Ops

Values: TypeAlias = dict[TracedValue, Any]
# of the values so far, and the number of tokens
HostStep: TypeAlias = Callable[[Values, int], None]


class Host(Protocol):
    def add(self, step: HostStep) -> None:
        """Run `step` after everything that `Ops` has got so far."""
        ...

    def buffer(self, columns: int) -> Tensor:
        """Memory [capacity, columns] that a host step writes and `Ops` reads."""
        ...


class Matrices(Protocol):
    """The weights of the model, by module names."""

    def matrix(self, name: str) -> Matrix: ...

    def scale(self, name: str) -> float:
        """The factor of a table's rows."""
        ...

    def together(self, group: Group) -> Matrix: ...

    def call(self, name: str, *args: Any) -> Tensor:
        """The output of the module for `args`."""
        ...


class TableRope:
    """A `Rope` with angles from the model's own tables."""

    def __init__(self, rotation: HeadRotation) -> None:
        self._rotation = rotation
        self.rotary_dim = 2 * rotation.cos.shape[1]
        self.side_by_side = rotation.is_side_by_side
        self.axes: Tensor | None = None  # tokens have one position

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self._rotation.cos[positions], self._rotation.sin[positions]

    def query_scale(self, positions: Tensor) -> Tensor | None:
        return None


class Term:
    """A product or a norm that will be added to a value, times a number."""

    def __init__(self, value: Any, scale: float) -> None:
        self.value = value
        self.scale = scale


class Emitter:
    """Passes on the work of one graph, once."""

    def __init__(
        self,
        work: Work,
        matrices: Matrices,
        constants: Constants,
        ropes: dict[HeadRotation, Rope],
        ops: Ops,
        attention: PagedAttention | None,
        host: Host,
    ) -> None:
        self._work = work
        self._matrices = matrices
        self._constants = constants
        self._ropes = ropes
        self._ops = ops
        self._attention = attention
        self._host = host
        # The values that `Ops` has, and the set of values that torch has.
        self._values: dict[TracedValue, Any] = {}
        self._on_host: set[TracedValue] = set(work.constants) | set(work.inputs)
        self._index = 0
        # Values that are added to another value.
        self._added: set[TracedValue] = set()
        for meaning in work.meanings.values():
            if isinstance(meaning, Sum):
                self._added.update(as_rows(each) for each in meaning.inputs)

    def give(self, node: TracedValue, value: Any) -> None:
        """Make an input of the graph an activation."""
        self._values[node] = value
        self._on_host.discard(node)

    def run(self) -> Tensor:
        """Pass on all steps. Returns the output."""
        work = self._work
        for index, node in enumerate(work.steps):
            self._index = index
            meaning = work.meanings.get(node)
            value = None if meaning is None else self._said(node, meaning)
            if value is None and node not in self._on_host:
                self._compute_on_host(node)
            elif value is not None:
                self._values[node] = value
            for each in list(self._values):
                if work.last_use.get(each, 0) <= index:
                    del self._values[each]
        return self._ops.computed(self._activation(work.output))

    def _said(self, node: TracedValue, meaning: Meaning) -> Any:
        """The activation of a value with a meaning; None if torch must compute it."""
        ops = self._ops
        matrices = self._matrices
        match meaning:
            case Embed(table, scale):
                # A program takes the tokens from its step.
                nothing = torch.empty(0, dtype=torch.int64)
                factor = scale * matrices.scale(table)
                return ops.embed(nothing, matrices.matrix(table), None, factor)
            case Projected(matrix, (x,)):
                return ops.linear(self._activation(x), matrices.matrix(matrix))
            case Activation(matrix, name, (x,)):
                return ops.activated(self._activation(x), matrices.matrix(matrix), name)
            case Gate(group, name, (x,)):
                return ops.gated(self._activation(x), matrices.together(group), name)
            case Capped(matrix, (x,), scale, cap):
                return ops.logits(self._activation(x), matrices.matrix(matrix), scale, cap)
            case RmsNormed((x,), weight, size, eps):
                norm = Norm(self._constants.vector(weight, size), eps)
                return ops.norm(self._activation(x), norm)
            case LayerNormed((x,), weight, bias, size, eps):
                vectors = (
                    self._constants.vector(weight, size),
                    self._constants.vector(bias, size, otherwise=0.0),
                )
                return ops.layer_norm(self._activation(x), LayerNorm(*vectors, eps))
            case Scaled((x,), scale):
                return self._scaled(node, as_rows(x), scale)
            case Sum((one, two)):
                return self._sum(as_rows(one), as_rows(two))
            case Attend():
                return self._attend(meaning)
            case AttendTo():
                return self._attend_to(node, meaning)
        raise AssertionError(meaning)

    def _activation(self, node: TracedValue) -> Any:
        """The value in the form that `Ops` reads."""
        node = as_rows(node)
        value = self._values.get(node)
        if isinstance(value, Term):
            value = self._take(node, self._host_value(node))
        if value is None:
            value = self._take(node, self._host_value(node))
        return value

    def _take(self, node: TracedValue, read: Callable[[Values, int], Tensor]) -> Any:
        """Copy a value of torch to a buffer that `Ops` reads."""
        buffer = self._host.buffer(row_size(node))

        def copy(values: Values, num_tokens: int) -> None:
            buffer[:num_tokens].copy_(read(values, num_tokens).reshape(num_tokens, -1))

        self._host.add(copy)
        activation = fusion.Value(buffer)
        self._values[node] = activation
        return activation

    def _host_value(self, node: TracedValue) -> Callable[[Values, int], Tensor]:
        """A function by which torch reads a value. If `Ops` has it pending, it is computed now."""
        shape = node.shape
        if node in self._on_host:
            return lambda values, num_tokens: values[node]
        root = as_rows(node)
        if root in self._on_host:
            return lambda values, num_tokens: values[root].view(concrete(shape, num_tokens))
        value = self._values[root]
        scale = 1.0
        if isinstance(value, Term):
            scale = value.scale
            value = value.value
        # Another tensor object on the same memory: `Ops` reuses the memory when the object that it
        # returned is dropped, and this read must not keep that object.
        memory = self._ops.computed(value)
        memory = memory.view(memory.shape)

        def read(values: Values, num_tokens: int) -> Tensor:
            found = memory[:num_tokens].view(concrete(shape, num_tokens))
            return found if scale == 1 else found * scale

        return read

    def _compute_on_host(self, node: TracedValue) -> None:
        reads = {}
        for each in dict.fromkeys(node.inputs):
            if each not in self._on_host:
                reads[each] = self._host_value(each)
        matrices = self._matrices
        dead = []
        for each in dict.fromkeys(node.inputs):
            # For a value with a meaning, the rows are what was requested.
            last_use = self._work.last_use.get(each, self._index)
            if last_use <= self._index and each.op != CONSTANT:
                dead.append(each)

        def compute(values: Values, num_tokens: int) -> None:
            for each, read in reads.items():
                values[each] = read(values, num_tokens)
            if isinstance(node.op, str) and node.name:
                args = [values[each] for each in node.args]
                values[node] = matrices.call(node.name, *args)
            else:
                values[node] = computed(node, values, num_tokens)
            for each in dead:
                values.pop(each, None)

        self._host.add(compute)
        self._on_host.add(node)

    def _is_lazy(self, node: TracedValue) -> bool:
        """Whether a value is not computed yet, and only one step reads it."""
        value = self._values.get(node)
        if isinstance(value, Term):
            return True
        is_open = isinstance(value, fusion.Product | fusion.Normed | fusion.ProductSum)
        return is_open and self._work.uses[node] == 1

    def _scaled(self, node: TracedValue, x: TracedValue, scale: float) -> Any:
        if self._is_lazy(x) and node in self._added and self._work.uses[node] == 1:
            value = self._values[x]
            if isinstance(value, Term):
                return Term(value.value, value.scale * scale)
            return Term(value, scale)
        return None

    def _sum(self, one: TracedValue, two: TracedValue) -> Any:
        """Add one of them to the other in place; None if torch must add them."""
        if self._is_lazy(one) and self._is_lazy(two):
            return self._sum_of_products(self._values[one], self._values[two])
        for total, term in ((one, two), (two, one)):
            if not self._is_lazy(term) or self._work.last_use.get(total, 0) > self._index:
                continue
            if self._is_lazy(total):
                continue
            self._compute_readers(total, term)
            value = self._activation(total)
            if not isinstance(value, fusion.Value):
                value = fusion.Value(self._ops.computed(value))
            added = self._values[term]
            if isinstance(added, Term):
                added = added.scale * added.value
            return value + added
        return None

    def _sum_of_products(self, one: Any, two: Any) -> Any:
        if isinstance(one, fusion.Product) and isinstance(two, fusion.Product):
            return one + two
        return None

    def _compute_readers(self, total: TracedValue, term: TracedValue) -> None:
        """Before a value is overwritten, compute the pending values that read it."""
        for node, value in list(self._values.items()):
            if node in (total, term) or not self._reads(node, total):
                continue
            if isinstance(value, fusion.Normed | fusion.Product | fusion.ProductSum):
                self._values[node] = fusion.Value(fusion.tensor_of(value))

    def _reads(self, node: TracedValue, source: TracedValue) -> bool:
        """Whether a pending value will be computed from `source`."""
        meaning = self._work.meanings.get(node)
        if meaning is None:
            return False
        for each in meaning.inputs:
            root = as_rows(each)
            if root is source:
                return True
            value = self._values.get(root)
            if isinstance(value, fusion.Normed | fusion.Product) and self._reads(root, source):
                return True
        return False

    def _rope(self, rotation: HeadRotation | None) -> Rope | None:
        if rotation is None:
            return None
        if rotation not in self._ropes:
            rope: Any = TableRope(rotation)
            self._ropes[rotation] = rope
        return self._ropes[rotation]

    def _attend(self, meaning: Attend) -> Any:
        assert self._attention is not None
        ops = self._ops
        (x,) = meaning.inputs
        qkv = ops.computed(ops.linear(self._activation(x), self._matrices.together(meaning.group)))
        call = meaning.call
        heads = Heads(self._rope(meaning.rotation), None, None, call.scale, call.cap)
        if meaning.sinks is not None:
            heads = heads._replace(sinks=self._sinks(meaning.sinks))
        q_norm = meaning.q_norm
        k_norm = meaning.k_norm
        if q_norm is not None and k_norm is not None:
            q_weight = self._constants.vector(q_norm.weight, q_norm.size)
            k_weight = self._constants.vector(k_norm.weight, k_norm.size)
            norms = (Norm(q_weight, q_norm.eps), Norm(k_weight, k_norm.eps))
            q_end = meaning.group.sizes[0]
            k_end = q_end + meaning.group.sizes[1]
            if q_norm.size == q_end:
                ops.norm_overwrites(qkv[:, :q_end], norms[0])
                ops.norm_overwrites(qkv[:, q_end:k_end], norms[1])
            else:
                heads = heads._replace(q_norm=norms[0], k_norm=norms[1])
        return fusion.Value(self._attention.forward(qkv, heads, call.layer))

    def _sinks(self, node: TracedValue) -> Tensor:
        return self._constants.vector(node, math.prod(concrete(node.shape, 1)))

    def _attend_to(self, node: TracedValue, meaning: AttendTo) -> Any:
        """Attention on queries, keys and values of torch. Shorter values are padded with zeros to
        the size of keys, because slots have one size."""
        assert self._attention is not None
        reads = [self._host_value(each) for each in meaning.inputs]
        shapes = []
        for each in meaning.inputs:
            num_heads, head_dim = each.shape[-3], each.shape[-1]
            assert isinstance(num_heads, int)
            assert isinstance(head_dim, int)
            shapes.append((num_heads, head_dim))
        head_dim = shapes[0][1]
        qkv = self._host.buffer(sum(num_heads for num_heads, _ in shapes) * head_dim)
        qkv.zero_()

        def pack(values: Values, num_tokens: int) -> None:
            by_head = qkv[:num_tokens].view(num_tokens, -1, head_dim)
            first = 0
            for read, (num_heads, size) in zip(reads, shapes, strict=True):
                heads = read(values, num_tokens)[0].transpose(0, 1)
                by_head[:, first : first + num_heads, :size].copy_(heads)
                by_head[:, first : first + num_heads, size:].zero_()
                first += num_heads

        self._host.add(pack)
        call = meaning.call
        heads = Heads(None, None, None, call.scale, call.cap)
        if meaning.sinks is not None:
            heads = heads._replace(sinks=self._sinks(meaning.sinks))
        out = self._attention.forward(qkv, heads, call.layer)
        value_dim = shapes[2][1]
        if value_dim == head_dim:
            return fusion.Value(out)
        memory = out.view(out.shape)

        def cut(values: Values, num_tokens: int) -> None:
            by_head = memory[:num_tokens].view(num_tokens, -1, head_dim)
            values[node] = by_head[..., :value_dim].contiguous()

        self._host.add(cut)
        self._on_host.add(node)
        return None
