"""States of requests by the CPU kernels.

The functions of `LayerStates` record; the recorded program runs on `step`, which `prepare` fills.
"""

from __future__ import annotations

from torch import Tensor

from weft.arrays import IntArray
from weft.config.decoder import GatedDeltaSpec, MambaSpec, ScanNorm
from weft.config.model import ModelConfig
from weft.executor.kv_pool import StatePool
from weft.models.layers.states import (
    ConvWeights,
    DeltaWeights,
    LightningWeights,
    ScanWeights,
    SelectiveWeights,
)
from weft.ops.cpp import abi
from weft.ops.cpp.ops import CppOps
from weft.plan.step import StateSlots


class CppStates:
    """The `LayerStates` for recorded programs."""

    def __init__(
        self,
        config: ModelConfig,
        pool: StatePool,
        ops: CppOps,
        step: abi.StepArgs,
    ) -> None:
        """`step`: the arguments of the programs."""
        self._config = config
        self._pool = pool
        self._ops = ops
        self._step = step
        # `step` has plain addresses: this attribute keeps the memory alive.
        self._slots: StateSlots | None = None

    def prepare(self, lens: IntArray, slots: StateSlots) -> None:
        self._slots = slots
        step = self._step
        step.state_reads = slots.reads.ctypes.data
        step.state_writes = slots.writes.ctypes.data
        step.num_kept = len(slots.kept_rows)
        step.kept_rows = slots.kept_rows.ctypes.data
        step.kept_lens = slots.kept_lens.ctypes.data
        step.kept_slots = slots.kept_slots.ctypes.data

    def gated_conv(self, x: Tensor, conv: ConvWeights, layer: int) -> Tensor:
        channels = conv.weight.shape[1]
        before, after, value = x.chunk(3, -1)
        args = self._conv_args(value, conv, layer)
        args.in_gate = before.data_ptr()
        args.out_gate = after.data_ptr()
        y = self._ops.recorder.buffer(channels)
        return self._record(args, y)

    def silu_conv(self, x: Tensor, conv: ConvWeights, layer: int) -> Tensor:
        args = self._conv_args(x, conv, layer)
        args.has_silu = True
        return self._record(args, x)

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
        recorder = self._ops.recorder
        out = recorder.buffer(spec.out_size)
        factors = recorder.buffer(spec.value_heads * abi.DELTA_FACTORS)
        _, matrices = self._pool.of_layer[layer]
        args = abi.DeltaArgs(
            qkv=qkv.data_ptr(),
            qkv_stride=qkv.stride(0),
            gate=gate.data_ptr(),
            gate_stride=gate.stride(0),
            rates=rates.data_ptr(),
            rates_stride=rates.stride(0),
            out=out.data_ptr(),
            key_heads=spec.key_heads,
            value_heads=spec.value_heads,
            key_dim=spec.key_dim,
            value_dim=spec.value_dim,
            is_tiled=spec.is_tiled,
            decay_log=weights.decay_log.data_ptr(),
            decay_bias=weights.decay_bias.data_ptr(),
            norm_weight=weights.norm.data_ptr(),
            eps=weights.eps,
            factors=factors.data_ptr(),
            states=matrices.data_ptr(),
            state_stride=matrices.stride(0),
        )
        recorder.add(args)
        return out

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
        recorder = self._ops.recorder
        out = recorder.buffer(spec.out_size)
        factors = recorder.buffer(spec.heads * abi.SCAN_FACTORS)
        _, matrices = self._pool.of_layer[layer]
        args = abi.ScanArgs(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            gate=gate.data_ptr(),
            gate_stride=gate.stride(0),
            steps=steps.data_ptr(),
            steps_stride=steps.stride(0),
            out=out.data_ptr(),
            heads=spec.heads,
            groups=spec.groups,
            head_dim=spec.head_dim,
            state_dim=spec.state_dim,
            decay_log=weights.decay_log.data_ptr(),
            step_bias=weights.step_bias.data_ptr(),
            skip=weights.skip.data_ptr(),
            norm_is_first=spec.norm is ScanNorm.NORM_FIRST,
            eps=weights.eps,
            factors=factors.data_ptr(),
            states=matrices.data_ptr(),
            state_stride=matrices.stride(0),
        )
        if weights.norm is not None:
            args.norm_weight = weights.norm.data_ptr()
        recorder.add(args)
        return out

    def selective(
        self,
        x: Tensor,
        gate: Tensor,
        steps: Tensor,
        shared: Tensor,
        weights: SelectiveWeights,
        layer: int,
    ) -> Tensor:
        state_dim, channels = weights.decay_log.shape
        recorder = self._ops.recorder
        out = recorder.buffer(channels)
        _, vectors = self._pool.of_layer[layer]
        args = abi.SelectiveArgs(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            gate=gate.data_ptr(),
            gate_stride=gate.stride(0),
            steps=steps.data_ptr(),
            steps_stride=steps.stride(0),
            shared=shared.data_ptr(),
            shared_stride=shared.stride(0),
            out=out.data_ptr(),
            channels=channels,
            state_dim=state_dim,
            decay_log=weights.decay_log.data_ptr(),
            skip=weights.skip.data_ptr(),
            states=vectors.data_ptr(),
            state_stride=vectors.stride(0),
        )
        recorder.add(args)
        return out

    def lightning(
        self,
        qkv: Tensor,
        gate: Tensor,
        weights: LightningWeights,
        layer: int,
    ) -> Tensor:
        heads = len(weights.decay)
        recorder = self._ops.recorder
        out = recorder.buffer(len(weights.norm))
        (matrices,) = self._pool.of_layer[layer]
        args = abi.LightningArgs(
            qkv=qkv.data_ptr(),
            qkv_stride=qkv.stride(0),
            gate=gate.data_ptr(),
            gate_stride=gate.stride(0),
            out=out.data_ptr(),
            heads=heads,
            head_dim=len(weights.norm) // heads,
            decay=weights.decay.data_ptr(),
            norm_weight=weights.norm.data_ptr(),
            eps=weights.eps,
            states=matrices.data_ptr(),
            state_stride=matrices.stride(0),
        )
        recorder.add(args)
        return out

    def _conv_args(self, x: Tensor, conv: ConvWeights, layer: int) -> abi.ConvArgs:
        taps, channels = conv.weight.shape
        inputs = self._pool.of_layer[layer][0]
        args = abi.ConvArgs(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            channels=channels,
            taps=taps,
            weight=conv.weight.data_ptr(),
            states=inputs.data_ptr(),
            state_stride=inputs.stride(0),
        )
        if conv.bias is not None:
            args.bias = conv.bias.data_ptr()
        return args

    def _record(self, args: abi.ConvArgs, y: Tensor) -> Tensor:
        args.y = y.data_ptr()
        args.y_stride = y.stride(0)
        self._ops.recorder.add(args)
        return y
