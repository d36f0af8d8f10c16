"""Builds runners on a CPU: with weft's kernels, or with torch if the kernels are not available."""

from __future__ import annotations

from typing import cast

import torch

from weft.config.model import ModelConfig, ModelError
from weft.executor.assembly import (
    RunnerSpec,
    adapter_passes,
    build_tower,
    copy_passes,
    fill_weights,
    make_adapter_table,
    make_encoded_pool,
    make_expert_recorder,
    make_kv_pool,
    make_pooler,
    make_state_pool,
    make_weight_store,
    media_passes,
    tensors_of,
)
from weft.executor.backend import AttentionBackend
from weft.executor.cpu.at_once import CppPagedAtOnce, CppProducts
from weft.executor.cpu.attention import CppPaged
from weft.executor.cpu.cached_weights import fill_from_cache
from weft.executor.cpu.device import CpuDevice, InlineCpuDevice
from weft.executor.cpu.encoded import CppEncoded
from weft.executor.cpu.encoder_attention import CppBidirectional
from weft.executor.cpu.fused_step import CpuFusedSteps, Later
from weft.executor.cpu.heads import CppKept, CppSpread, HeadPrograms, LaterPrograms, single
from weft.executor.cpu.program_model import ProgramEncoder, ProgramModel
from weft.executor.cpu.segmented_model import SegmentedModel, UnsplitModel
from weft.executor.cpu.states import CppStates
from weft.executor.cpu.tower import CppTowerBackend
from weft.executor.device import StepDevice
from weft.executor.heads.build import HeadMemory, make_head, make_head_memory
from weft.executor.heads.guessing import HeadPass
from weft.executor.heads.ranks import head_pass
from weft.executor.inputs import DeviceRowTable
from weft.executor.passes.experts import counting
from weft.executor.passes.split import split
from weft.executor.plain import build as plain
from weft.executor.plain.step_check import require_same_steps
from weft.executor.ranks.build import (
    announcing,
    computing,
    cpp_ops,
    decoder_steps,
    in_lockstep,
    plan_sender,
    rank_passes,
)
from weft.executor.ranks.sender import PlanSender
from weft.executor.runner import DecoderSteps, EncoderSteps, ModelSteps, Pass, TorchRunner
from weft.models.decoder import Decoder
from weft.models.registry import DecoderModel, make_encoder, make_model
from weft.models.transformers_backend.model import TransformersModel
from weft.observe.log import EventLog
from weft.ops.cpp.abi import WeightFormat
from weft.ops.cpp.encoder import CppEncoderOps
from weft.ops.cpp.library import Library, Unavailable, load
from weft.ops.cpp.lora import CppAdapters
from weft.ops.cpp.ops import CppOps
from weft.ops.cpp.sampling import CppSamplerOps

CPU = torch.device("cpu")
FORMATS = {  # of weights that our kernels read
    "float32": WeightFormat.F32,
    "bfloat16": WeightFormat.BF16,
    "int8": WeightFormat.I8,
    "int4": WeightFormat.I4,
    "int12": WeightFormat.I16,  # of encoders beside decoders alone
}
KV_DTYPES = ("float32", "bfloat16", "int8")

log = EventLog("engine")


class KernelsUnavailable(ModelError):
    """The user asked for kernels by name, but they are not available."""


def make_rows(spec: RunnerSpec) -> DeviceRowTable:
    has_windows = spec.window_tokens > 0
    return DeviceRowTable(spec.max_rows, spec.context_length, CPU, has_windows=has_windows)


def build_decoder(spec: RunnerSpec, rows: DeviceRowTable) -> TorchRunner:
    """A runner of programs with this table. A step that our kernels can compute completely runs as
    one call of the library."""
    library = find_kernels(spec)
    if library is None:
        if spec.model.kv_dtype == "int8":
            raise KernelsUnavailable(
                "--kv-dtype is int8, which only our CPU kernels read; torch would compute here"
            )
        return plain.build_decoder(spec, CpuDevice(spec.thread), rows)
    library.num_threads = spec.engine.threads
    if spec.model.library_config:
        return _build_by_transformers(spec, library, rows)
    pool = make_kv_pool(spec, CPU)
    ops = cpp_ops(spec, library, _weight_format(spec))
    attention = CppPaged(
        spec.attended,
        pool,
        ops,
        spec.context_length,
    )
    state_pool = make_state_pool(spec, CPU)
    states = None
    if state_pool is not None:
        states = CppStates(spec.model, state_pool, ops, attention.step)
    memory = make_head_memory(spec, CPU)
    keeper = None if memory is None else CppKept(ops, memory.states)
    encoded_pool = make_encoded_pool(spec, CPU)
    encoded = None if encoded_pool is None else CppEncoded(encoded_pool, ops)
    decoder = make_model(spec.model, ops, states, encoded, keeper)
    # A model with inputs for each layer runs in one piece.
    in_pieces = spec.model.decoder.layer_inputs is None
    model = ProgramModel(
        decoder,
        ops,
        attention,
        spec.model.hidden_size,
        spec.model.num_layers if in_pieces else 0,
    )
    tower = build_tower(spec, lambda: CppTowerBackend(library, _tower_format(spec)))
    filled = [ops] if tower is None else [ops, cast(CppEncoderOps, tower.backend.ops)]
    mapped = fill_from_cache(spec, library, filled, lambda: fill_weights(spec, model, CPU, tower))
    adapter_ops = None
    if spec.engine.max_loaded_loras:
        adapter_ops = CppAdapters(
            spec.engine.max_loaded_loras, spec.engine.max_lora_rank, spec.adapter_dtype
        )
        ops.adapters = adapter_ops
    adapters = make_adapter_table(spec, model, adapter_ops)
    unsplit = decoder_steps(
        spec,
        model=model,
        attention=attention,
        sampler=CppSamplerOps(library),
        rows=rows,
        states=states,
        encoded=encoded,
        pooler=make_pooler(spec, model, CPU),
        processors=spec.processors,
    )
    experts = make_expert_recorder(spec, ops)
    fused = CpuFusedSteps(
        model,
        rows,
        library,
        otherwise=unsplit,
        num_state_slots=0 if state_pool is None else state_pool.num_slots,
        # Other ranks are not told which tokens are sampled, and a head reads states of all tokens.
        narrows=spec.ranks is None and not _keeps_last_outputs(spec.model, memory),
    )
    if adapter_ops is not None:
        adapter_ops.of_steps(attention.step, fused.step)
    copies_head = spec.model.pooling is None and computing(spec, fused, unsplit) is fused
    if copies_head and mapped is not None:
        fused.copy_head(mapped.fill_head)
    elif copies_head:
        fused.copy_head()
    kept = tensors_of(pool, state_pool, encoded_pool)
    if memory is not None:
        kept = [*kept, *memory.tensors]
    steps = computing(spec, fused, unsplit)
    store = make_weight_store(
        spec,
        model,
        [*ops.tensors, *fused.tensors],
        kept,
        CPU,
        experts,
        adapters,
        tower,
        fused.copy_head if copies_head else None,
    )
    sender = plan_sender(spec, rows)
    passes = [
        *media_passes(spec, rows, tower, encoded),
        *rank_passes(spec, rows, sender),
        *adapter_passes(adapters),
        *copy_passes(spec, pool, [] if memory is None else [memory.states.kept]),
        *split(spec.engine, unsplit, model=model, attention=attention, rows=rows, experts=experts),
        *counting(experts, fused.compute_all if steps is fused else None),
    ]
    if memory is not None:
        head = _head_pass(memory, cast(Decoder, decoder), rows, ops, sender)
        passes = [head, *passes]
    device = announcing(spec, _device(spec), sender)
    return in_lockstep(spec, ops, steps, store, device, passes)


def _keeps_last_outputs(model: ModelConfig, memory: HeadMemory | None) -> bool:
    """Whether a head reads what the model makes of a token after its last layer with K, V or a
    state: before, all tokens are computed anyway."""
    if memory is None:
        return False
    return max(memory.states.spec.reads) > model.last_storing_layer


def _head_pass(
    memory: HeadMemory,
    model: Decoder,
    rows: DeviceRowTable,
    of_model: CppOps,
    sender: PlanSender | None,
) -> Pass:
    """The pass of the head with this memory, for a model with filled weights, which `of_model` has
    computed with."""
    spec = memory.spec
    library = of_model.library
    beside = None if spec.ranks is None else of_model
    ops = cpp_ops(spec, library, _weight_format(spec), beside)
    head = make_head(spec, ops, model, CppSpread(ops), CPU)
    attention = CppPaged(spec.attended, memory.pool, ops, spec.context_length)
    programs = HeadPrograms(head, ops, attention, memory.states)
    table = rows.beside()
    later = Later(programs.later, programs.carried)
    chains = CpuFusedSteps(programs, table, library, None, later=later)
    if spec.ranks is None:
        return HeadPass(chains, memory.states)
    after_first = LaterPrograms(programs.later, programs.head)
    passes = CpuFusedSteps(after_first, table, library, None, later=later)
    return head_pass(sender, single(chains), single(passes))


def _build_by_transformers(spec: RunnerSpec, library: Library, rows: DeviceRowTable) -> TorchRunner:
    """A runner of a model with the code of transformers: its translation into programs, or, if the
    code cannot be translated, the code itself with our products and attention."""
    # torch's threads and ours would wait for each other on the same cores. torch does only the
    # small work between products, so it gets one thread, the thread that computes.
    torch.set_num_threads(1)
    pool = make_kv_pool(spec, CPU)
    products = CppProducts(library, _weight_format(spec), keeps_codes=spec.model.keeps_codes)
    loaded = TransformersModel(spec.model, products, translates=True)
    fill_weights(spec, loaded, CPU)
    model: DecoderModel = loaded
    attention: AttentionBackend
    unsplit: ProgramModel | None = None
    if loaded.translation is None:
        log.info("not_translated", reason=loaded.untranslated)
        attention = CppPagedAtOnce(spec.model, pool, library, spec.context_length)
    else:
        ops = products.ops
        attention = CppPaged(spec.model, pool, ops, spec.context_length)
        segmented = SegmentedModel(
            loaded, loaded.translation, ops, attention, spec.model.hidden_size
        )
        model = segmented
        if segmented.is_unsplit:
            said = UnsplitModel(loaded, loaded.translation, ops)
            unsplit = ProgramModel(said, ops, attention, spec.model.hidden_size)
            model = unsplit
    require_same_steps(spec, model, attention, rows)
    steps = DecoderSteps(
        model=model,
        attention=attention,
        sampler=CppSamplerOps(library),
        rows=rows,
        pooler=make_pooler(spec, model, CPU),
        processors=spec.processors,
    )
    store = make_weight_store(spec, loaded, products.tensors, pool.tensors, CPU)
    device: StepDevice = CpuDevice(spec.thread)
    computed: ModelSteps = steps
    if unsplit is not None:
        device = _device(spec)
        computed = CpuFusedSteps(unsplit, rows, library, otherwise=steps)
    return TorchRunner(
        computed,
        store=store,
        device=device,
        passes=copy_passes(spec, pool),
        kernels=library,
    )


def build_encoder(spec: RunnerSpec) -> TorchRunner:
    library = find_kernels(spec)
    encoder = spec.model.encoder
    if encoder is not None and encoder.disentangled is not None and library is not None:
        log.info("computed_by_torch", reason="products with vectors of distances have no kernel")
        library = None
    if library is None:
        return plain.build_encoder(spec, CpuDevice(spec.thread), CPU)
    library.num_threads = spec.engine.threads
    ops = CppEncoderOps(library, _weight_format(spec))
    attention = CppBidirectional(
        spec.model.num_heads,
        spec.model.head_dim,
        ops,
        context_length=spec.context_length,
    )
    model = ProgramEncoder(
        make_encoder(spec.model, ops),
        ops,
        attention,
        spec.model.hidden_size,
    )
    fill_from_cache(spec, library, [ops], lambda: fill_weights(spec, model, CPU))
    steps = EncoderSteps(
        model=model,
        attention=attention,
        pooler=make_pooler(spec, model, CPU),
        on_device=CPU,
    )
    return TorchRunner(
        steps,
        store=make_weight_store(spec, model, ops.tensors, [], CPU),
        device=_device(spec),
        kernels=library,
    )


def find_kernels(spec: RunnerSpec) -> Library | None:
    """The kernel library, if it should compute. Raises `KernelsUnavailable` if the user asked for
    it by name and it is not available."""
    engine = spec.engine
    if engine.kernels == "torch" or engine.attention_backend != "auto":
        return None
    config = spec.model
    reads_weights = (config.quantize or config.dtype) in FORMATS
    reads_kv = (config.kv_dtype or config.dtype) in KV_DTYPES
    if not reads_weights or not reads_kv:
        return None
    try:
        return load("" if engine.kernels == "auto" else engine.kernels)
    except Unavailable as exc:
        # The user expects the speed of kernels that are named; with "auto", the engine must start.
        if engine.kernels != "auto":
            raise KernelsUnavailable(f"--kernels is {engine.kernels}, but {exc}") from exc
        log.warning(f"torch computes, several times slower than our own kernels would: {exc}")
        return None


def _tower_format(spec: RunnerSpec) -> WeightFormat:
    return FORMATS[spec.model.quantize_encoder or spec.model.dtype]


def _weight_format(spec: RunnerSpec) -> WeightFormat:
    return FORMATS[spec.model.quantize or spec.model.dtype]


def _device(spec: RunnerSpec) -> StepDevice:
    """Without overlap the caller's thread computes, because it would only wait for another one."""
    if spec.engine.overlap:
        return CpuDevice(spec.thread)
    return InlineCpuDevice(spec.thread)
