"""`Ops` in plain torch, on any device: the specification of all other implementations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.ops.codes import COARSE, CodeFormat, Codes, Scales, codes_of_int8
from weft.ops.elementwise import ACTIVATIONS, gate_and_mul, rms_norm, scaled_logits
from weft.ops.expert_parallel import layer_of
from weft.ops.fusion import tensor_of
from weft.ops.joint import ALONE, TorchJoint
from weft.ops.lora import TorchAdapters
from weft.ops.placement import UNSPLIT, Placement, is_summed, local_matrix
from weft.ops.protocol import (
    Experts,
    LayerNorm,
    LayerRange,
    Matrix,
    Norm,
    Router,
    Shard,
    StreamOps,
)
from weft.ops.quantize import (
    CODE_FORMATS,
    FP8,
    INT8_BY_OUTPUT,
    dequantize,
    quantize_as,
    quantize_fp8,
    quantize_int8,
    round_rows,
    widened,
)
from weft.ops.routing import Routed, choose
from weft.ops.sharding import ShardedMatrix
from weft.ops.streams import TorchStreams

QUANTIZE = {"int8": quantize_int8, "fp8": quantize_fp8}
KEPT_IN = {"int8": torch.int8, "fp8": FP8}


class PlainMatrix:
    """A matrix in the type of the model, in one tensor."""

    format = ""  # of quantisation; "": none

    def __init__(
        self,
        in_size: int,
        sizes: tuple[int, ...],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.sizes = sizes
        self._weight = torch.empty(
            sum(sizes),
            in_size,
            dtype=dtype,
            device=device,
        )
        self.bias = torch.empty(sum(sizes), dtype=dtype, device=device) if bias else None

    @property
    def weight(self) -> Tensor:
        """[out, in]"""
        return self._weight

    def adopt(self, memory: Tensor) -> None:
        """Keep the weight, with its content, in these bytes from now on."""
        self._weight = memory.view(self._weight.dtype).view(self._weight.shape)

    def rounded(self, x: Tensor) -> Tensor:
        """x [T, in], rounded as products of this format round their inputs."""
        return x

    def rows(self, index: Tensor) -> Tensor:
        """index [n] -> [n, in]"""
        return F.embedding(index, self._weight)

    @property
    def tensors(self) -> Sequence[Tensor]:
        return [self._weight] if self.bias is None else [self._weight, self.bias]

    def weight_of(self, parts: range) -> Tensor:
        """Consecutive parts, concatenated: [rows, in]"""
        return self._weight[self._rows_of_parts(parts)]

    def bias_of(self, parts: range) -> Tensor | None:
        return None if self.bias is None else self.bias[self._rows_of_parts(parts)]

    def _rows_of_parts(self, parts: range) -> slice:
        start = sum(self.sizes[: parts.start])
        return slice(start, start + sum(self.sizes[part] for part in parts))

    def put(
        self,
        part: int,
        rows: Tensor,
        start: int = 0,
        scales: Tensor | None = None,
    ) -> None:
        target = self._part(self._weight, part)[start : start + len(rows)]
        target.copy_(widened(rows, scales))

    def keep_as(self, part: int, format: CodeFormat, order: Tensor | None = None) -> None:
        """Does nothing: this matrix converts codes to floats."""

    def put_codes(self, part: int, codes: Codes, start: int = 0) -> None:
        self.put(part, codes.dequantized(), start)

    def get(
        self,
        part: int,
        start: int = 0,
        stop: int | None = None,
    ) -> Tensor:
        return self._part(self._weight, part)[start:stop].clone()

    def put_bias(self, part: int, values: Tensor) -> None:
        assert self.bias is not None
        self._part(self.bias, part).copy_(values)

    def get_bias(self, part: int) -> Tensor:
        assert self.bias is not None
        return self._part(self.bias, part).clone()

    def _part(self, unsplit: Tensor, part: int) -> Tensor:
        return unsplit.split_with_sizes(self.sizes)[part]


class QuantizedMatrix(PlainMatrix):
    """Stored in eight bits with one scale per output: int8 or fp8, as a GPU multiplies them.
    `weight` converts them to floats at each use."""

    def __init__(
        self,
        in_size: int,
        sizes: tuple[int, ...],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        format: str,
    ) -> None:
        super().__init__(
            0,
            sizes,
            bias,
            dtype,
            device,
        )
        self.format = format
        self._in_size = in_size
        self._dtype = dtype
        num_rows = sum(sizes)
        self.values = torch.empty(
            num_rows,
            in_size,
            dtype=KEPT_IN[format],
            device=device,
        )
        self.scales = torch.empty(num_rows, device=device)

    @property
    def weight(self) -> Tensor:
        return dequantize(self.values, self.scales).to(self._dtype)

    def weight_of(self, parts: range) -> Tensor:
        rows = self._rows_of_parts(parts)
        return dequantize(self.values[rows], self.scales[rows]).to(self._dtype)

    def rounded(self, x: Tensor) -> Tensor:
        if self.format != "fp8":
            return x
        values, scales = quantize_fp8(x)
        return dequantize(values, scales).to(x.dtype)

    def rows(self, index: Tensor) -> Tensor:
        return dequantize(self.values[index], self.scales[index]).to(self._dtype)

    @property
    def tensors(self) -> Sequence[Tensor]:
        return [self.values, self.scales, *super().tensors]

    def put(
        self,
        part: int,
        rows: Tensor,
        start: int = 0,
        scales: Tensor | None = None,
    ) -> None:
        end = start + len(rows)
        assert end <= self.sizes[part]
        assert rows.shape[1] == self._in_size
        if scales is None or rows.dtype != self.values.dtype:
            rows = widened(rows, scales).to(self.values.device)
            rows, scales = QUANTIZE[self.format](rows)
        self._part(self.values, part)[start:end].copy_(rows)
        self._part(self.scales, part)[start:end].copy_(scales)

    def get(
        self,
        part: int,
        start: int = 0,
        stop: int | None = None,
    ) -> Tensor:
        values = self._part(self.values, part)[start:stop]
        scales = self._part(self.scales, part)[start:stop]
        return dequantize(values, scales).to(self._dtype)


class CodedMatrix(PlainMatrix):
    """Stored as codes, int8 or int4, and converted to floats at each use, which saves memory, not
    time.

    Codes from a checkpoint are kept unchanged if they have no more bits than `format`.
    """

    def __init__(
        self,
        in_size: int,
        sizes: tuple[int, ...],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        format: str,
    ) -> None:
        super().__init__(
            0,
            sizes,
            bias,
            dtype,
            device,
        )
        self.format = format
        self._in_size = in_size
        self._dtype = dtype
        self._parts: list[Codes] = []
        for size in sizes:
            self._parts.append(_empty_codes(CODE_FORMATS[format], size, in_size, device))
        self._has_content = False

    @property
    def weight(self) -> Tensor:
        return self.weight_of(range(len(self._parts)))

    def weight_of(self, parts: range) -> Tensor:
        rows = [self._parts[part].dequantized() for part in parts]
        return torch.cat(rows).to(self._dtype)

    def rounded(self, x: Tensor) -> Tensor:
        return round_rows(x)

    def rows(self, index: Tensor) -> Tensor:
        if len(self._parts) > 1:
            return F.embedding(index, self.weight)
        return _rows_of(self._parts[0], index).dequantized().to(self._dtype)

    @property
    def tensors(self) -> Sequence[Tensor]:
        tensors = list(super().tensors)
        for codes in self._parts:
            tensors += _tensors_of(codes)
        return tensors

    def keep_as(self, part: int, format: CodeFormat, order: Tensor | None = None) -> None:
        if self._has_content or format.bits > CODE_FORMATS[self.format].bits:
            return
        device = self._parts[part].values.device
        self._parts[part] = _empty_codes(format, self.sizes[part], self._in_size, device)

    def put(
        self,
        part: int,
        rows: Tensor,
        start: int = 0,
        scales: Tensor | None = None,
    ) -> None:
        format = self._parts[part].format
        if scales is not None and rows.dtype == torch.int8 and format == INT8_BY_OUTPUT:
            self.put_codes(part, codes_of_int8(rows, scales), start)
            return
        device = self._parts[part].values.device
        codes = quantize_as(format, widened(rows, scales).to(device))
        self.put_codes(part, codes, start)

    def put_codes(self, part: int, codes: Codes, start: int = 0) -> None:
        self._has_content = True
        kept = self._parts[part]
        if codes.format != kept.format or codes.order is not None:
            self.put(part, codes.dequantized(), start)
            return
        end = start + len(codes.values)
        assert end <= self.sizes[part]
        for to, come in zip(_tensors_of(kept), _tensors_of(codes), strict=True):
            to[start:end].copy_(come)

    def get(
        self,
        part: int,
        start: int = 0,
        stop: int | None = None,
    ) -> Tensor:
        rows = _rows_of(self._parts[part], slice(start, stop))
        return rows.dequantized().to(self._dtype)


class TorchWeights(ABC):
    """The vectors and matrices of a model; a subclass makes the matrices. `format` of the matrices:
    int8, int4 or fp8, or "" for the type of the model."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        format: str = "",
        placement: Placement = UNSPLIT,
        joint: TorchJoint = ALONE,
    ) -> None:
        self._dtype = dtype
        self._device = device
        self._format = format
        self.placement = placement
        self._joint = joint
        self.streams: StreamOps = TorchStreams()
        self._vectors: list[Tensor] = []
        self._matrices: list[PlainMatrix] = []
        self.chosen: dict[int, Tensor] = {}

    @property
    def tensors(self) -> list[Tensor]:
        tensors = list(self._vectors)
        for matrix in self._matrices:
            tensors += matrix.tensors
        return tensors

    def vector(self, size: int, *, exact: bool = False) -> Tensor:
        dtype = torch.float32 if exact else self._dtype
        values = torch.empty(size, dtype=dtype, device=self._device)
        self._vectors.append(values)
        return values

    def matrix(
        self,
        in_size: int,
        sizes: tuple[int, ...],
        *,
        bias: bool = False,
        gated: bool = False,
        precise: bool = False,
        shard: Shard | None = None,
    ) -> Matrix:
        format = "int8" if precise and self._format else self._format
        make = partial(self._made, format)
        return self.placement.matrix(make, in_size, sizes, bias, shard)

    def exact_matrix(self, in_size: int, size: int, *, bias: bool = False) -> Matrix:
        return self.placement.matrix(self._made_exact, in_size, (size,), bias, None)

    def expert_matrix(
        self,
        num_experts: int,
        in_size: int,
        sizes: tuple[int, ...],
        *,
        bias: bool = False,
        gated: bool = False,
        shard: Shard | None = None,
    ) -> Matrix:
        make = self._made_experts
        return self.placement.expert_matrix(make, num_experts, in_size, sizes, bias, shard)

    def _made(self, format: str, in_size: int, sizes: tuple[int, ...], bias: bool) -> Matrix:
        matrix = self._matrix(in_size, sizes, bias, format)
        self._matrices.append(matrix)
        return matrix

    def _made_exact(self, in_size: int, sizes: tuple[int, ...], bias: bool) -> Matrix:
        matrix = PlainMatrix(in_size, sizes, bias, torch.float32, self._device)
        self._matrices.append(matrix)
        return matrix

    def _made_experts(
        self, num_experts: int, in_size: int, sizes: tuple[int, ...], bias: bool
    ) -> Matrix:
        return self._made(self._format, in_size, sizes * num_experts, bias)

    def of_heads(self, values: Tensor) -> Tensor:
        return self.placement.of_heads(values)

    def layer_range(self, num_layers: int) -> LayerRange:
        return self.placement.layer_range(num_layers)

    def take(self, num_tokens: int, size: int) -> Tensor:
        return self._joint.take(num_tokens, size, self._dtype)

    def give(self, x: Tensor) -> Tensor:
        x = tensor_of(x)
        self._joint.give(x)
        return x

    def _divided_rows(
        self,
        tokens: Tensor,
        table: ShardedMatrix,
        vectors: Tensor | None,
        scale: float,
        unknown_token: int | None,
    ) -> Tensor:
        """`embed` with a table whose rows are divided between ranks."""
        assert unknown_token is None, "only whole tables have a row for tokens that are none"
        (here,) = table.rows
        index = tokens - here.first
        is_here = (index >= 0) & (index < here.size)
        mine = tensor_of(self.embed(index.clamp(0, here.size - 1), table.local))
        found = self._joint.sum(torch.where(is_here[:, None], mine.float(), 0))
        return with_vectors(found.to(mine.dtype), tokens, vectors, scale)

    def _mixed(
        self, x: Tensor, routed: Routed, experts: Experts, adapters: TorchAdapters | None = None
    ) -> Tensor:
        """`Ops.experts`, with the experts or the parts of experts that other processes have."""
        layer = layer_of(experts)
        if layer is not None:
            return self._joint.experts(layer, x, routed, experts.down.sizes[0])
        y = mixed(x, routed, experts, adapters)
        return self._joint.sum(y) if is_summed(experts.down) else y

    def _scaled_logits(self, found: Tensor, weight: Matrix, scale: float, cap: float) -> Tensor:
        """`Ops.logits` from the products of this process. Ranks other than 0 return the products
        with their part of the vocabulary."""
        if isinstance(weight, ShardedMatrix):
            (size,) = weight.sizes
            unsplit = self._joint.gather(found.contiguous(), size)
            if unsplit is None:
                return found
            found = unsplit
        return scaled_logits(found, scale, cap)

    @abstractmethod
    def embed(
        self,
        tokens: Tensor,
        table: Matrix,
        vectors: Tensor | None = None,
        scale: float = 1.0,
        unknown_token: int | None = None,
    ) -> Tensor:
        """`Ops.embed`."""

    @abstractmethod
    def linear(self, x: Tensor, weight: Matrix) -> Tensor:
        """`Ops.linear`."""

    @abstractmethod
    def _matrix(
        self,
        in_size: int,
        sizes: tuple[int, ...],
        bias: bool,
        format: str,
    ) -> PlainMatrix: ...

    def weighted(self, x: Tensor, routed: Routed) -> tuple[Tensor, Routed]:
        """`Ops.weighted`."""
        weights = routed.weights
        source = tensor_of(x)
        scaled = (source.float() * weights).to(source.dtype)
        return scaled, routed._replace(weights=torch.ones_like(weights))

    def space(self, x: Tensor, size: int) -> Tensor:
        return torch.empty(len(tensor_of(x)), size, dtype=self._dtype, device=self._device)

    def linear_into(self, x: Tensor, weight: Matrix, out: Tensor) -> None:
        out.copy_(tensor_of(self.linear(x, weight)))

    def copy(self, x: Tensor, out: Tensor) -> None:
        out.copy_(x)


def routed(x: Tensor, router: Router) -> Routed:
    """`Ops.route` in torch, with a `PlainMatrix`."""
    matrix = _plain(router.weight)
    logits = F.linear(x.float(), matrix.weight, matrix.bias)
    return choose(logits, router.choice, router.choice_bias, router.expert_scale)


class PlainExperts:
    """`ComputeExperts` in torch."""

    def __init__(self, layers: Sequence[Experts], dtype: torch.dtype) -> None:
        self._layers = layers
        self._dtype = dtype

    def __call__(self, layer: int, x: Tensor, rows: Tensor, experts: Tensor) -> Tensor:
        alone = Routed(experts[:, None], torch.ones(len(experts), 1))
        return mixed(x[rows].to(self._dtype), alone, self._layers[layer]).float()


def mixed(
    x: Tensor, routed: Routed, experts: Experts, adapters: TorchAdapters | None = None
) -> Tensor:
    """`Ops.experts` in torch, with what this process has of each expert, one expert after the
    other. `adapters`: of the step whose tokens x has."""
    gate_up = _plain(local_matrix(experts.gate_up))
    down = _plain(local_matrix(experts.down))
    num_parts = 2 if experts.is_gated else 1
    num_tokens, num_chosen = routed.experts.shape
    each = x.new_empty(num_tokens, num_chosen, down.sizes[0])
    exact = x
    x = gate_up.rounded(x)
    for expert in torch.unique(routed.experts).tolist():
        tokens, ranks = torch.where(routed.experts == expert)
        parts = range(num_parts * expert, num_parts * (expert + 1))
        both = F.linear(x[tokens], gate_up.weight_of(parts), gate_up.bias_of(parts))
        if adapters is not None:
            adapters.add(both, exact[tokens], gate_up, tokens, parts)
        if experts.is_gated:
            inner = gate_and_mul(both, experts.activation)
        else:
            inner = ACTIVATIONS[experts.activation](both)
        part = range(expert, expert + 1)
        found = F.linear(down.rounded(inner), down.weight_of(part), down.bias_of(part))
        if adapters is not None:
            adapters.add(found, inner, down, tokens, part)
        each[tokens, ranks] = found
    return (each.float() * routed.weights[..., None]).sum(1).to(x.dtype)


def embedded(
    table: PlainMatrix,
    tokens: Tensor,
    vectors: Tensor | None,
    scale: float,
) -> Tensor:
    """`Ops.embed` in torch, with a `PlainMatrix`."""
    # A token below 0 looks up row 0, which its vector then replaces.
    rows = table.rows(tokens if vectors is None else tokens.clamp(min=0))
    return with_vectors(rows, tokens, vectors, scale)


def with_vectors(rows: Tensor, tokens: Tensor, vectors: Tensor | None, scale: float) -> Tensor:
    """The rows of the tokens, times `scale`, or their vectors."""
    if scale != 1:
        rows = rows * scale
    if vectors is None:
        return rows
    index = (-1 - tokens).clamp(min=0)
    is_vector = (tokens < 0)[:, None]
    return torch.where(is_vector, vectors[index, : rows.shape[1]].to(rows.dtype), rows)


def known(tokens: Tensor, unknown_token: int | None) -> Tensor:
    """The tokens, with `unknown_token` in place of those below 0; None: as they are."""
    if unknown_token is None:
        return tokens
    return torch.where(tokens < 0, unknown_token, tokens)


def vectors_added(x: Tensor, tokens: Tensor, vectors: Tensor | None, part: int) -> Tensor:
    """`Ops.add_vectors` in torch."""
    size = x.shape[1]
    if vectors is None or vectors.shape[1] < (part + 1) * size:
        return x
    index = (-1 - tokens).clamp(min=0)
    rows = vectors[index, part * size : (part + 1) * size].to(x.dtype)
    return torch.where((tokens < 0)[:, None], x + rows, x)


def positions_added(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """`Ops.add_positions` in torch."""
    rows = table.view(-1, x.shape[1])[positions]
    return x + rows.to(x.dtype)


class PlainOps(TorchWeights):
    """Activations have the type of the model. `format`: int8, int4 or fp8 to quantise weights, ""
    to keep the type of the model. With a format, the inputs of products are rounded to eight bits,
    too: in groups for int8 and int4, row by row for fp8."""

    adapters: TorchAdapters | None = None  # that products, tables and experts add

    def embed(
        self,
        tokens: Tensor,
        table: Matrix,
        vectors: Tensor | None = None,
        scale: float = 1.0,
        unknown_token: int | None = None,
    ) -> Tensor:
        if isinstance(table, ShardedMatrix):
            return self._divided_rows(tokens, table, vectors, scale, unknown_token)
        tokens = known(tokens, unknown_token)
        rows = embedded(_plain(table), tokens, vectors, scale)
        if self.adapters is not None:
            self.adapters.add_rows(rows, tokens, table, scale)
        return rows

    def multiply(self, x: Tensor, by: Tensor) -> Tensor:
        return (x * by).to(x.dtype)

    def add_vectors(self, x: Tensor, tokens: Tensor, vectors: Tensor | None, part: int) -> Tensor:
        return vectors_added(x, tokens, vectors, part)

    def add_positions(self, x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        return positions_added(x, positions, table)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return rms_norm(x, *norm)

    def norm_overwrites(self, x: Tensor, norm: Norm) -> None:
        x.copy_(rms_norm(x, *norm))

    def layer_norm(self, x: Tensor, norm: LayerNorm) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), *norm)

    def linear(self, x: Tensor, weight: Matrix) -> Tensor:
        y = self._product(x, local_matrix(weight))
        return self._joint.sum(y) if is_summed(weight) else y

    def gated(self, x: Tensor, weight: Matrix, activation: str = "silu") -> Tensor:
        return gate_and_mul(self.linear(x, weight), activation)

    def activated(
        self,
        x: Tensor,
        weight: Matrix,
        activation: str,
    ) -> Tensor:
        return ACTIVATIONS[activation](self.linear(x, weight))

    def route(self, x: Tensor, router: Router) -> Routed:
        found = routed(x, router)
        self.chosen[router.layer] = found.experts
        return found

    def experts(self, x: Tensor, routed: Routed, experts: Experts) -> Tensor:
        return self._mixed(x, routed, experts, self.adapters)

    def gate_rows(self, y: Tensor, x: Tensor, weight: Tensor) -> None:
        y.mul_((x.float() @ weight).sigmoid()[:, None])

    def logits(
        self,
        x: Tensor,
        weight: Matrix,
        scale: float = 1.0,
        cap: float = 0.0,
        places: Tensor | None = None,
    ) -> Tensor:
        found = self._product(x, local_matrix(weight), places).float()
        return self._scaled_logits(found, weight, scale, cap)

    def computed(self, x: Tensor) -> Tensor:
        return x

    def _product(self, x: Tensor, weight: Matrix, places: Tensor | None = None) -> Tensor:
        """W x + bias, plus the terms of adapters; x has the step's tokens at `places`, or all."""
        matrix = _plain(weight)
        y = F.linear(matrix.rounded(x), matrix.weight, matrix.bias)
        if self.adapters is not None:
            self.adapters.add(y, x, weight, places, bias=matrix.bias)
        return y

    def _matrix(
        self,
        in_size: int,
        sizes: tuple[int, ...],
        bias: bool,
        format: str,
    ) -> PlainMatrix:
        if not format:
            return PlainMatrix(in_size, sizes, bias, self._dtype, self._device)
        kind = CodedMatrix if format in CODE_FORMATS else QuantizedMatrix
        return kind(in_size, sizes, bias, self._dtype, self._device, format)


def _plain(matrix: Matrix) -> PlainMatrix:
    return cast(PlainMatrix, matrix)


def _empty_codes(format: CodeFormat, num_rows: int, in_size: int, device: torch.device) -> Codes:
    values = torch.zeros(num_rows, in_size, dtype=torch.uint8, device=device)
    num_groups = -(-in_size // (format.group or in_size))
    scales = []
    for _ in range(2 if format.has_mins else 1):
        if format.is_coarse:
            fine = torch.zeros(num_rows, num_groups, dtype=torch.int8, device=device)
            num_coarse = -(-in_size // COARSE)
            coarse = torch.zeros(num_rows, num_coarse, dtype=torch.float16, device=device)
            scales.append(Scales(fine, coarse))
        else:
            shape = (num_rows, num_groups)
            scales.append(Scales(torch.zeros(shape, dtype=format.scale_type, device=device)))
    return Codes(format, values, scales[0], scales[1] if format.has_mins else None)


def _tensors_of(codes: Codes) -> list[Tensor]:
    tensors = [codes.values]
    for scales in (codes.scales, codes.mins):
        if scales is not None:
            tensors += [tensor for tensor in scales if tensor is not None]
    return tensors


def _rows_of(codes: Codes, index: Tensor | slice) -> Codes:
    scales = codes.scales.rows(index)
    mins = None if codes.mins is None else codes.mins.rows(index)
    return Codes(codes.format, codes.values[index], scales, mins)
