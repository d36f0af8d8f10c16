"""Mixers that keep a state of fixed size for each request: the projections.
`LayerStates` reads and writes the states."""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from weft.config.decoder import (
    GatedDeltaSpec,
    LightningSpec,
    Mamba1Spec,
    MambaSpec,
    ScanNorm,
    ShortConvSpec,
    StateNames,
    StateSpec,
)
from weft.config.model import ModelConfig
from weft.models.layers.linear import HeadwiseLinear, Linear
from weft.models.layers.weight import Weight, Weights, vector
from weft.ops.protocol import Norm, Ops


class ConvWeights(NamedTuple):
    """A convolution of each channel over its last `taps` tokens."""

    weight: Tensor  # [taps, channels] float32; the last tap is of the token itself
    bias: Tensor | None  # [channels] float32


class DeltaWeights(NamedTuple):
    """The weights of the gated delta rule besides projections; all float32."""

    decay_log: Tensor  # [value_heads]
    decay_bias: Tensor  # [value_heads]
    norm: Tensor  # [value_dim]
    eps: float


class ScanWeights(NamedTuple):
    """The weights of Mamba 2 besides projections; all float32."""

    decay_log: Tensor  # [heads]
    step_bias: Tensor  # [heads]
    skip: Tensor  # [heads]
    norm: Tensor | None  # [heads * head_dim]; None: there is no norm
    eps: float


class SelectiveWeights(NamedTuple):
    """The weights of Mamba 1 besides projections; all float32."""

    decay_log: Tensor  # [state_dim, channels]
    skip: Tensor  # [channels]


class LightningWeights(NamedTuple):
    """What lightning attention has besides projections; all float32."""

    decay: Tensor  # [heads] factor of the state for each token
    norm: Tensor  # [heads * head_dim]
    eps: float


class LayerStates(Protocol):
    """The states of this step's requests, for all layers that keep one.

    Each token updates the state after the previous token of its request, which was in this step or
    an earlier one. A result does not depend on how a request's tokens are cut into steps.
    """

    def gated_conv(self, x: Tensor, conv: ConvWeights, layer: int) -> Tensor:
        """x [T, 3 C], parts b, c and x -> c · conv(b · x), [T, C]"""
        ...

    def silu_conv(self, x: Tensor, conv: ConvWeights, layer: int) -> Tensor:
        """x [T, C] (may be overwritten) -> silu(conv(x)), [T, C]"""
        ...

    def gated_delta(
        self,
        qkv: Tensor,
        gate: Tensor,
        rates: Tensor,
        weights: DeltaWeights,
        layer: int,
    ) -> Tensor:
        """norm(S q) · silu(gate), where S <- a S, then S <- S + k b (v - S k), for each value head.

        qkv [T, q | k | v], q and k of the key heads, not normed yet; gate [T, value_heads
        value_dim]; rates [T, 2 value_heads]: sigmoid of the first is b, and a =
        exp(-exp(decay_log) softplus(second + decay_bias)). Returns the shape of `gate`. Source:
        arXiv:2412.06464.
        """
        ...

    def scan(
        self,
        x: Tensor,
        gate: Tensor,
        steps: Tensor,
        weights: ScanWeights,
        layer: int,
    ) -> Tensor:
        """norm(y silu(gate)), y = S c + skip x, where S <- a S + b (d x), for each head.

        x [T, x | b | c], b and c of the groups; gate [T, heads head_dim]; steps [T, heads]: d =
        softplus(steps + step_bias), and a = exp(-exp(decay_log) d). The norm is of each group, and
        stands where the layer's `MambaSpec.norm` says. Returns the shape of `gate`. Source:
        arXiv:2405.21060.
        """
        ...

    def selective(
        self,
        x: Tensor,
        gate: Tensor,
        steps: Tensor,
        shared: Tensor,
        weights: SelectiveWeights,
        layer: int,
    ) -> Tensor:
        """(S c + skip x) silu(gate), where S <- a S + b (d x), for each channel.

        x, gate and steps [T, channels]; shared [T, b | c]: d = softplus(steps), and a =
        exp(-exp(decay_log) d). Returns the shape of `gate`. Source: arXiv:2312.00752.
        """
        ...

    def lightning(
        self,
        qkv: Tensor,
        gate: Tensor,
        weights: LightningWeights,
        layer: int,
    ) -> Tensor:
        """norm(S q) sigmoid(gate), where S <- decay S + k v, for each head.

        qkv [T, q | k | v], all three without their silu yet (may be overwritten); gate [T, heads
        head_dim]. The norm is over all heads. Returns the shape of `gate`. Source:
        arXiv:2501.08313.
        """
        ...


class StateLayer(NamedTuple):
    """What a mixer knows of the layer that it is made for."""

    config: ModelConfig
    number: int
    ops: Ops
    states_if_any: LayerStates | None

    @property
    def names(self) -> StateNames:
        return self.config.decoder.names.state

    @property
    def states(self) -> LayerStates:
        assert self.states_if_any is not None, "the model was made without states"
        return self.states_if_any


class ShortConv:
    """out(c · conv(b · x)), where b, c and x are projections of the input."""

    def __init__(self, spec: ShortConvSpec, layer: StateLayer) -> None:
        names = layer.names
        self._layer = layer
        hidden = layer.config.hidden_size
        ops = layer.ops
        channels = spec.channels
        self._inputs = Linear(hidden, {names.inputs[0]: 3 * channels}, spec.bias, ops)
        self._out = Linear(channels, {names.out: hidden}, spec.bias, ops)
        self._conv = _conv_weights(spec.taps, channels, spec.bias, ops)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]"""
        states = self._layer.states
        parts = self._layer.ops.computed(self._inputs(x))
        return self._out(states.gated_conv(parts, self._conv, self._layer.number))

    def weights(self, prefix: str) -> Weights:
        yield from self._inputs.weights(prefix)
        yield from _tensors_of(f"{prefix}.{self._layer.names.conv}", self._conv)
        yield from self._out.weights(prefix)


class GatedDelta:
    """Linear attention by the gated delta rule. Source: arXiv:2412.06464."""

    def __init__(self, spec: GatedDeltaSpec, layer: StateLayer) -> None:
        names = layer.names
        hidden = layer.config.hidden_size
        ops = layer.ops
        self._layer = layer
        self._channels = spec.channels
        self._inputs = _inputs(hidden, spec, names, ops)
        self._rates = _rates(hidden, spec, names, ops)
        self._out = Linear(spec.out_size, {names.out: hidden}, False, ops)
        self._conv = _conv_weights(spec.taps, spec.channels, False, ops)
        self._delta = DeltaWeights(
            ops.vector(spec.value_heads, exact=True),
            ops.vector(spec.value_heads, exact=True),
            ops.vector(spec.value_dim, exact=True),
            layer.config.norm_eps,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]"""
        states = self._layer.states
        rates = self._layer.ops.computed(self._rates(x))
        both = self._layer.ops.computed(self._inputs(x))
        qkv = states.silu_conv(both[:, : self._channels], self._conv, self._layer.number)
        gate = both[:, self._channels :]
        return self._out(states.gated_delta(qkv, gate, rates, self._delta, self._layer.number))

    def weights(self, prefix: str) -> Weights:
        names = self._layer.names
        yield from self._inputs.weights(prefix)
        yield from self._rates.weights(prefix)
        yield from _tensors_of(f"{prefix}.{names.conv}", self._conv)
        yield _decay(f"{prefix}.{names.decay_log}", self._delta.decay_log, names.decay_is_final)
        yield vector(f"{prefix}.{names.decay_bias}", self._delta.decay_bias)
        yield vector(f"{prefix}.{names.norm}.weight", self._delta.norm)
        yield from self._out.weights(prefix)


class Mamba:
    """Mamba 2. Source: arXiv:2405.21060."""

    def __init__(self, spec: MambaSpec, layer: StateLayer) -> None:
        names = layer.names
        hidden = layer.config.hidden_size
        ops = layer.ops
        self._layer = layer
        self._sizes = (spec.out_size, spec.channels, spec.heads)
        # One tensor: gates, the input of the convolution, and steps.
        self._inputs = HeadwiseLinear(hidden, names.inputs[0], self._sizes, 1, spec.bias, ops)
        self._out = Linear(spec.out_size, {names.out: hidden}, spec.bias, ops)
        self._conv = _conv_weights(spec.taps, spec.channels, spec.conv_bias, ops)
        self._scan = ScanWeights(
            ops.vector(spec.heads, exact=True),
            ops.vector(spec.heads, exact=True),
            ops.vector(spec.heads, exact=True),
            None if spec.norm is ScanNorm.NONE else ops.vector(spec.out_size, exact=True),
            layer.config.norm_eps,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]"""
        states = self._layer.states
        made = self._layer.ops.computed(self._inputs(x))
        gate, inner, steps = made.split_with_sizes(self._sizes, -1)
        convolved = states.silu_conv(inner, self._conv, self._layer.number)
        return self._out(states.scan(convolved, gate, steps, self._scan, self._layer.number))

    def weights(self, prefix: str) -> Weights:
        names = self._layer.names
        yield from self._inputs.weights(prefix)
        yield from _tensors_of(f"{prefix}.{names.conv}", self._conv)
        yield _decay(f"{prefix}.{names.decay_log}", self._scan.decay_log, names.decay_is_final)
        yield vector(f"{prefix}.{names.decay_bias}", self._scan.step_bias)
        yield vector(f"{prefix}.{names.skip}", self._scan.skip)
        if self._scan.norm is not None:
            yield vector(f"{prefix}.{names.norm}.weight", self._scan.norm)
        yield from self._out.weights(prefix)


class Mamba1:
    """Mamba 1. Source: arXiv:2312.00752."""

    def __init__(self, spec: Mamba1Spec, layer: StateLayer) -> None:
        names = layer.names
        hidden = layer.config.hidden_size
        ops = layer.ops
        channels = spec.channels
        self._layer = layer
        self._channels = channels
        self._sizes = spec.inner_sizes
        # One tensor: the input of the convolution, and gates.
        sizes = (channels, channels)
        self._inputs = HeadwiseLinear(hidden, names.inputs[0], sizes, 1, spec.bias, ops)
        # These decide what a state takes in and forgets, and are few.
        parts = {names.inner: sum(spec.inner_sizes)}
        self._inner = Linear(channels, parts, False, ops, precise=True)
        parts = {names.steps: channels}
        self._steps = Linear(spec.step_rank, parts, True, ops, precise=True)
        self._out = Linear(channels, {names.out: hidden}, spec.bias, ops)
        self._conv = _conv_weights(spec.taps, channels, spec.conv_bias, ops)
        self._norms: list[Norm] = []
        if spec.norm_eps:
            for size in spec.inner_sizes:
                self._norms.append(Norm(ops.vector(size, exact=True).fill_(1), spec.norm_eps))
        self._selective = SelectiveWeights(
            ops.vector(spec.state_dim * channels, exact=True).view(spec.state_dim, channels),
            ops.vector(channels, exact=True),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]"""
        states = self._layer.states
        made = self._layer.ops.computed(self._inputs(x))
        convolved = states.silu_conv(made[:, : self._channels], self._conv, self._layer.number)
        inner = self._layer.ops.computed(self._inner(convolved))
        if self._norms:
            for part, norm in zip(
                inner.split_with_sizes(self._sizes, -1), self._norms, strict=True
            ):
                self._layer.ops.norm_overwrites(part, norm)
        rank = self._sizes[0]
        steps = self._layer.ops.computed(self._steps(inner[:, :rank]))
        gate = made[:, self._channels :]
        shared = inner[:, rank:]
        y = states.selective(convolved, gate, steps, shared, self._selective, self._layer.number)
        return self._out(y)

    def weights(self, prefix: str) -> Weights:
        names = self._layer.names
        yield from self._inputs.weights(prefix)
        yield from _tensors_of(f"{prefix}.{names.conv}", self._conv)
        yield from self._inner.weights(prefix)
        yield from self._steps.weights(prefix)
        decay_log = self._selective.decay_log.T
        yield _decay(f"{prefix}.{names.decay_log}", decay_log, names.decay_is_final)
        yield vector(f"{prefix}.{names.skip}", self._selective.skip)
        yield from self._out.weights(prefix)


class Lightning:
    """Lightning attention. Source: arXiv:2501.08313."""

    def __init__(self, spec: LightningSpec, layer: StateLayer) -> None:
        names = layer.names
        hidden = layer.config.hidden_size
        ops = layer.ops
        size = spec.out_size
        self._layer = layer
        of_qkv, of_gate = names.inputs
        self._qkv = HeadwiseLinear(hidden, of_qkv, (size, size, size), spec.heads, False, ops)
        self._gate = Linear(hidden, {of_gate: size}, False, ops)
        self._out = Linear(size, {names.out: hidden}, False, ops)
        # The decays follow from the layer, and are in no checkpoint.
        decay = ops.vector(spec.heads, exact=True)
        decay.copy_(torch.tensor(spec.decays))
        self._weights = LightningWeights(decay, ops.vector(size, exact=True), spec.norm_eps)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]"""
        states = self._layer.states
        gate = self._layer.ops.computed(self._gate(x))
        qkv = self._layer.ops.computed(self._qkv(x))
        return self._out(states.lightning(qkv, gate, self._weights, self._layer.number))

    def weights(self, prefix: str) -> Weights:
        yield from self._qkv.weights(prefix)
        yield from self._gate.weights(prefix)
        yield vector(f"{prefix}.{self._layer.names.norm}.weight", self._weights.norm)
        yield from self._out.weights(prefix)


StateMixer: TypeAlias = ShortConv | GatedDelta | Mamba | Mamba1 | Lightning


def make_state_mixer(spec: StateSpec, layer: StateLayer) -> StateMixer:
    if isinstance(spec, ShortConvSpec):
        return ShortConv(spec, layer)
    if isinstance(spec, MambaSpec):
        return Mamba(spec, layer)
    if isinstance(spec, Mamba1Spec):
        return Mamba1(spec, layer)
    if isinstance(spec, LightningSpec):
        return Lightning(spec, layer)
    return GatedDelta(spec, layer)


def _inputs(hidden: int, spec: GatedDeltaSpec, names: StateNames, ops: Ops) -> Linear:
    """The projection to queries, keys, values and gates."""
    if len(names.inputs) > 1:
        parts = dict(zip(names.inputs, (spec.channels, spec.out_size), strict=True))
        return Linear(hidden, parts, False, ops)
    key_size = spec.key_heads * spec.key_dim
    sizes = (key_size, key_size, spec.out_size, spec.out_size)
    return HeadwiseLinear(hidden, names.inputs[0], sizes, spec.key_heads, False, ops)


def _rates(hidden: int, spec: GatedDeltaSpec, names: StateNames, ops: Ops) -> Linear:
    """The projection to the two rates of each value head. They decide what a state forgets, and are
    few: they keep at least eight bits."""
    sizes = (spec.value_heads, spec.value_heads)
    if len(names.rates) > 1:
        parts = dict(zip(names.rates, sizes, strict=True))
        return Linear(hidden, parts, False, ops, precise=True)
    return HeadwiseLinear(hidden, names.rates[0], sizes, spec.key_heads, False, ops, precise=True)


def _conv_weights(taps: int, channels: int, bias: bool, ops: Ops) -> ConvWeights:
    return ConvWeights(
        ops.vector(taps * channels, exact=True).view(taps, channels),
        ops.vector(channels, exact=True) if bias else None,
    )


def _decay(name: str, decay_log: Tensor, is_final: bool) -> Weight:
    """A weight that is stored as it comes; if `is_final`, the checkpoint holds -exp(decay_log)."""
    if not is_final and decay_log.dim() == 1:
        return vector(name, decay_log)

    def put(
        content: Tensor,
        start: int = 0,
        scales: Tensor | None = None,
    ) -> None:
        assert scales is None
        decays = torch.log(-content.float()) if is_final else content
        decay_log[start : start + len(content)] = decays

    def get(start: int = 0, stop: int | None = None) -> Tensor:
        decays = decay_log[start:stop].clone(memory_format=torch.contiguous_format)
        return -torch.exp(decays) if is_final else decays

    return Weight(
        name,
        tuple(decay_log.shape),
        put,
        get,
    )


def _tensors_of(prefix: str, conv: ConvWeights) -> Weights:
    """The tensors of a convolution. Checkpoints have the taps of a channel adjacent: [channels, 1,
    taps]."""
    taps, channels = conv.weight.shape

    def put(
        content: Tensor,
        start: int = 0,
        scales: Tensor | None = None,
    ) -> None:
        assert start == 0
        assert scales is None
        conv.weight.copy_(content.view(channels, taps).T)

    def get(start: int = 0, stop: int | None = None) -> Tensor:
        return conv.weight.T.reshape(channels, 1, taps)[start:stop].contiguous()

    yield Weight(
        f"{prefix}.weight",
        (channels, 1, taps),
        put,
        get,
    )
    if conv.bias is not None:
        yield vector(f"{prefix}.bias", conv.bias)
