"""`Ops` on a GPU: torch computes products (cuBLAS), Triton kernels compute the norms, the gated
activation and the rows in eight bits. `ops/plain.py` is the specification.

The product at the end of a block also adds the residual stream (`fusion.py`), so no other kernel
reads it for that. If weights are stored in eight bits, the kernel that normalises activations also
quantises them, row by row. Torch computes products of eight bits; their sizes must be multiples of
`STEP`.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.ops.elementwise import ACTIVATIONS, gate_and_mul
from weft.ops.fusion import Normed, Product, Source, Value, source_of, tensor_of
from weft.ops.fusion import activation as activation_of
from weft.ops.joint import ALONE, TorchJoint
from weft.ops.placement import UNSPLIT, Placement, is_summed, local_matrix
from weft.ops.plain import (
    CodedMatrix,
    PlainMatrix,
    QuantizedMatrix,
    TorchWeights,
    embedded,
    known,
    positions_added,
    routed,
    vectors_added,
)
from weft.ops.protocol import Experts, LayerNorm, Matrix, Norm, Router
from weft.ops.quantize import FP8
from weft.ops.routing import Routed
from weft.ops.sharding import ShardedMatrix
from weft.ops.triton.elementwise import quantize_rows, rms_norm, scaled, silu_and_mul
from weft.ops.triton.lora import TritonAdapters

FORMATS = ("", "fp8", "int8", "int4")
STEP = 16
LEAST_ROWS = 32  # torch's product of int8 needs more than 16 rows on a GPU


class TritonOps(TorchWeights):
    """Activations have the type of the model.

    `format` of the weights: "" for the type of the model, fp8, int8, or int4, which is converted to
    floats at each use and so saves memory, not time.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        format: str = "",
        placement: Placement = UNSPLIT,
        joint: TorchJoint = ALONE,
    ) -> None:
        """Raises ValueError for an unknown format."""
        if format not in FORMATS:
            raise ValueError(
                f"weights cannot be kept in {format}; they can in {', '.join(FORMATS[1:])}"
            )
        super().__init__(dtype, device, format, placement, joint)
        self.adapters: TritonAdapters | None = None
        self._one = torch.ones(1, 1, device=device)  # the scale of unscaled products
        self._scales_rows = _scales_rows(device)

    def embed(
        self,
        tokens: Tensor,
        table: Matrix,
        vectors: Tensor | None = None,
        scale: float = 1.0,
        unknown_token: int | None = None,
    ) -> Tensor:
        if isinstance(table, ShardedMatrix):
            rows = self._divided_rows(tokens, table, vectors, scale, unknown_token)
            return activation_of(Value(rows))
        tokens = known(tokens, unknown_token)
        rows = embedded(_ours(table), tokens, vectors, scale)
        if self.adapters is not None:
            self.adapters.add_rows(rows, tokens, table, scale)
        return activation_of(Value(rows))

    def multiply(self, x: Tensor, by: Tensor) -> Tensor:
        return activation_of(Value(tensor_of(x).mul_(by)))

    def add_vectors(self, x: Tensor, tokens: Tensor, vectors: Tensor | None, part: int) -> Tensor:
        return activation_of(Value(vectors_added(tensor_of(x), tokens, vectors, part)))

    def add_positions(self, x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        return activation_of(Value(positions_added(tensor_of(x), positions, table)))

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return activation_of(Normed(x, norm, _norm))

    def norm_overwrites(self, x: Tensor, norm: Norm) -> None:
        x.copy_(rms_norm(x.contiguous(), norm))

    def layer_norm(self, x: Tensor, norm: LayerNorm) -> Tensor:
        source = tensor_of(x)
        return activation_of(Value(F.layer_norm(source, (source.shape[-1],), *norm)))

    def linear(self, x: Tensor, weight: Matrix) -> Tensor:
        compute = self._summed if is_summed(weight) else self._product
        return activation_of(Product(x, partial(compute, _ours(weight))))

    def gated(self, x: Tensor, weight: Matrix, activation: str = "silu") -> Tensor:
        source = source_of(x)
        both = self._product(_ours(weight), source.x, source.norm, None, 1.0)
        if activation == "silu":
            return activation_of(Value(silu_and_mul(both)))
        return activation_of(Value(gate_and_mul(both, activation)))

    def activated(
        self,
        x: Tensor,
        weight: Matrix,
        activation: str,
    ) -> Tensor:
        return activation_of(Value(ACTIVATIONS[activation](self.computed(self.linear(x, weight)))))

    def route(self, x: Tensor, router: Router) -> Routed:
        found = routed(self.computed(x), router)
        self.chosen[router.layer] = found.experts
        return found

    def experts(self, x: Tensor, routed: Routed, experts: Experts) -> Tensor:
        return activation_of(Product(x, partial(self._add_experts, routed, experts)))

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
        source = source_of(x)
        found = self._product(_ours(weight), source.x, source.norm, None, 1.0, places)
        return self._scaled_logits(found.float(), weight, scale, cap)

    def computed(self, x: Tensor) -> Tensor:
        return tensor_of(x)

    def _matrix(
        self,
        in_size: int,
        sizes: tuple[int, ...],
        bias: bool,
        format: str,
    ) -> PlainMatrix:
        is_aligned = not in_size % STEP and not sum(sizes) % STEP
        if format == "int4":
            return CodedMatrix(in_size, sizes, bias, self._dtype, self._device, format)
        if format and is_aligned:
            return QuantizedMatrix(in_size, sizes, bias, self._dtype, self._device, format)
        return PlainMatrix(in_size, sizes, bias, self._dtype, self._device)

    def _summed(
        self,
        matrix: PlainMatrix,
        x: Tensor,
        norm: Norm | None,
        add: Tensor | None,
        scale: float,
    ) -> Tensor:
        """A product that is a term of a sum over all ranks."""
        total = self._joint.sum(self._product(matrix, x, norm, None, 1.0))
        return total if add is None else add.add_(total, alpha=scale)

    def _product(
        self,
        matrix: PlainMatrix,
        x: Tensor,
        norm: Norm | None,
        add: Tensor | None,
        scale: float,
        places: Tensor | None = None,
    ) -> Tensor:
        if add is not None and scale != 1:
            return add.add_(self._product(matrix, x, norm, None, 1.0, places), alpha=scale)
        y = self._without_adapters(matrix, x, norm, add)
        if self.adapters is not None and self.adapters.is_active:
            self.adapters.add(y, x if norm is None else rms_norm(x, norm), matrix, places)
        return y

    def _without_adapters(
        self,
        matrix: PlainMatrix,
        x: Tensor,
        norm: Norm | None,
        add: Tensor | None,
    ) -> Tensor:
        if isinstance(matrix, QuantizedMatrix):
            return self._eight_bits(matrix, Source(x, norm), add)
        if norm is not None:
            x = rms_norm(x, norm)
        if add is None:
            return F.linear(x, matrix.weight, matrix.bias)
        if matrix.bias is not None:
            add += matrix.bias
        return add.addmm_(x, matrix.weight.t())

    def _add_experts(
        self,
        routed: Routed,
        experts: Experts,
        x: Tensor,
        norm: Norm | None,
        add: Tensor | None,
        scale: float,
    ) -> Tensor:
        assert norm is None, "the router has read the normed activation, so it is computed"
        y = self._mixed(x, routed, experts)
        if add is None:
            return y
        return add.add_(y, alpha=scale)

    def _eight_bits(self, weight: QuantizedMatrix, source: Source, add: Tensor | None) -> Tensor:
        """Multiply in 8 bits. Either the product scales rows and outputs, or the next kernel does,
        which also adds `add` and the bias.

        Products of fp8 are returned in bfloat16, whose range suffices for all of them.
        """
        x = source.x
        transposed = weight.values.t()
        if weight.format == "int8":
            values, scales = quantize_rows(x, torch.int8, source.norm, LEAST_ROWS)
            sums = torch._int_mm(values, transposed)
        else:
            values, scales = quantize_rows(x, FP8, source.norm)
            product = partial(torch._scaled_mm, values, transposed, out_dtype=torch.bfloat16)
            if self._scales_rows and add is None and weight.bias is None:
                return product(scales[:, None], weight.scales[None]).to(x.dtype)
            sums = product(self._one, self._one)
        out = add
        if out is None:
            out = torch.empty(
                len(x),
                len(weight.scales),
                dtype=x.dtype,
                device=x.device,
            )
        return scaled(sums, scales, weight.scales, weight.bias, out, add is not None)


def _norm(
    x: Tensor,
    norm: Norm,
    add: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    if add is None:
        return rms_norm(x, norm)
    return add.add_(rms_norm(x, norm), alpha=scale)


def _scales_rows(device: torch.device) -> bool:
    """Whether torch's product of fp8 accepts one scale per row: cuBLAS does not on GPUs of sm_110
    and sm_120."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) < (11, 0)


def _ours(matrix: Matrix) -> PlainMatrix:
    return cast(PlainMatrix, local_matrix(matrix))
