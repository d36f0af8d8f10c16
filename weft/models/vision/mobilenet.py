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
        lines = self.rows.view(
            self.height,
            self.width,
            -1,
        )
        return lines.permute(2, 0, 1)


PlanePieces: TypeAlias = Generator[None, None, Plane]
RowPieces: TypeAlias = Generator[None, None, Tensor]


def plane_of(planes: Tensor) -> Plane:
    """[numbers, height, width]"""
    numbers, height, width = planes.shape
    by_pixel = planes.permute(1, 2, 0)
    rows = by_pixel.reshape(-1, numbers)
    return Plane(rows, height, width)


class MobileNet:
    """The encoder, up to a square of vectors."""

    def __init__(self, spec: MobileNetSpec, backend: TowerBackend, name: str) -> None:
        self._spec = spec
        self._name = name
        self.stem = WideConvolution(COLOURS, spec.stem_size, STEM_KERNEL, backend, has_bias=True)
        self.levels: list[list[NetBlock]] = []
        size = spec.stem_size
        for level in spec.levels:
            blocks = []
            for block in level:
                blocks.append(make_block(block, size, backend))
                size = block.size
            self.levels.append(blocks)
        self.fusion = PixelProducts(spec.fused_size, 2, spec.out_size, backend)
        self.norm = _norm(spec.out_size, backend.ops)

    def encode(self, pixels: Tensor) -> RowPieces:
        """[3, side, side], with a side that is a multiple of the spec's `side_step` ->
        [out_side * out_side, out_size]"""
        plane = yield from self.stem(plane_of(pixels), 2)
        fused: list[Tensor] = []
        for level in self.levels:
            for block in level:
                plane = yield from block(plane)
            fused.append(plane.by_number())
            del fused[:-2]
        vectors = yield from self._fuse(*fused)
        return vectors

    def _fuse(self, larger: Tensor, smaller: Tensor) -> RowPieces:
        sides = larger.shape[1:]
        [grown] = F.interpolate(smaller[None], sides)
        both = plane_of(torch.cat((larger, grown)))
        rows = yield from self.fusion(both.rows)
        fused = both._replace(rows=rows)
        pool = both.height // self._spec.out_side
        [square] = F.avg_pool2d(fused.by_number()[None], pool)
        vectors = plane_of(square)
        return rms_norm(vectors.rows, *self.norm.norm)

    def weights(self) -> Weights:
        name = self._name
        yield from self.stem.weights(f"{name}.conv_stem.conv", f"{name}.conv_stem.bn")
        for index, level in enumerate(self.levels):
            for number, block in enumerate(level):
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
        num_read = kernel**2 * in_size
        self.product = Linear(num_read, {"": size}, has_bias, ops)
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
        num_lines = at_once(self._backend, height * width) // width or 1
        for first in range(0, height, num_lines):
            last = min(first + num_lines, height)
            top = first * stride
            bottom = (last - 1) * stride + self._kernel
            gathered = windows(numbers[:, top:bottom], self._kernel, stride)
            found = self._backend.run(self._part, gathered)
            begin = first * width
            rows[begin : begin + len(found)].copy_(found)
            yield
        return Plane(rows, height, width)

    def _part(self, gathered: Tensor) -> Tensor:
        wide = self.product(gathered)
        bent = self._bend(self.norm(wide))
        if self.narrow is None:
            return bent
        return self.narrow.part(bent)

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
        found = self.product(x)
        return self._ops.computed(self.norm(found))

    def weights(self, name: str, norm: str) -> Weights:
        yield patch_weight(f"{name}.weight", self._shape, self.product.matrix)
        yield from self.norm.weights(norm)


class PixelProducts:
    """norm(W gelu(norm(V x))) of each pixel."""

    def __init__(self, in_size: int, ratio: int, size: int, backend: TowerBackend) -> None:
        self._backend = backend
        self._size = size
        self.wide = PixelProduct(in_size, ratio * in_size, backend)
        self.narrow = PixelProduct(ratio * in_size, size, backend)
        self._bend = Bend(backend.ops)

    def __call__(self, rows: Tensor) -> RowPieces:
        found = yield from in_strips(
            self._backend,
            self.part,
            rows,
            self._size,
        )
        return found

    def part(self, x: Tensor) -> Tensor:
        wide = self.wide.part(x)
        bent = self._bend(wide)
        return self.narrow.part(bent)

    def weights(self, prefix: str) -> Weights:
        yield from self.wide.weights(f"{prefix}.pw_exp.conv", f"{prefix}.pw_exp.bn")
        yield from self.narrow.weights(f"{prefix}.pw_proj.conv", f"{prefix}.pw_proj.bn")


class OwnConvolution:
    """The convolution of each number of pixels by itself."""

    def __init__(self, size: int, kernel: int, backend: TowerBackend) -> None:
        self._backend = backend
        self._kernel = kernel
        self._shape = (size, 1, kernel, kernel)
        num_weights = size * kernel**2
        self.kernel = backend.ops.vector(num_weights, exact=True)

    def __call__(self, plane: Plane, stride: int) -> PlanePieces:
        planes = plane.by_number()
        read = padded(planes, self._kernel, stride)
        num_at_once = len(read)
        if is_slow(self._backend):
            num_at_once = NUMBERS_AT_ONCE
        kernels = self.kernel.view(self._shape)
        pieces = []
        for some, kernel in zip(
            torch.split(read, num_at_once),
            torch.split(kernels, num_at_once),
            strict=True,
        ):
            found = F.conv2d(
                some,
                kernel,
                stride=stride,
                groups=len(some),
            )
            pieces.append(found)
            yield
        convolved = torch.cat(pieces)
        return plane_of(convolved)

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
        self.first: OwnConvolution | None = None
        if spec.first_kernel:
            self.first = OwnConvolution(in_size, spec.first_kernel, backend)
        self.first_norm = _norm(in_size, ops)
        self.middle: OwnConvolution | None = None
        if spec.kernel:
            self.middle = OwnConvolution(inner, spec.kernel, backend)
        self.middle_norm = _norm(inner, ops)
        self.products = PixelProducts(in_size, spec.ratio, spec.size, backend)
        self.factors = ops.vector(spec.size, exact=True)
        self._bend = Bend(ops)

    def __call__(self, plane: Plane) -> PlanePieces:
        x = plane
        if self.first is not None:
            x = yield from self.first(plane, 1)
        if self.middle is None:
            rows = yield from self._strips(self._all, x, self._size)
        else:
            wide = yield from self._strips(self._widen, x, self._inner)
            widened = x._replace(rows=wide)
            x = yield from self.middle(widened, self._stride)
            rows = yield from self._strips(self._narrow, x, self._size)
        rows *= self.factors
        if self._is_added:
            rows += plane.rows
        return x._replace(rows=rows)

    def _strips(
        self,
        part: Callable[[Tensor], Tensor],
        plane: Plane,
        size: int,
    ) -> RowPieces:
        found = yield from in_strips(
            self._backend,
            part,
            plane.rows,
            size,
        )
        return found

    def _begin(self, x: Tensor) -> Tensor:
        if self.first is None:
            return x
        normed = self.first_norm(x)
        return self._ops.computed(normed)

    def _widen(self, x: Tensor) -> Tensor:
        begun = self._begin(x)
        wide = self.products.wide.part(begun)
        return self._bend(wide)

    def _narrow(self, x: Tensor) -> Tensor:
        normed = self.middle_norm(x)
        bent = self._bend(normed)
        return self.products.narrow.part(bent)

    def _all(self, x: Tensor) -> Tensor:
        begun = self._begin(x)
        return self.products.part(begun)

    def weights(self, prefix: str) -> Weights:
        if self.first is not None:
            yield from self.first.weights(f"{prefix}.dw_start.conv")
            yield from self.first_norm.weights(f"{prefix}.dw_start.bn")
        if self.middle is not None:
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
        # Of the current picture.
        self._keys = torch.empty(0)
        self._values = torch.empty(0)

    def __call__(self, plane: Plane) -> PlanePieces:
        normed = rms_norm(plane.rows, *self.norm.norm)
        seen = plane._replace(rows=normed)
        self._keys = yield from self.keys(seen)
        self._values = yield from self.values(seen)
        rows = yield from in_strips(
            self._backend,
            self._part,
            normed,
            self._size,
        )
        rows *= self.factors
        if self._is_added:
            rows += plane.rows
        return plane._replace(rows=rows)

    def _part(self, x: Tensor) -> Tensor:
        ops = self._ops
        queries = ops.computed(self.queries(x))
        size = self._spec.attention_size
        attended = ops.space(queries, size)
        attend = partial(self._attend, attended[:])
        self._backend.pause(queries[:], attend)
        return ops.computed(self.out(attended))

    def _attend(self, out: Tensor, queries: Tensor) -> None:
        num = len(queries)
        head_dim = self._spec.head_dim
        asked = queries.float().reshape(-1, head_dim)
        scores = asked @ self._keys.t()
        scores *= head_dim**-0.5
        shares = scores.softmax(-1)
        attended = shares @ self._values
        out[:num].copy_(attended.view(num, -1))

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
        self.thin: OwnConvolution | None = None
        if spec.key_stride > 1:
            self.thin = OwnConvolution(in_size, spec.kernel, backend)
        self.norm = _norm(in_size, ops)
        self.product = Linear(in_size, {"": spec.head_dim}, False, ops)

    def __call__(self, plane: Plane) -> RowPieces:
        if self.thin is not None:
            plane = yield from self.thin(plane, self._stride)
        found = yield from in_strips(
            self._backend,
            self._part,
            plane.rows,
            self._size,
        )
        return found

    def _part(self, x: Tensor) -> Tensor:
        if self.thin is not None:
            x = self._ops.computed(self.norm(x))
        return self._ops.computed(self.product(x))

    def weights(self, prefix: str) -> Weights:
        if self.thin is not None:
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
    num = at_once(backend, len(rows))
    strips = torch.split(rows, num)
    results = torch.split(found, num)
    for strip, result in zip(strips, results, strict=True):
        computed = backend.run(part, strip)
        result.copy_(computed)
        yield
    return found


def windows(planes: Tensor, kernel: int, stride: int) -> Tensor:
    """All squares that a convolution reads of planes [n, H, W], each as a row, number by number."""
    lines = planes.unfold(1, kernel, stride)
    squares = lines.unfold(2, kernel, stride)
    by_output = squares.permute(1, 2, 0, 3, 4)
    return by_output.flatten(2).flatten(0, 1)


def padded(planes: Tensor, kernel: int, stride: int) -> Tensor:
    """[n, H, W] with zeros around, so that a convolution has outputs for all H / stride lines and
    W / stride columns; of an odd number, one more below and on the right."""
    height, width = planes.shape[1:]
    above, below = _borders(height, kernel, stride)
    left, right = _borders(width, kernel, stride)
    return F.pad(planes, (left, right, above, below))


def _borders(length: int, kernel: int, stride: int) -> tuple[int, int]:
    num_steps = (length - 1) // stride
    missing = num_steps * stride + kernel - length
    before = max(missing, 0) // 2
    after = max(missing, 0) - before
    return before, after


def is_slow(backend: TowerBackend) -> bool:
    return backend.device.type == "cpu"


def at_once(backend: TowerBackend, num_rows: int) -> int:
    if is_slow(backend):
        return ROWS_AT_ONCE
    return num_rows


def _norm(size: int, ops: EncoderOps) -> RmsNorm:
    return RmsNorm(size, EPS, ops, kind=NormKind.RMS_EXACT)
