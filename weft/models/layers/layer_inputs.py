"""Inputs for each layer: a token's embedding enters the first layer only, and in addition every
layer gets a vector of its own for each token (`LayerInputSpec`)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from weft.config.decoder import LayerInputSpec
from weft.config.model import ModelConfig
from weft.models.layers.attention import PagedAttention
from weft.models.layers.embedding import matrix_weight
from weft.models.layers.linear import Linear
from weft.models.layers.norm import RmsNorm
from weft.models.layers.weight import Weight, Weights
from weft.ops.codes import Codes
from weft.ops.protocol import Ops

HALF = math.sqrt(0.5)  # factor of the sum of both terms


class LayerInputs(NamedTuple):
    """The vectors of a step's tokens, of all layers side by side: [T, layers size] each. The vector
    of a layer is its part of `rows` plus HALF norm(its part of `projected`)."""

    rows: Tensor
    projected: Tensor


class LayerInputTable:
    """The weights that make the vectors of all layers."""

    def __init__(self, config: ModelConfig, spec: LayerInputSpec, ops: Ops) -> None:
        hidden = config.hidden_size
        self._names = config.decoder.names.layer_inputs
        self._ops = ops
        self._size = spec.size
        self._unknown_token = spec.unknown_token
        width = config.num_layers * spec.size
        self._width = width
        self._num_rows = spec.num_rows or config.vocab_size
        self._num_others = config.vocab_size - self._num_rows  # tokens without a row of their own
        self._table = ops.matrix(width, (config.vocab_size,), precise=True)
        base, _, name = self._names.projection.rpartition(".")
        self._base = base
        self._projection = Linear(hidden, {name: width}, False, ops)
        # The projection is divided by sqrt(hidden) before its norm. A norm is not changed by a
        # factor of its input, but for eps.
        self._norm = RmsNorm(spec.size, config.norm_eps * hidden, ops, kind=config.decoder.norm)

    def __call__(self, tokens: Tensor, embedded: Tensor) -> LayerInputs:
        """tokens [T] and their embeddings [T, hidden]"""
        scale = HALF * math.sqrt(self._size)
        rows = self._ops.embed(
            tokens,
            self._table,
            scale=scale,
            unknown_token=self._unknown_token,
        )
        # Both are computed now, because the first layer overwrites the embeddings.
        projected = self._ops.computed(self._projection(embedded))
        return LayerInputs(self._ops.computed(rows), projected)

    def of_layer(self, inputs: LayerInputs, layer: int) -> Tensor:
        """[T, size]"""
        part = slice(layer * self._size, (layer + 1) * self._size)
        total = inputs.rows[:, part] + HALF * self._norm(inputs.projected[:, part])
        return self._ops.computed(total)

    def narrow(self, inputs: LayerInputs, attention: PagedAttention) -> LayerInputs:
        """The inputs of the tokens with which the rest of the model goes on."""
        narrowed = (self._ops.computed(attention.narrow(each)) for each in inputs)
        return LayerInputs(*narrowed)

    def weights(self) -> Weights:
        yield self._of_table()
        yield from self._projection.weights(self._base)
        yield from self._norm.weights(self._names.norm)

    def _of_table(self) -> Weight:
        weight = matrix_weight(self._names.table, (self._num_rows, self._width), self._table)
        num = self._num_others
        if not num:
            return weight

        def put(content: Tensor, start: int = 0, scales: Tensor | None = None) -> None:
            self._table.put(0, content, start, scales)
            if start == 0:
                scale = None if scales is None else scales[:1].expand(num)
                self._table.put(0, content[:1].expand(num, -1), self._num_rows, scale)

        def put_codes(codes: Codes, start: int = 0) -> None:
            self._table.put_codes(0, codes, start)
            if start == 0:
                self._table.put_codes(0, _first_row(codes, num), self._num_rows)

        def get(start: int = 0, stop: int | None = None) -> Tensor:
            return self._table.get(0, start, self._num_rows if stop is None else stop)

        return weight._replace(put=put, get=get, put_codes=put_codes)


def _first_row(codes: Codes, num: int) -> Codes:
    """The first row, so many times."""
    index = torch.zeros(num, dtype=torch.int64)
    mins = None if codes.mins is None else codes.mins.rows(index)
    return Codes(codes.format, codes.values[index], codes.scales.rows(index), mins, codes.order)


class LayerInputGate:
    """x + norm(out(activation(gate(x)) * vector)), with the layer's vector of each token."""

    def __init__(self, config: ModelConfig, spec: LayerInputSpec, ops: Ops) -> None:
        hidden = config.hidden_size
        self._names = config.decoder.names.layer_inputs
        self._ops = ops
        self._activation = spec.activation
        self._gate = Linear(hidden, {self._names.gate: spec.size}, False, ops)
        self._out = Linear(spec.size, {self._names.out: hidden}, False, ops)
        self.norm = RmsNorm(hidden, config.norm_eps, ops, kind=config.decoder.norm)

    def __call__(self, x: Tensor, layer_input: Tensor) -> Tensor:
        """[T, hidden] and [T, size] -> [T, hidden]"""
        return x + self.norm(self.product(x, layer_input))

    def product(self, x: Tensor, layer_input: Tensor) -> Tensor:
        """out(activation(gate(x)) * vector)"""
        gate = self._ops.activated(x, self._gate.matrix, self._activation)
        return self._out(self._ops.multiply(gate, layer_input))

    def weights(self, prefix: str) -> Weights:
        yield from self._gate.weights(prefix)
        yield from self._out.weights(prefix)
        yield from self.norm.weights(f"{prefix}.{self._names.post_norm}")
