"""Computes values of a graph with torch, and tests what a part of a graph does by running it.

For example, a query is rows of a product in another order, perhaps normed and rotated. The code for
this differs between families of models, but its results on chosen test numbers do not. This module
knows nothing of `Ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from weft.models.transformers_backend.translate.graph import (
    CONSTANT,
    WRITTEN,
    Length,
    TracedValue,
    Untranslatable,
)

aten = torch.ops.aten
# Operations that keep the order of values in memory: rows [T, C] stay rows.
SAME_ORDER = {
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default),
    *(aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default),
    *(aten.alias.default, aten.detach.default, aten.clone.default),
}
# Operations that move values, and compute none.
LAYOUT = SAME_ORDER | {
    *(aten.transpose.int, aten.permute.default, aten.t.default, aten.expand.default),
    *(aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int),
    *(aten.slice.Tensor, aten.select.int, aten.cat.default, aten.stack.default),
}


def is_layout(node: TracedValue) -> bool:
    return node.op in LAYOUT or getattr(node.op, "__name__", "") == "getitem"


def as_rows(node: TracedValue) -> TracedValue:
    """The value whose rows in memory are those of this one."""
    while True:
        is_whole = node.op in (aten.slice.Tensor, aten.expand.default)
        if node.op not in SAME_ORDER and not (
            is_whole and node.shape == node.args[0].shape and not node.is_written
        ):
            return node
        node = node.args[0]


def resolved(value: Any, values: Mapping[TracedValue, Any], num_tokens: int) -> Any:
    """The arguments of an operation for a number of tokens."""
    if isinstance(value, TracedValue):
        return values[value]
    if isinstance(value, Length):
        return value.of(num_tokens)
    if isinstance(value, tuple):
        return [resolved(each, values, num_tokens) for each in value]
    return value


def computed(node: TracedValue, values: Mapping[TracedValue, Any], num_tokens: int) -> Any:
    """The result of a torch operation on its inputs."""
    if node.op == WRITTEN:
        return values[node.args[0]]
    args = [resolved(each, values, num_tokens) for each in node.args]
    if not node.kwargs:
        return node.op(*args)
    named = {key: resolved(value, values, num_tokens) for key, value in node.kwargs.items()}
    return node.op(*args, **named)


def evaluated(node: TracedValue, known: Mapping[TracedValue, Tensor], num_tokens: int) -> Tensor:
    """Compute a value from known values. Raises `Untranslatable` if it depends on others."""
    values: dict[TracedValue, Any] = dict(known)
    pending = [node]
    while pending:
        current = pending[-1]
        if current in values:
            pending.pop()
            continue
        if current.op == CONSTANT:
            values[current] = current.content.data
            continue
        if isinstance(current.op, str) and current.op != WRITTEN:
            raise Untranslatable(f"a value depends on another {current.op}")
        missing = [each for each in current.inputs if each not in values]
        if missing:
            pending += missing
        else:
            values[current] = computed(current, values, num_tokens)
    found: Tensor = values[node]
    return found


def sources(
    node: TracedValue,
    passes: Callable[[TracedValue], bool],
    is_known: Callable[[TracedValue], bool],
) -> list[TracedValue]:
    """The values from which `node` is made by operations that `passes` allows, without known ones,
    in the order of their first use."""
    found: list[TracedValue] = []
    seen: set[TracedValue] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        if current in seen or is_known(current):
            continue
        seen.add(current)
        if passes(current):
            pending += reversed(current.inputs)
        else:
            found.append(current)
    return found


def concrete(shape: Iterable[Any], num_tokens: int) -> tuple[int, ...]:
    return tuple(each.of(num_tokens) if isinstance(each, Length) else each for each in shape)


def row_size(node: TracedValue) -> int:
    """Values per token, if a value has rows of tokens, [1, T, ..] or [T, ..]; else 0."""
    shape = list(node.shape)
    while shape and shape[0] == 1:
        shape.pop(0)
    if not shape or shape[0] != Length(1, 0):
        return 0
    size = 1
    for each in shape[1:]:
        if isinstance(each, Length):
            return 0
        size *= each
    return size
