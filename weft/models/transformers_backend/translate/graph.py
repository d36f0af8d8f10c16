"""Traces a model's code as a list of operations: it runs twice on tensors without content, with
different numbers of tokens, and all of its torch operations are recorded.

    ids, positions ─▶ table ─▶ pow ─▶ mean ─▶ ... ─▶ matrix ─▶ view ─▶ attention ─▶ ... ─▶ hidden

Numbers that differ between the runs depend on the number of tokens. Matrices, embedding tables,
experts and attention are one operation each, whatever their code does. If code writes into a
tensor, all later reads of that memory depend on the write. Code that reads values cannot be traced.
This module knows nothing of `Ops`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from weft.models.transformers_backend.attention import AttentionCall, listening

LENGTHS = (17, 23)  # tokens of the two runs
# Operations that are not torch operations.
INPUT = "input"
CONSTANT = "constant"
MATRIX = "matrix"  # of (x); `name` says which
TABLE = "table"  # of (ids)
EXPERTS = "experts"  # of (x, chosen, shares)
ATTENTION = "attention"  # of (query, key, value, sinks)
WRITTEN = "written"  # of (x, write): x after `write` has changed its memory


class Untranslatable(Exception):
    """The model's code cannot be traced or translated. The message gives the reason."""


class Length(NamedTuple):
    """A number that depends on the number T of tokens: `factor` T + `offset`."""

    factor: int
    offset: int

    def of(self, num_tokens: int) -> int:
        return self.factor * num_tokens + self.offset


Size: TypeAlias = int | Length


@dataclass(eq=False, slots=True)
class TracedValue:
    """A value, and the operation that computes it."""

    op: Any
    args: tuple[Any, ...] = ()  # values of Python, `TracedValue`s and `Length`s, nested in tuples
    kwargs: dict[str, Any] = field(default_factory=dict)
    shape: tuple[Size, ...] = ()
    name: str = ""
    content: Any = None  # of a constant: its tensor; of attention: the call
    is_written: bool = False  # whether a later operation writes to its memory

    @property
    def inputs(self) -> list[TracedValue]:
        found: list[TracedValue] = []
        _visit((self.args, tuple(self.kwargs.values())), found)
        return found


def _visit(value: Any, found: list[TracedValue]) -> None:
    if isinstance(value, TracedValue):
        found.append(value)
    elif isinstance(value, tuple) and not isinstance(value, Length):
        for each in value:
            _visit(each, found)


class Graph(NamedTuple):
    nodes: list[TracedValue]  # in the order of computation
    inputs: tuple[TracedValue, ...]
    output: TracedValue


class Leaves(NamedTuple):
    """The modules that become one operation each, by name."""

    matrices: Mapping[str, nn.Module]
    tables: Mapping[str, nn.Module]
    experts: Mapping[str, nn.Module]


Run: TypeAlias = Callable[[int], tuple[tuple[Tensor, ...], Callable[[], Tensor]]]


def written_down(run: Run, root: nn.Module, leaves: Leaves) -> Graph:
    """Trace the operations between inputs and output. `run` makes inputs for a number of tokens,
    and a function that computes the output from them. Raises `Untranslatable`."""
    graphs = [_traced(run, root, leaves, length) for length in LENGTHS]
    first, second = graphs
    if len(first.nodes) != len(second.nodes):
        raise Untranslatable("what it does depends on the number of tokens")
    for node, other in zip(first.nodes, second.nodes, strict=True):
        if node.op != other.op or node.name != other.name:
            raise Untranslatable("what it does depends on the number of tokens")
        node.args = _merged(node.args, other.args)
        node.shape = _merged(node.shape, other.shape)
        names = tuple(node.kwargs)
        values = _merged(tuple(node.kwargs.values()), tuple(other.kwargs.values()))
        node.kwargs = dict(zip(names, values, strict=True))
    return first


def _merged(value: Any, other: Any) -> Any:
    """A value of the first run, with numbers that differ in the second run replaced by lengths."""
    if isinstance(value, tuple):
        if len(value) != len(other):
            raise Untranslatable("a shape depends on the number of tokens")
        return tuple(_merged(one, two) for one, two in zip(value, other, strict=True))
    if isinstance(value, TracedValue) or value is other or value == other:
        return value
    if type(value) is not int:
        raise Untranslatable("a value depends on the number of tokens")
    low, high = LENGTHS
    factor, rest = divmod(other - value, high - low)
    if rest:
        raise Untranslatable("a size is no multiple of the number of tokens")
    return Length(factor, value - factor * low)


def _traced(run: Run, root: nn.Module, leaves: Leaves, length: int) -> Graph:
    names = {id(tensor): name for name, tensor in root.named_parameters(remove_duplicate=False)}
    names |= {id(tensor): name for name, tensor in root.named_buffers(remove_duplicate=False)}
    tracer = _Tracer(names)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        inputs, compute = run(length)
        given = tuple(tracer.input(tensor) for tensor in inputs)
        stack.enter_context(tracer.standing_for(leaves))
        stack.enter_context(listening(tracer))
        stack.enter_context(tracer)
        output = compute()
    return Graph(tracer.nodes, given, tracer.node_of(output))


class _Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations while code runs on tensors without content."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nodes: list[TracedValue] = []
        self._names = names
        self._node_of: dict[int, TracedValue] = {}
        # Keeps the tensors alive, because a freed id could belong to another tensor later.
        self._alive: list[Tensor] = []
        self._is_leaf = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_leaf:
            return func(*args, **kwargs)
        output = func(*args, **kwargs)
        if not isinstance(output, Tensor | list | tuple):
            return output  # a dtype or a device
        given = self._values(args)
        named = {name: self._values(value) for name, value in kwargs.items()}
        if func._schema.is_mutable:
            self._write(TracedValue(func, given, named), args)
            return output
        node = self._add(TracedValue(func, given, named), output)
        if not isinstance(output, Tensor):
            for index, tensor in enumerate(output):
                self._add(TracedValue(operator.getitem, (node, index)), tensor)
        return output

    def input(self, tensor: Tensor) -> TracedValue:
        return self._add(TracedValue(INPUT), tensor)

    def attend(self, call: AttentionCall) -> Tensor:
        """Implements `Listener`."""
        if call.problem:
            raise Untranslatable(f"it {call.problem}")
        num_heads, num_tokens = call.query.shape[1:3]
        given = self._values((call.query, call.key, call.value, call.sinks))
        out = self._made((num_tokens, num_heads, call.value.shape[-1]))
        # The tensors of a call are read only through the graph.
        nothing = self._made((0,))
        without = call._replace(query=nothing, key=nothing, value=nothing, sinks=None)
        self._add(TracedValue(ATTENTION, given, content=without), out)
        return out

    def node_of(self, tensor: Tensor) -> TracedValue:
        found = self._node_of.get(id(tensor))
        if found is None:
            # No operation made the tensor: it existed before.
            if type(tensor) not in (Tensor, nn.Parameter):
                raise Untranslatable("it computes with a tensor of unknown origin")
            node = TracedValue(CONSTANT, name=self._names.get(id(tensor), ""), content=tensor)
            found = self._add(node, tensor)
        return found

    @contextmanager
    def standing_for(self, leaves: Leaves) -> Iterator[None]:
        """Make each of the modules one operation."""
        shadowed: list[Any] = []

        def shadow(name: str, module: Any, op: str, sizes: Callable[..., tuple[int, ...]]) -> None:
            def forward(*args: Tensor, **kwargs: Tensor) -> Tensor:
                given = (*args, *kwargs.values())
                out = self._made(sizes(*given))
                self._add(TracedValue(op, self._values(given), name=name), out)
                return out

            module.forward = forward  # shadows the method
            shadowed.append(module)

        try:
            for name, module in leaves.matrices.items():
                rows: Any = module.out_features
                shadow(name, module, MATRIX, lambda x, rows=rows: (*x.shape[:-1], rows))
            for name, module in leaves.tables.items():
                size: Any = module.embedding_dim
                shadow(name, module, TABLE, lambda ids, size=size: (*ids.shape, size))
            for name, module in leaves.experts.items():
                shadow(name, module, EXPERTS, lambda x, *_: tuple(x.shape))
            yield
        finally:
            for module in shadowed:
                del module.forward

    def _write(self, node: TracedValue, args: Sequence[Any]) -> None:
        """Make everything in the memory that the operation writes depend on it from now on."""
        schema = node.op._schema
        kinds = zip(schema.arguments, args, strict=False)
        written = [value for kind, value in kinds if kind.is_write]
        if len(written) != 1 or not isinstance(written[0], Tensor):
            raise Untranslatable(f"it writes into several tensors ({schema.name})")
        self.nodes.append(node)
        memory = _memory(written[0])
        for tensor in list(self._alive):
            if _memory(tensor) != memory:
                continue
            before = self._node_of[id(tensor)]
            if before.op in (INPUT, CONSTANT, MATRIX, TABLE, EXPERTS, ATTENTION):
                raise Untranslatable(f"it writes into a {before.op}")
            before.is_written = True
            self._node_of[id(tensor)] = TracedValue(
                WRITTEN, (before, node), shape=tuple(tensor.shape), is_written=True
            )
            self.nodes.append(self._node_of[id(tensor)])

    def _made(self, shape: Sequence[int]) -> Tensor:
        self._is_leaf = True
        try:
            return torch.empty(tuple(shape))
        finally:
            self._is_leaf = False

    def _add(self, node: TracedValue, output: Any) -> TracedValue:
        if isinstance(output, Tensor):
            node.shape = tuple(output.shape)
            self._node_of[id(output)] = node
            self._alive.append(output)
        self.nodes.append(node)
        return node

    def _values(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.node_of(value)
        if isinstance(value, list | tuple):
            return tuple(self._values(each) for each in value)
        return value


def _memory(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
