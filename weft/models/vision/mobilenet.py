"""MobileNetV5. Pixels are rows: products of single pixels are parts of the backend, some rows at a
time. Convolutions with larger kernels gather the pixels that they read, or are computed in torch if
each number of a pixel is convolved by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.config.decoder import NormKind
from weft.config.vision.mobilenet import (
    Block,
    EdgeBlock,
    InvertedBlock,
    MobileNetSpec,
    QueryBlock,
)
from weft.models.layers.linear import Linear, bias_weight
from weft.models.layers.norm import RmsNorm
from weft.models.layers.weight import Weights, vector
from weft.models.vision.tower import TowerBackend
from weft.models.vision.vit import patch_weight
from weft.ops.elementwise import rms_norm
from weft.ops.encoder import EncoderOps

GELU = "gelu_pytorch_tanh"
EPS = 1e-6
COLOURS = 3
STEM_KERNEL = 3
# Rows of a part, and numbers of a pixel that torch convolves at a time, on a processor: a few
# milliseconds, after which other requests go on.
ROWS_AT_ONCE = 128
NUMBERS_AT_ONCE = 64


class Plane(NamedTuple):
    """A picture within the encoder."""

    rows: Tensor  # [height * width, numbers], float32, in reading order
    height: int
    width: int

    def by_number(self) -> Tensor:
        """[numbers, height, width]"""
        return self.rows.view(self.height, self.width, -1).permute(2, 0, 1)


PlanePieces: TypeAlias = Generator[None, None, Plane]
RowPieces: TypeAlias = Generator[None, None, Tensor]


def plane_of(planes: Tensor) -> Plane:
    """[numbers, height, width]"""
    numbers, height, width = planes.shape
    return Plane(planes.permute(1, 2, 0).reshape(-1, numbers), height, width)


class MobileNet:
    """The encoder, up to a square of vectors."""

    def __init__(self, spec: MobileNetSpec, backend: TowerBackend, name: str) -> None:
        self._spec = spec
        self._name = name
        self.stem = WideConvolution(COLOURS, spec.stem_size, STEM_KERNEL, backend, has_bias=True)
        self.stages: list[list[NetBlock]] = []
        size = spec.stem_size
        for stage in spec.stages:
            blocks = []
            for block in stage:
                blocks.append(make_block(block, size, backend))
                size = block.size
            self.stages.append(blocks)
        self.fusion = Products(spec.fused_size, 2, spec.out_size, backend)
        self.norm = _norm(spec.out_size, backend.ops)

    def encode(self, pixels: Tensor) -> RowPieces:
        """[3, side, side], with a side that is a multiple of the spec's `side_step` ->
        [out_side * out_side, out_size]"""
        plane = yield from self.stem(plane_of(pixels), 2)
        fused: list[Tensor] = []
        for index, stage in enumerate(self.stages):
            for block in stage:
                plane = yield from block(plane)
            if index >= len(self.stages) - 2:
                fused.append(plane.by_number())
        return (yield from self._fuse(*fused))

    def _fuse(self, larger: Tensor, smaller: Tensor) -> RowPieces:
        grown = F.interpolate(smaller[None], larger.shape[1:], mode="nearest")[0]
        both = plane_of(torch.cat((larger, grown)))
        wide = yield from self.fusion(both.rows)
        pool = both.height // self._spec.out_side
        square = F.avg_pool2d(Plane(wide, both.height, both.width).by_number()[None], pool)
        return rms_norm(plane_of(square[0]).rows, *self.norm.norm)

    def weights(self) -> Weights:
        name = self._name
        yield from self.stem.weights(f"{name}.conv_stem.conv", f"{name}.conv_stem.bn")
        for index, stage in enumerate(self.stages):
            for number, block in enumerate(stage):
                yield from block.weights(f"{name}.blocks.{index}.{number}")
        yield from self.fusion.weights(f"{name}.msfa.ffn")
        yield from self.norm.weights(f"{name}.msfa.norm")


class WideConvolution:
    """gelu(norm(convolution(x) + bias)); `narrowed`: norm(product(that))"""

    def __init__(
        self,
        in_size: int,
        size: int,
        kernel: int,
        backend: TowerBackend,
        *,
        has_bias: bool = False,
        narrowed: int = 0,
    ) -> None:
        ops = backend.ops
        self._backend = backend
        self._ops = ops
        self._kernel = kernel
        self._shape = (size, in_size, kernel, kernel)
        self.product = Linear(kernel**2 * in_size, {"": size}, has_bias, ops)
        self.norm = _norm(size, ops)
        self.narrow = PixelProduct(size, narrowed, backend) if narrowed else None
        self._out_size = narrowed or size
        self._bend = Bend(ops)

    def __call__(self, plane: Plane, stride: int) -> PlanePieces:
        """Some lines of the output at a time."""
        numbers = padded(plane.by_number(), self._kernel, stride)
        height = -(-plane.height // stride)
        width = -(-plane.width // stride)
        rows = plane.rows.new_empty(height * width, self._out_size)
        num_lines = _at_once(self._backend, height * width) // width or 1
        for first in range(0, height, num_lines):
            last = min(first + num_lines, height)
            read = numbers[:, first * stride : (last - 1) * stride + self._kernel]
            windows = read.unfold(1, self._kernel, stride).unfold(2, self._kernel, stride)
            gathered = windows.permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1)
            rows[first * width : last * width].copy_(self._backend.run(self._part, gathered))
            yield
        return Plane(rows, height, width)

    def _part(self, windows: Tensor) -> Tensor:
        bent = self._bend(self.norm(self.product(windows)))
        return bent if self.narrow is None else self.narrow.part(bent)

    def weights(self, name: str, norm: str) -> Weights:
        yield patch_weight(f"{name}.weight", self._shape, self.product.matrix)
        if self.product.bias:
            yield bias_weight(f"{name}.bias", self.product.matrix, 0)
        yield from self.norm.weights(norm)


class PixelProduct:
    """norm(W x) of each pixel."""

    def __init__(self, in_size: int, size: int, backend: TowerBackend) -> None:
        self._ops = backend.ops
        self._shape = (size, in_size, 1, 1)
        self.product = Linear(in_size, {"": size}, False, backend.ops)
        self.norm = _norm(size, backend.ops)

    def part(self, x: Tensor) -> Tensor:
        return self._ops.computed(self.norm(self.product(x)))

    def weights(self, name: str, norm: str) -> Weights:
        yield patch_weight(f"{name}.weight", self._shape, self.product.matrix)
        yield from self.norm.weights(norm)


class Products:
    """norm(W gelu(norm(V x))) of each pixel."""

    def __init__(self, in_size: int, ratio: int, size: int, backend: TowerBackend) -> None:
        self._backend = backend
        self._size = size
        self.wide = PixelProduct(in_size, ratio * in_size, backend)
        self.narrow = PixelProduct(ratio * in_size, size, backend)
        self._bend = Bend(backend.ops)

    def __call__(self, rows: Tensor) -> RowPieces:
        return (yield from in_strips(self._backend, self.part, rows, self._size))

    def part(self, x: Tensor) -> Tensor:
        return self.narrow.part(self._bend(self.wide.part(x)))

    def weights(self, prefix: str) -> Weights:
        yield from self.wide.weights(f"{prefix}.pw_exp.conv", f"{prefix}.pw_exp.bn")
        yield from self.narrow.weights(f"{prefix}.pw_proj.conv", f"{prefix}.pw_proj.bn")


class OwnConvolution:
    """The convolution of each number of pixels by itself."""

    def __init__(self, size: int, kernel: int, backend: TowerBackend) -> None:
        self._backend = backend
        self._shape = (size, 1, kernel, kernel)
        self.kernel = backend.ops.vector(math.prod(self._shape), exact=True)

    def __call__(self, plane: Plane, stride: int) -> PlanePieces:
        numbers = padded(plane.by_number(), self._shape[-1], stride)
        kernel = self.kernel.view(self._shape)
        num_at_once = NUMBERS_AT_ONCE if _is_slow(self._backend) else len(numbers)
        found = []
        for first in range(0, len(numbers), num_at_once):
            some = slice(first, first + num_at_once)
            read = numbers[None, some]
            found.append(F.conv2d(read, kernel[some], stride=stride, groups=read.shape[1])[0])
            yield
        return plane_of(torch.cat(found))

    def weights(self, name: str) -> Weights:
        yield vector(f"{name}.weight", self.kernel, shape=self._shape)


class NetEdgeBlock:
    def __init__(self, spec: EdgeBlock, in_size: int, backend: TowerBackend) -> None:
        self._stride = spec.stride
        self._is_added = spec.stride == 1 and spec.size == in_size
        self.wide = WideConvolution(
            in_size,
            spec.ratio * in_size,
            spec.kernel,
            backend,
            narrowed=spec.size,
        )

    def __call__(self, plane: Plane) -> PlanePieces:
        found = yield from self.wide(plane, self._stride)
        if not self._is_added:
            return found
        return found._replace(rows=found.rows + plane.rows)

    def weights(self, prefix: str) -> Weights:
        yield from self.wide.weights(f"{prefix}.conv_exp", f"{prefix}.bn1")
        assert self.wide.narrow is not None
        yield from self.wide.narrow.weights(f"{prefix}.conv_pwl", f"{prefix}.bn2")


class NetInvertedBlock:
    def __init__(self, spec: InvertedBlock, in_size: int, backend: TowerBackend) -> None:
        ops = backend.ops
        inner = spec.ratio * in_size
        self._backend = backend
        self._ops = ops
        self._stride = spec.stride
        self._inner = inner
        self._size = spec.size
        self._is_added = spec.stride == 1 and spec.size == in_size
        self.first = OwnConvolution(in_size, spec.first_kernel, backend)
        self.first_norm = _norm(in_size, ops)
        self._has_first = spec.first_kernel > 0
        self.middle = OwnConvolution(inner, spec.kernel, backend)
        self.middle_norm = _norm(inner, ops)
        self._has_middle = spec.kernel > 0
        self.products = Products(in_size, spec.ratio, spec.size, backend)
        self.factors = ops.vector(spec.size, exact=True)
        self._bend = Bend(ops)

    def __call__(self, plane: Plane) -> PlanePieces:
        x = plane
        if self._has_first:
            x = yield from self.first(plane, 1 if self._has_middle else self._stride)
        if self._has_middle:
            wide = yield from in_strips(self._backend, self._widen, x.rows, self._inner)
            x = yield from self.middle(x._replace(rows=wide), self._stride)
            rows = yield from in_strips(self._backend, self._narrow, x.rows, self._size)
        else:
            rows = yield from in_strips(self._backend, self._whole, x.rows, self._size)
        rows *= self.factors
        if self._is_added:
            rows += plane.rows
        return x._replace(rows=rows)

    def _begin(self, x: Tensor) -> Tensor:
        return self._ops.computed(self.first_norm(x)) if self._has_first else x

    def _widen(self, x: Tensor) -> Tensor:
        return self._bend(self.products.wide.part(self._begin(x)))

    def _narrow(self, x: Tensor) -> Tensor:
        return self.products.narrow.part(self._bend(self.middle_norm(x)))

    def _whole(self, x: Tensor) -> Tensor:
        return self.products.part(self._begin(x))

    def weights(self, prefix: str) -> Weights:
        if self._has_first:
            yield from self.first.weights(f"{prefix}.dw_start.conv")
            yield from self.first_norm.weights(f"{prefix}.dw_start.bn")
        if self._has_middle:
            yield from self.middle.weights(f"{prefix}.dw_mid.conv")
            yield from self.middle_norm.weights(f"{prefix}.dw_mid.bn")
        yield from self.products.weights(prefix)
        yield vector(f"{prefix}.layer_scale.gamma", self.factors)


class NetQueryBlock:
    def __init__(self, spec: QueryBlock, in_size: int, backend: TowerBackend) -> None:
        ops = backend.ops
        self._spec = spec
        self._backend = backend
        self._ops = ops
        self._size = spec.size
        self._is_added = spec.size == in_size
        self.norm = _norm(in_size, ops)
        self.queries = Linear(in_size, {"": spec.attention_size}, False, ops)
        self.keys = KeyMaker(spec, in_size, backend)
        self.values = KeyMaker(spec, in_size, backend)
        self.out = Linear(spec.attention_size, {"": spec.size}, False, ops)
        self.factors = ops.vector(spec.size, exact=True)
        self._shapes = (
            (spec.attention_size, in_size, 1, 1),
            (spec.size, spec.attention_size, 1, 1),
        )
        self._seen = (torch.empty(0), torch.empty(0))  # keys and values of the current picture

    def __call__(self, plane: Plane) -> PlanePieces:
        normed = plane._replace(rows=rms_norm(plane.rows, *self.norm.norm))
        keys = yield from self.keys(normed)
        values = yield from self.values(normed)
        self._seen = (keys, values)
        rows = yield from in_strips(self._backend, self._part, normed.rows, self._size)
        rows *= self.factors
        if self._is_added:
            rows += plane.rows
        return plane._replace(rows=rows)

    def _part(self, x: Tensor) -> Tensor:
        ops = self._ops
        queries = ops.computed(self.queries(x))
        attended = ops.space(queries, self._spec.attention_size)
        self._backend.pause(queries[:], partial(self._attend, attended[:]))
        return ops.computed(self.out(attended))

    def _attend(self, out: Tensor, queries: Tensor) -> None:
        head_dim = self._spec.head_dim
        keys, values = self._seen
        asked = queries.float().reshape(-1, head_dim)
        shares = (asked @ keys.t() * head_dim**-0.5).softmax(-1)
        out[: len(queries)].copy_((shares @ values).view(len(queries), -1))

    def weights(self, prefix: str) -> Weights:
        inner = f"{prefix}.attn"
        yield from self.norm.weights(f"{prefix}.norm")
        of_queries, of_outputs = self._shapes
        yield patch_weight(f"{inner}.query.proj.weight", of_queries, self.queries.matrix)
        yield from self.keys.weights(f"{inner}.key")
        yield from self.values.weights(f"{inner}.value")
        yield patch_weight(f"{inner}.output.proj.weight", of_outputs, self.out.matrix)
        yield vector(f"{prefix}.layer_scale.gamma", self.factors)


class KeyMaker:
    """The keys, or values, of a picture: thinned by a convolution and normed, if there is one."""

    def __init__(self, spec: QueryBlock, in_size: int, backend: TowerBackend) -> None:
        ops = backend.ops
        self._backend = backend
        self._ops = ops
        self._stride = spec.key_stride
        self._size = spec.head_dim
        self._shape = (spec.head_dim, in_size, 1, 1)
        self.thin = OwnConvolution(in_size, spec.kernel, backend)
        self.norm = _norm(in_size, ops)
        self.product = Linear(in_size, {"": spec.head_dim}, False, ops)

    @property
    def _is_thinned(self) -> bool:
        return self._stride > 1

    def __call__(self, plane: Plane) -> RowPieces:
        if self._is_thinned:
            plane = yield from self.thin(plane, self._stride)
        return (yield from in_strips(self._backend, self._part, plane.rows, self._size))

    def _part(self, x: Tensor) -> Tensor:
        if self._is_thinned:
            x = self._ops.computed(self.norm(x))
        return self._ops.computed(self.product(x))

    def weights(self, prefix: str) -> Weights:
        if self._is_thinned:
            yield from self.thin.weights(f"{prefix}.down_conv")
            yield from self.norm.weights(f"{prefix}.norm")
        yield patch_weight(f"{prefix}.proj.weight", self._shape, self.product.matrix)


NetBlock: TypeAlias = NetEdgeBlock | NetInvertedBlock | NetQueryBlock


def make_block(spec: Block, in_size: int, backend: TowerBackend) -> NetBlock:
    if isinstance(spec, EdgeBlock):
        return NetEdgeBlock(spec, in_size, backend)
    if isinstance(spec, InvertedBlock):
        return NetInvertedBlock(spec, in_size, backend)
    return NetQueryBlock(spec, in_size, backend)


class Bend:
    """gelu(x), by the operation that has limits: here there are none."""

    def __init__(self, ops: EncoderOps) -> None:
        self._ops = ops
        self._limits = ops.vector(2, exact=True)
        self._limits[0] = -math.inf
        self._limits[1] = math.inf

    def __call__(self, x: Tensor) -> Tensor:
        x = self._ops.computed(x)
        self._ops.limit(x, self._limits, x, GELU)
        return x


def in_strips(
    backend: TowerBackend,
    part: Callable[[Tensor], Tensor],
    rows: Tensor,
    size: int,
) -> RowPieces:
    """part(rows), some rows at a time: [T, n] -> [T, size]"""
    found = rows.new_empty(len(rows), size)
    num = _at_once(backend, len(rows))
    for first in range(0, len(rows), num):
        found[first : first + num].copy_(backend.run(part, rows[first : first + num]))
        yield
    return found


def padded(planes: Tensor, kernel: int, stride: int) -> Tensor:
    """[n, H, W] with zeros around, so that a convolution has outputs for all H / stride lines and
    W / stride columns; of an odd number, one more below and on the right."""
    height, width = planes.shape[1:]
    above, below = _borders(height, kernel, stride)
    left, right = _borders(width, kernel, stride)
    return F.pad(planes, (left, right, above, below))


def _borders(length: int, kernel: int, stride: int) -> tuple[int, int]:
    num_outputs = -(-length // stride)
    missing = max((num_outputs - 1) * stride + kernel - length, 0)
    return missing // 2, missing - missing // 2


def _is_slow(backend: TowerBackend) -> bool:
    return backend.device.type == "cpu"


def _at_once(backend: TowerBackend, num_rows: int) -> int:
    return ROWS_AT_ONCE if _is_slow(backend) else num_rows


def _norm(size: int, ops: EncoderOps) -> RmsNorm:
    return RmsNorm(size, EPS, ops, kind=NormKind.RMS_EXACT)
