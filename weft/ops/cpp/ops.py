"""`Ops` with the CPU kernels. Activations are float32. The functions add operations to the program
that is being recorded; norms and sums are fused into products (`../fusion.py`)."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from weft.ops.cpp import abi
from weft.ops.cpp.abi import Epilogue, WeightFormat
from weft.ops.cpp.library import Library
from weft.ops.cpp.matrices import PackedMatrix, Panels
from weft.ops.cpp.program import Program, ProgramRecorder
from weft.ops.cpp.routes import Routes, make_routes, route_args
from weft.ops.cpp.streams import CppStreams
from weft.ops.elementwise import CLAMPED
from weft.ops.expert_parallel import layer_of
from weft.ops.fusion import (
    Normed,
    Product,
    Source,
    Value,
    source_of,
    tensor_of,
)
from weft.ops.fusion import activation as activation_of
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
from weft.ops.routing import Routed
from weft.ops.sharding import ShardedMatrix

EPILOGUES = {
    "gelu": Epilogue.GELU,
    "gelu_new": Epilogue.GELU_TANH,
    "gelu_pytorch_tanh": Epilogue.GELU_TANH,
    "quick_gelu": Epilogue.QUICK_GELU,
    "relu": Epilogue.RELU,
    "relu2": Epilogue.RELU2,
    "tanh": Epilogue.TANH,
}
GATES = {
    "silu": Epilogue.GATED_SILU,
    "gelu": Epilogue.GATED_GELU,
    "gelu_pytorch_tanh": Epilogue.GATED_GELU_TANH,
    CLAMPED: Epilogue.GATED_CLAMPED,  # for experts only
}


class RecordedParts(NamedTuple):
    """The address of all adapters' weights for the parts of a matrix."""

    address: int  # of `abi.PackedLoraPart` [adapters, parts]
    is_bf16: bool
    max_rank: int  # a multiple of SLAB


class RecordedAdapters(Protocol):
    """The adapters of recorded products (`lora.py`)."""

    def of_panels(self, panels: Panels) -> abi.Lora | None:
        """The adapters of these panels; None if adapters cannot change them."""
        ...

    def of_table(self, panels: Panels) -> abi.LoraTable | None:
        """The adapters of the rows of these panels; None if adapters cannot change them."""
        ...

    def of_experts(self, panels: Panels) -> RecordedParts | None:
        """The adapters of the matrices of all experts; None if adapters cannot change them."""
        ...

    def scratch_bytes(self, lora: abi.Lora, num_tokens: int) -> int:
        """Bytes of scratch memory that a product of `num_tokens` tokens needs for adapters."""
        ...

    def tell(self, step: abi.StepArgs, places: Tensor | None) -> None:
        """Set the adapters of a step of a head: of the step's tokens at `places`; None: of all."""
        ...


class RecordedJoint(Protocol):
    """What several processes compute together, as operations of programs (`joint.py`)."""

    def sum(
        self,
        recorder: ProgramRecorder,
        x: Tensor,
        add: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """Replace x by its sum over all ranks; or add `scale` times the sum to `add`. Returns the
        tensor that has the result."""
        ...

    def gather(self, recorder: ProgramRecorder, x: Tensor, size: int) -> Tensor:
        """On rank 0, the columns x [T, part] of all ranks, [T, size]; x on other ranks."""
        ...

    def experts(
        self,
        recorder: ProgramRecorder,
        layer: int,
        x: Tensor,
        routes: Routes,
        y: Tensor,
        *,
        adds: bool,
        scale: float,
    ) -> None:
        """Write to y, or add to it, `scale` times the output of experts of all peers for x."""
        ...

    def take(self, recorder: ProgramRecorder, x: Tensor) -> None:
        """Fill x with what the previous part of the model has computed."""
        ...

    def give(self, recorder: ProgramRecorder, x: Tensor) -> None:
        """Send x to the next stage."""
        ...


class CppOps:
    """`Ops` that record into `recorder`. `begin` begins a program, `finish` ends it."""

    def __init__(
        self,
        library: Library,
        format: WeightFormat,
        *,
        keeps_codes: bool = False,
        placement: Placement = UNSPLIT,
        joint: RecordedJoint | None = None,
    ) -> None:
        """`format` of the weights; precise ones get at least eight bits. `keeps_codes`: weights
        that are stored as codes stay codes, although `format` is one of floats. `joint`: for a
        placement that shares the model with other processes."""
        self.library = library
        self.placement = placement
        self.joint = joint
        self._keeps_codes = keeps_codes
        self.vectors: list[Tensor] = []
        self.matrices: list[Matrix] = []
        self._format = format
        self._recorder: ProgramRecorder | None = None
        self.adapters: RecordedAdapters | None = None
        # Whether inputs of products with bfloat16 weights may be rounded to bfloat16 if that is
        # faster.
        self.may_round = False
        self.streams: StreamOps = CppStreams(self, EPILOGUES)
        self.chosen: dict[int, Tensor] = {}

    @property
    def tensors(self) -> list[Tensor]:
        tensors = list(self.vectors)
        for matrix in self.matrices:
            tensors += matrix.tensors
        return tensors

    @property
    def recorder(self) -> ProgramRecorder:
        assert self._recorder is not None, "nothing is being recorded"
        return self._recorder

    def begin(self, capacity: int) -> None:
        """Begin a program for steps of up to `capacity` tokens."""
        self._recorder = ProgramRecorder(capacity)

    def finish(self) -> Program:
        program = self.recorder.finish()
        self._recorder = None
        return program

    def vector(self, size: int, *, exact: bool = False) -> Tensor:
        self.vectors.append(torch.empty(size))
        return self.vectors[-1]

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
        def make(in_size: int, sizes: tuple[int, ...], bias: bool) -> Matrix:
            is_coarse = self._format == WeightFormat.I4
            return self._packed(
                in_size,
                sizes,
                bias,
                gated,
                WeightFormat.I8 if precise and is_coarse else self._format,
                self._keeps_codes,
                # `embed` reads rows without an order, and all experts would have to share one.
                takes_order=not precise,
            )

        return self.placement.matrix(make, in_size, sizes, bias, shard)

    def exact_matrix(self, in_size: int, size: int, *, bias: bool = False) -> Matrix:
        return self._packed(in_size, (size,), bias, False, WeightFormat.F32)

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
        def make(num_experts: int, in_size: int, sizes: tuple[int, ...], bias: bool) -> Matrix:
            return self._packed(
                in_size, sizes, bias, gated, self._format, self._keeps_codes, num_experts
            )

        return self.placement.expert_matrix(make, num_experts, in_size, sizes, bias, shard)

    def _packed(
        self,
        in_size: int,
        sizes: tuple[int, ...],
        bias: bool,
        gated: bool,
        format: WeightFormat,
        keeps_codes: bool = False,
        num_experts: int = 1,
        *,
        takes_order: bool = False,
    ) -> PackedMatrix:
        packed = PackedMatrix(
            self.library,
            in_size,
            sizes,
            bias,
            gated,
            format,
            keeps_codes,
            num_experts,
            takes_order=takes_order,
        )
        self.matrices.append(packed)
        return packed

    @property
    def _joint(self) -> RecordedJoint:
        assert self.joint is not None, "this process has the model alone"
        return self.joint

    def of_heads(self, values: Tensor) -> Tensor:
        return self.placement.of_heads(values)

    def layer_range(self, num_layers: int) -> LayerRange:
        return self.placement.layer_range(num_layers)

    def take(self, num_tokens: int, size: int) -> Tensor:
        """`Ops.take`, recorded once for steps of any size: each step has its own number of
        tokens."""
        x = self.recorder.buffer(size)
        self._joint.take(self.recorder, x)
        return activation_of(Value(x))

    def give(self, x: Tensor) -> Tensor:
        x = self.computed(x)
        self._joint.give(self.recorder, x)
        return x

    def embed(
        self,
        tokens: Tensor,
        table: Matrix,
        vectors: Tensor | None = None,
        scale: float = 1.0,
        unknown_token: int | None = None,
    ) -> Tensor:
        """`Ops.embed`, recorded once for steps with and without vectors: each step brings its own
        vectors."""
        packed = _packed(table)
        (panels,) = packed.pieces
        out = self.recorder.buffer(packed.in_size)
        args = abi.EmbedArgs(weight=panels.address, out=out.data_ptr())
        if scale != 1:
            args.scale = scale
        if unknown_token is not None:
            args.unknown_token = unknown_token + 1
        if isinstance(table, ShardedMatrix):
            assert unknown_token is None, "only whole tables have a row for tokens that are none"
            (rows,) = table.rows
            args.first = rows.first
            args.num_rows = rows.size
        self.record_embed(args, panels)
        if isinstance(table, ShardedMatrix):
            self._joint.sum(self.recorder, out)
        return activation_of(Value(out))

    def multiply(self, x: Tensor, by: Tensor) -> Tensor:
        total = tensor_of(x)
        args = abi.MultiplyArgs(
            x=total.data_ptr(),
            x_stride=total.stride(0),
            by=by.data_ptr(),
            size=total.shape[1],
        )
        if by.ndim > 1:
            assert by.shape == total.shape
            args.by_stride = by.stride(0)
        if by.shape[-1] > 1:
            args.by_step = 1
        self.recorder.add(args)
        return activation_of(Value(total))

    def add_vectors(self, x: Tensor, tokens: Tensor, vectors: Tensor | None, part: int) -> Tensor:
        """`Ops.add_vectors`, recorded once like `embed`."""
        total = tensor_of(x)
        args = abi.AddVectorsArgs(total.data_ptr(), total.stride(0), total.shape[1], part)
        self.recorder.add(args)
        return activation_of(Value(total))

    def add_positions(self, x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        """`Ops.add_positions`: each step brings its own positions."""
        total = tensor_of(x)
        size = total.shape[1]
        args = abi.AddPositionsArgs(total.data_ptr(), total.stride(0), size, table.data_ptr())
        self.recorder.add(args)
        return activation_of(Value(total))

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return activation_of(Normed(x, norm, self._record_norm))

    def norm_overwrites(self, x: Tensor, norm: Norm) -> None:
        self._norm_into(x, norm, x)

    def linear(self, x: Tensor, weight: Matrix) -> Tensor:
        record = self._record_term if is_summed(weight) else self._record_product
        return activation_of(Product(x, partial(record, _packed(weight))))

    def space(self, x: Tensor, size: int) -> Tensor:
        return self.recorder.buffer(size)

    def linear_into(self, x: Tensor, weight: Matrix, out: Tensor) -> None:
        self.record_linear(source_of(x), _packed(weight), out, Epilogue.STORE)

    def copy(self, x: Tensor, out: Tensor) -> None:
        assert x.shape == out.shape
        assert x.stride(2) == out.stride(2) == 1, "the numbers of a piece stand side by side"
        args = abi.CopyArgs(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            x_step=x.stride(1),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            out_step=out.stride(1),
            num=x.shape[1],
            size=x.shape[2],
        )
        self.recorder.add(args)

    def layer_norm(self, x: Tensor, norm: LayerNorm) -> Tensor:
        source = tensor_of(x)
        size = source.shape[1]
        out = self.recorder.buffer(size)
        args = abi.LayerNormArgs(
            x=source.data_ptr(),
            out=out.data_ptr(),
            size=size,
            x_stride=source.stride(0),
            out_stride=out.stride(0),
            norm=layer_norm_weights(norm),
        )
        self.recorder.add(args)
        return activation_of(Value(out))

    def gated(self, x: Tensor, weight: Matrix, activation: str = "silu") -> Tensor:
        packed = _packed(weight)
        y = self.recorder.buffer(packed.sizes[0])
        self.record_linear(
            source_of(x),
            packed,
            y,
            GATES[activation],
        )
        return activation_of(Value(y))

    def activated(
        self,
        x: Tensor,
        weight: Matrix,
        activation: str,
    ) -> Tensor:
        packed = _packed(weight)
        y = self.recorder.buffer(packed.out_size)
        self.record_linear(
            source_of(x),
            packed,
            y,
            EPILOGUES[activation],
        )
        return activation_of(Value(y))

    def route(self, x: Tensor, router: Router) -> Routed:
        choice = router.choice
        packed = _packed(router.weight)
        logits = self.recorder.buffer(choice.num_experts)
        self.record_linear(source_of(x), packed, logits, Epilogue.STORE)
        routes = make_routes(self.recorder, choice)
        self.recorder.add(route_args(logits, router, routes))
        self.chosen[router.layer] = routes.experts
        return cast(Routed, routes)

    def experts(self, x: Tensor, routed: Routed, experts: Experts) -> Tensor:
        record = partial(self.record_experts, cast(Routes, routed), experts)
        return activation_of(Product(self.computed(x), record))

    def weighted(self, x: Tensor, routed: Routed) -> tuple[Tensor, Routed]:
        factors = routed.weights
        scaled = self.recorder.buffer(x.shape[1])
        self.copy(x[:, None], scaled[:, None])
        args = abi.GateRowsArgs(
            x=factors.data_ptr(),
            x_stride=factors.stride(0),
            in_size=factors.shape[1],
            y=scaled.data_ptr(),
            y_stride=scaled.stride(0),
            columns=scaled.shape[1],
        )
        self.recorder.add(args)
        ones = self.recorder.keep(torch.ones(factors.shape))
        return scaled, routed._replace(weights=ones)

    def gate_rows(self, y: Tensor, x: Tensor, weight: Tensor) -> None:
        args = abi.GateRowsArgs(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            weight=weight.data_ptr(),
            in_size=x.shape[1],
            y=y.data_ptr(),
            y_stride=y.stride(0),
            columns=y.shape[1],
        )
        self.recorder.add(args)

    def logits(
        self,
        x: Tensor,
        weight: Matrix,
        scale: float = 1.0,
        cap: float = 0.0,
        places: Tensor | None = None,
    ) -> Tensor:
        assert places is None, "a head is recorded for rows that are chosen already"
        logits = self.computed(self.linear(x, weight))
        if scale != 1 or cap:
            args = abi.ScaleLogitsArgs(
                logits=logits.data_ptr(),
                vocab_size=logits.shape[1],
                stride=logits.stride(0),
                scale=scale,
                cap=cap,
            )
            self.recorder.add(args)
        if isinstance(weight, ShardedMatrix):
            (size,) = weight.sizes
            return self._joint.gather(self.recorder, logits, size)
        return logits

    def computed(self, x: Tensor) -> Tensor:
        return tensor_of(x)

    def record_embed(self, args: abi.EmbedArgs, panels: Panels) -> None:
        table = None if self.adapters is None else self.adapters.of_table(panels)
        if table is not None:
            args.lora = ctypes.addressof(table)
        self.recorder.add(args)

    def record_linear(
        self,
        source: Source,
        packed: PackedMatrix,
        y: Tensor,
        epilogue: Epilogue,
        scale: float = 1.0,
    ) -> None:
        """Record y = epilogue(W norm(x) + bias), as one operation per piece of the weight; `scale`
        is for ADD_SCALED."""
        x = source.x
        column = 0
        for panels in packed.pieces:
            args = abi.LinearArgs(
                weight=panels.address,
                x=x.data_ptr(),
                x_stride=x.stride(0),
                epilogue=epilogue,
                y=y[:, column:].data_ptr(),
                y_stride=y.stride(0),
                scale=scale,
                may_round=self.may_round,
            )
            if source.norm is not None:
                args.norm_weight = source.norm.weight.data_ptr()
                args.eps = source.norm.eps
            if packed.bias is not None:
                args.bias = packed.bias[column:].data_ptr()
            capacity = self.recorder.capacity
            scratch_bytes = capacity * (4 * packed.padded_in + 64)
            lora = None if self.adapters is None else self.adapters.of_panels(panels)
            if self.adapters is not None and lora is not None:
                args.lora = ctypes.addressof(lora)
                scratch_bytes += self.adapters.scratch_bytes(lora, capacity)
            self.recorder.needs_scratch(args, scratch_bytes)
            self.recorder.add(args)
            column += panels.struct.out_size

    def _record_product(
        self,
        packed: PackedMatrix,
        x: Tensor,
        norm: Norm | None,
        add: Tensor | None,
        scale: float,
    ) -> Tensor:
        if add is not None:
            self.record_linear(
                Source(x, norm),
                packed,
                add,
                Epilogue.ADD if scale == 1 else Epilogue.ADD_SCALED,
                scale,
            )
            return add
        y = self.recorder.buffer(packed.out_size)
        self.record_linear(
            Source(x, norm),
            packed,
            y,
            Epilogue.STORE,
        )
        return y

    def _record_term(
        self,
        packed: PackedMatrix,
        x: Tensor,
        norm: Norm | None,
        add: Tensor | None,
        scale: float,
    ) -> Tensor:
        """Record this rank's term of a product, and the sum over ranks."""
        assert norm is None, "a norm needs whole rows, and a rank has a part of each"
        y = self._record_product(packed, x, None, None, 1.0)
        return self._joint.sum(self.recorder, y, add, scale)

    def record_experts(
        self,
        routes: Routes,
        experts: Experts,
        x: Tensor,
        norm: Norm | None,
        add: Tensor | None,
        scale: float,
    ) -> Tensor:
        """Record the experts, with those or the parts of those that other processes have."""
        assert norm is None, "the router has read the normed activation, so it is computed"
        layer = layer_of(experts)
        if layer is not None:
            y = self.recorder.buffer(experts.down.sizes[0]) if add is None else add
            adds = add is not None
            self._joint.experts(self.recorder, layer, x, routes, y, adds=adds, scale=scale)
            return y
        if is_summed(experts.down):
            y = self._record_own_experts(routes, experts, x, None, 1.0)
            return self._joint.sum(self.recorder, y, add, scale)
        return self._record_own_experts(routes, experts, x, add, scale)

    def _record_own_experts(
        self,
        routes: Routes,
        experts: Experts,
        x: Tensor,
        add: Tensor | None,
        scale: float,
    ) -> Tensor:
        """Record what this process has of the experts."""
        gate_up = _packed(experts.gate_up)
        down = _packed(experts.down)
        (gate_up_panels,) = gate_up.pieces
        (down_panels,) = down.pieces
        num_chosen = routes.experts.shape[1]
        y = self.recorder.buffer(down.out_size) if add is None else add
        inner = self.recorder.buffer(num_chosen * down.in_size)
        args = abi.ExpertsArgs(
            gate_up=gate_up_panels.address,
            down=down_panels.address,
            activation=(GATES if experts.is_gated else EPILOGUES)[experts.activation],
            num_experts=len(down.sizes),
            num_chosen=num_chosen,
            x=x.data_ptr(),
            x_stride=x.stride(0),
            **routes.addresses,
            inner=inner.data_ptr(),
            y=y.data_ptr(),
            y_stride=y.stride(0),
            scale=scale,
            adds=add is not None,
        )
        if gate_up.bias is not None and down.bias is not None:
            args.gate_up_bias = gate_up.bias.data_ptr()
            args.down_bias = down.bias.data_ptr()
        if self.adapters is not None:
            of_both = self.adapters.of_experts(gate_up_panels)
            of_down = self.adapters.of_experts(down_panels)
            if of_both is not None and of_down is not None:
                args.lora_gate_up = of_both.address
                args.lora_down = of_down.address
                args.lora_is_bf16 = of_both.is_bf16
                args.lora_rank = of_both.max_rank
                columns = num_chosen * 2 * of_both.max_rank
                args.lora_inner = self.recorder.buffer(columns).data_ptr()
        row_bytes = 4 * max(gate_up.padded_in, down.padded_in) + 64
        self.recorder.needs_scratch(args, self.recorder.capacity * num_chosen * row_bytes)
        self.recorder.add(args)
        return y

    def _record_norm(
        self,
        x: Tensor,
        norm: Norm,
        add: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        if add is not None:
            self._norm_into(x, norm, add, add_scale=scale)
            return add
        out = self.recorder.buffer(x.shape[1])
        self._norm_into(x, norm, out)
        return out

    def _norm_into(
        self,
        x: Tensor,
        norm: Norm,
        out: Tensor,
        add_scale: float = 0.0,
    ) -> None:
        args = abi.NormArgs(
            x=x.data_ptr(),
            weight=norm.weight.data_ptr(),
            out=out.data_ptr(),
            size=x.shape[1],
            x_stride=x.stride(0),
            out_stride=out.stride(0),
            eps=norm.eps,
            add_scale=add_scale,
        )
        self.recorder.add(args)


def _packed(matrix: Matrix) -> PackedMatrix:
    """What this process has of a matrix."""
    return cast(PackedMatrix, local_matrix(matrix))


def layer_norm_weights(norm: LayerNorm) -> abi.LayerNormWeights:
    return abi.LayerNormWeights(norm.weight.data_ptr(), norm.bias.data_ptr(), norm.eps)
