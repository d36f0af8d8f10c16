"""The layers of encoders of sounds after USM, a conformer. Their products are operations of one
part, which pauses for what is little work and is computed in torch: attention to the few vectors
before each vector, and convolutions. Source: arXiv:2303.01037."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.config.decoder import NormKind
from weft.config.vision.conformer import ConformerSpec
from weft.models.layers.linear import Linear
from weft.models.layers.norm import RmsNorm
from weft.models.layers.weight import Weights, vector
from weft.models.vision.layer import QKV
from weft.models.vision.limited import product
from weft.models.vision.tower import TowerBackend
from weft.ops.elementwise import rms_norm
from weft.ops.encoder import EncoderOps
from weft.ops.protocol import Norm

EPS = 1e-6  # of the norms that have no eps of their own in a `config.json`
MAX_PERIOD = 10_000.0
QUERY_SCALE = 1 / math.log(2)


def waves(spec: ConformerSpec) -> Tensor:
    """[reach, hidden] what distances from 0 on look like: sines, then cosines."""
    num = spec.hidden_size // 2
    step = math.log(MAX_PERIOD) / max(num - 1, 1)
    frequencies = torch.exp(torch.arange(num) * -step)
    positions = spec.first_position + torch.arange(spec.reach)
    angles = positions[:, None] * frequencies
    return torch.cat(
        (angles.sin(), angles.cos()),
        dim=1,
    )


class ConformerLayer:
    """Half a feed-forward part, attention, a convolution, and another half, each added to x; then a
    norm."""

    def __init__(
        self,
        spec: ConformerSpec,
        backend: TowerBackend,
    ) -> None:
        self._ops = backend.ops
        self.first = FeedForward(spec, backend)
        self.attention = NearAttention(spec, backend)
        self.convolution = LightConvolution(spec, backend)
        self.second = FeedForward(spec, backend)
        self.norm = _norm(
            spec.hidden_size,
            EPS,
            backend.ops,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]"""
        x = self.first(x)
        x = self.attention(x)
        x = self.convolution(x)
        x = self.second(x)
        return self._ops.computed(self.norm(x))

    def weights(self, prefix: str) -> Weights:
        yield from self.first.weights(f"{prefix}.feed_forward1")
        yield from self.attention.weights(prefix)
        yield from self.convolution.weights(f"{prefix}.lconv1d")
        yield from self.second.weights(f"{prefix}.feed_forward2")
        yield from self.norm.weights(f"{prefix}.norm_out")


class FeedForward:
    """x + s norm(W silu(V norm(x)))"""

    def __init__(
        self,
        spec: ConformerSpec,
        backend: TowerBackend,
    ) -> None:
        ops = backend.ops
        self._backend = backend
        self._ops = ops
        self._scale = spec.residual_scale
        self.before = _norm(
            spec.hidden_size,
            EPS,
            ops,
        )
        self.up = product(
            "ffw_layer_1",
            spec.hidden_size,
            spec.inner_size,
            ops,
            is_limited=spec.is_limited,
        )
        self.down = product(
            "ffw_layer_2",
            spec.inner_size,
            spec.hidden_size,
            ops,
            is_limited=spec.is_limited,
        )
        self.after = _norm(spec.hidden_size, EPS, ops)  # its weight has the factor s

    def __call__(self, x: Tensor) -> Tensor:
        ops = self._ops
        normed = ops.computed(self.before(x))
        inner = ops.computed(self.up(normed))
        # A view, as at all pauses: the buffer itself may be reused when nobody holds it.
        self._backend.pause(inner[:], bend)
        return x + self.after(self.down(inner))

    def weights(self, prefix: str) -> Weights:
        yield from self.before.weights(f"{prefix}.pre_layer_norm")
        yield from self.up.weights(prefix)
        yield from self.down.weights(prefix)
        name = f"{prefix}.post_layer_norm.weight"
        yield vector(name, self.after.norm.weight, times=self._scale)


class NearAttention:
    """x + norm(W attention(norm(x))): each vector attends to itself and the `reach - 1` before it.
    A key of each distance is added to the keys. Source: arXiv:1901.02860, section 3.3, without
    its biases."""

    def __init__(
        self,
        spec: ConformerSpec,
        backend: TowerBackend,
    ) -> None:
        ops = backend.ops
        hidden = spec.hidden_size
        self._spec = spec
        self._backend = backend
        self._ops = ops
        self._positions = waves(spec).to(backend.device)
        self.before = _norm(
            hidden,
            EPS,
            ops,
        )
        self.inputs = [
            product(name, hidden, hidden, ops, is_limited=spec.is_limited) for name in QKV
        ]
        self.distances = Linear(
            hidden,
            {"relative_k_proj": hidden},
            False,
            ops,
        )
        self.scales = ops.vector(spec.head_dim, exact=True)
        self.out = product(
            "post",
            hidden,
            hidden,
            ops,
            is_limited=spec.is_limited,
        )
        self.after = _norm(
            hidden,
            EPS,
            ops,
        )

    def __call__(self, x: Tensor) -> Tensor:
        ops = self._ops
        hidden = self._spec.hidden_size
        normed = ops.computed(self.before(x))
        qkv = ops.space(normed, 3 * hidden)
        for part, out in zip(self.inputs, qkv.chunk(3, dim=1), strict=True):
            part.into(normed, out)
        attended = ops.space(normed, hidden)
        self._backend.pause(qkv[:], partial(self._attend, attended[:]))
        return x + self.after(self.out(attended))

    def _attend(self, out: Tensor, qkv: Tensor) -> None:
        near = self._backend.run(self._distances, self._positions)
        found = self._attended(qkv.float(), near.float())
        out[: len(qkv)].copy_(found)

    def _distances(self, positions: Tensor) -> Tensor:
        return self._ops.computed(self.distances(positions))

    def _attended(
        self,
        qkv: Tensor,
        near: Tensor,
    ) -> Tensor:
        """qkv [T, 3 hidden], near [reach, hidden] -> [T, hidden]"""
        spec = self._spec
        reach = spec.reach
        heads = (spec.num_heads, spec.head_dim)
        q, k, v = qkv.view(len(qkv), 3, *heads).unbind(1)
        scale = QUERY_SCALE * spec.head_dim**-0.5
        scales = self.scales
        if not spec.scales_are_final:
            scales = F.softplus(scales)
        q = q * scales * scale
        keys = before_each(k * spec.key_scale, reach)
        values = before_each(v, reach)
        near = near.view(reach, *heads).flip(0)
        scores = torch.einsum("thd,thdr->thr", q, keys)
        scores = scores + torch.einsum("thd,rhd->thr", q, near)
        scores = spec.score_cap * torch.tanh(scores / spec.score_cap)
        # Before the first vector there is nothing.
        index = torch.arange(reach, device=q.device)
        first = reach - 1 - torch.arange(len(q), device=q.device)
        is_there = index >= first[:, None]
        scores = scores.masked_fill(~is_there[:, None], -torch.inf)
        shares = scores.softmax(-1)
        attended = torch.einsum("thr,thdr->thd", shares, values)
        return attended.flatten(1)

    def weights(self, prefix: str) -> Weights:
        yield from self.before.weights(f"{prefix}.norm_pre_attn")
        inner = f"{prefix}.self_attn"
        for part in (*self.inputs, self.out, self.distances):
            yield from part.weights(inner)
        yield vector(f"{inner}.per_dim_scale", self.scales)
        yield from self.after.weights(f"{prefix}.norm_post_attn")


def bend(x: Tensor) -> None:
    """silu(x) in place of x"""
    x.copy_(F.silu(x.float()))


def add(others: Tensor, x: Tensor) -> None:
    """Add rows to those of x, of which there may be fewer."""
    x.add_(others[: len(x)])


def before_each(x: Tensor, num: int) -> Tensor:
    """[T, heads, n] -> [T, heads, n, num], the rows up to each row, itself last; zeros before the
    first."""
    padded = F.pad(
        x,
        (0, 0, 0, 0, num - 1, 0),
    )
    return padded.unfold(0, num, 1)


class LightConvolution:
    """x + W silu(norm(convolution(gated(V norm(x))))): the convolution reads each number of a
    vector and of the `kernel - 1` vectors before it."""

    def __init__(
        self,
        spec: ConformerSpec,
        backend: TowerBackend,
    ) -> None:
        ops = backend.ops
        hidden = spec.hidden_size
        self._backend = backend
        self._ops = ops
        self._shape = (hidden, 1, spec.kernel)
        self.before = _norm(
            hidden,
            spec.norm_eps,
            ops,
        )
        self.start = product(
            "linear_start",
            hidden,
            2 * hidden,
            ops,
            is_limited=spec.is_limited,
        )
        self.kernel = ops.vector(hidden * spec.kernel, exact=True)
        self.norm = Norm(ops.vector(hidden, exact=True), spec.norm_eps)
        self.end = product(
            "linear_end",
            hidden,
            hidden,
            ops,
            is_limited=spec.is_limited,
        )

    def __call__(self, x: Tensor) -> Tensor:
        ops = self._ops
        x = ops.computed(x)
        normed = ops.computed(self.before(x))
        opened = ops.computed(self.start(normed))
        inner = ops.space(opened, self._shape[0])
        self._backend.pause(opened[:], partial(self._mix, inner[:]))
        found = ops.computed(self.end(inner))
        self._backend.pause(found[:], partial(add, x[:]))
        return found

    def _mix(self, out: Tensor, opened: Tensor) -> None:
        gated = F.glu(opened.float(), dim=1)
        num_before = self._shape[2] - 1
        padded = F.pad(gated.t(), (num_before, 0))
        mixed = F.conv1d(
            padded,
            self.kernel.view(self._shape),
            groups=len(padded),
        )
        normed = rms_norm(mixed.t(), *self.norm)
        out[: len(opened)].copy_(F.silu(normed))

    def weights(self, prefix: str) -> Weights:
        yield from self.before.weights(f"{prefix}.pre_layer_norm")
        yield from self.start.weights(prefix)
        yield vector(f"{prefix}.depthwise_conv1d.weight", self.kernel, shape=self._shape)
        yield vector(f"{prefix}.conv_norm.weight", self.norm.weight)
        yield from self.end.weights(prefix)


def _norm(
    size: int,
    eps: float,
    ops: EncoderOps,
) -> RmsNorm:
    return RmsNorm(
        size,
        eps,
        ops,
        kind=NormKind.RMS_EXACT,
    )
