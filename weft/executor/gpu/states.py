"""States of requests by the Triton kernels.

The kernels read the numbers of a step through pointers, so that `forward` can be recorded in a CUDA
graph: it is replayed for any step that is laid out in the memory of the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from weft.arrays import IntArray, LongArray
from weft.config.decoder import GatedDeltaSpec, MambaSpec, ScanNorm
from weft.config.model import ModelConfig
from weft.executor.gpu.layout import lay_out_states
from weft.executor.kv_pool import StatePool
from weft.models.layers.states import (
    ConvWeights,
    DeltaWeights,
    LightningWeights,
    ScanWeights,
    SelectiveWeights,
)
from weft.ops.triton.states import (
    StateStep,
    convolve,
    gated_delta,
    lightning,
    norm_and_gate,
    scan,
    selective,
)
from weft.plan.step import StateSlots

# (arrays) -> the same on the device, int32
Send = Callable[[Sequence[IntArray | LongArray]], list[Tensor]]


class TritonStates:
    """The `LayerStates` of our kernels."""

    def __init__(self, config: ModelConfig, pool: StatePool, send: Send) -> None:
        self._config = config
        self._pool = pool
        self._send = send
        self._step: StateStep | None = None

    def prepare(self, lens: IntArray, slots: StateSlots) -> None:
        """Begin a step of requests with `lens` [R] tokens each."""
        arrays = lay_out_states(lens, slots, len(lens), len(slots.kept_rows))
        self.begin(self._send(arrays))

    def begin(self, there: Sequence[Tensor]) -> None:
        """Begin a step whose arrays (`lay_out_states`) are on the device."""
        self._step = StateStep(*there)

    def gated_conv(self, x: Tensor, conv: ConvWeights, layer: int) -> Tensor:
        return self._convolve(x, conv, layer, gated=True)

    def silu_conv(self, x: Tensor, conv: ConvWeights, layer: int) -> Tensor:
        return self._convolve(x, conv, layer, gated=False)

    def gated_delta(
        self,
        qkv: Tensor,
        gate: Tensor,
        rates: Tensor,
        weights: DeltaWeights,
        layer: int,
    ) -> Tensor:
        spec = self._config.decoder.layer(layer).state
        assert isinstance(spec, GatedDeltaSpec)
        _, matrices = self._pool.of_layer[layer]
        out = gated_delta(
            qkv,
            rates,
            matrices,
            self._now(),
            weights.decay_log,
            weights.decay_bias,
            spec.key_heads,
            is_tiled=spec.is_tiled,
        )
        return norm_and_gate(out, gate, weights.norm, weights.eps, gates_first=False)

    def scan(
        self,
        x: Tensor,
        gate: Tensor,
        steps: Tensor,
        weights: ScanWeights,
        layer: int,
    ) -> Tensor:
        spec = self._config.decoder.layer(layer).state
        assert isinstance(spec, MambaSpec)
        _, matrices = self._pool.of_layer[layer]
        out = scan(
            x,
            steps,
            matrices,
            self._now(),
            weights.decay_log,
            weights.step_bias,
            weights.skip,
            spec.groups,
        )
        by_group = out.view(len(out), spec.groups, -1)
        gates_first = spec.norm is not ScanNorm.NORM_FIRST
        return norm_and_gate(by_group, gate, weights.norm, weights.eps, gates_first=gates_first)

    def selective(
        self,
        x: Tensor,
        gate: Tensor,
        steps: Tensor,
        shared: Tensor,
        weights: SelectiveWeights,
        layer: int,
    ) -> Tensor:
        _, vectors = self._pool.of_layer[layer]
        return selective(
            x,
            gate,
            steps,
            shared,
            vectors,
            self._now(),
            weights.decay_log,
            weights.skip,
        )

    def lightning(
        self,
        qkv: Tensor,
        gate: Tensor,
        weights: LightningWeights,
        layer: int,
    ) -> Tensor:
        (matrices,) = self._pool.of_layer[layer]
        out = lightning(qkv, matrices, self._now(), weights.decay)
        return norm_and_gate(
            out.flatten(1)[:, None],
            gate,
            weights.norm,
            weights.eps,
            gates_first=False,
            by_sigmoid=True,
        )

    def _convolve(self, x: Tensor, conv: ConvWeights, layer: int, *, gated: bool) -> Tensor:
        inputs = self._pool.of_layer[layer][0]
        return convolve(x, inputs, self._now(), conv.weight, conv.bias, gated=gated)

    def _now(self) -> StateStep:
        assert self._step is not None, "prepare() comes first"
        return self._step
