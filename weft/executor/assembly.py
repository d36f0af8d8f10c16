"""The parts of a runner that the builds of all devices share: KV pool, weights, and the store that
changes them.

`cpu/build.py`, `gpu/build.py` and `plain/build.py` build the runners; this module knows no device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from weft.config.engine import EngineConfig
from weft.config.model import ModelConfig
from weft.config.parallel import of_rank
from weft.config.projections import adapter_item_bytes
from weft.executor.inputs import DeviceRowTable
from weft.executor.kv_pool import EncodedPool, KVPool, MakeZeros, StatePool, zeros
from weft.executor.lockstep.group import ExpertGroup
from weft.executor.logit_processors.processors import Processors
from weft.executor.lora.folders import AdapterFolders
from weft.executor.lora.steps import AdapterPass
from weft.executor.lora.table import AdapterTable
from weft.executor.media.steps import MediaPass
from weft.executor.media.store import HeardMemory, MediaStore
from weft.executor.outputs.pooling import Pooler
from weft.executor.passes.copies import CopyPass
from weft.executor.passes.experts import ExpertRecorder
from weft.executor.runner import Pass
from weft.executor.weights.store import ModelMemory, WeightStore
from weft.executor.wire.followers import Ranks
from weft.models.registry import DecoderModel, EncoderModel
from weft.models.transformers_backend.model import TransformersModel
from weft.models.vision.tower import Tower, TowerBackend
from weft.models.vision.towers import make_tower
from weft.ops.lora import AdapterOps
from weft.ops.protocol import Ops
from weft.weights.load import files_beside, load_weights, randomize, unread_of
from weft.weights.root import WeightsRoot, default_root
from weft.weights.scales import kv_scales


@dataclass(frozen=True)
class DraftSpec:
    """A smaller model that guesses the next tokens."""

    engine: EngineConfig
    model: ModelConfig  # as in `RunnerSpec`
    folder: Path


@dataclass(frozen=True)
class RunnerSpec:
    """The model to run, and the sizes that the scheduler uses."""

    engine: EngineConfig
    model: ModelConfig  # with the types in which weights and KV are stored
    folder: Path  # of the checkpoint
    kv_tokens: int
    window_tokens: int  # slots of layers with windows; 0: they use the slots of all layers
    num_state_slots: int  # of layers that keep a state; 0: there are no such layers
    max_rows: int
    context_length: int
    thread: Executor  # the thread of all of the runner's calls of torch
    processors: Processors | None = None  # logit processors that requests may name
    draft: DraftSpec | None = None  # None: there is no draft model
    ranks: Ranks | None = None  # processes that share the model; None: this process has all of it
    # The engines that share its experts; None: this engine has all of them.
    experts: ExpertGroup | None = None

    @property
    def attended(self) -> ModelConfig:
        """The model with the heads that this process has, for attention and the KV pool."""
        if self.ranks is None:
            return self.model
        return of_rank(self.model, self.ranks.group_rank.size)

    @property
    def dtype(self) -> torch.dtype:
        """The type of activations."""
        dtype: torch.dtype = getattr(torch, self.model.dtype)
        return dtype

    @property
    def adapter_dtype(self) -> torch.dtype:
        """The type in which adapters are stored; they are never quantised."""
        return torch.float32 if adapter_item_bytes(self.model) == 4 else torch.bfloat16

    @property
    def is_dummy(self) -> bool:
        """Whether weights are random, and no checkpoint is read."""
        return self.engine.load_format == "dummy"


def make_kv_pool(spec: RunnerSpec, device: torch.device) -> KVPool:
    """Room for the K and V of `spec.kv_tokens` slots."""
    config = spec.attended
    layer_scales = None
    if config.kv_dtype == "float8_e4m3fn" and not spec.is_dummy:
        layer_scales = kv_scales(spec.folder, config.num_layers)
    dtype = getattr(torch, config.kv_dtype or config.dtype)
    make: MakeZeros = zeros
    here = None
    if spec.ranks is not None:
        if spec.ranks.pool is not None:
            make = spec.ranks.pool.zeros
        if spec.ranks.pp_stage is not None:
            here = spec.ranks.pp_stage.layers(config.num_layers)
    return KVPool(
        config,
        spec.kv_tokens,
        device,
        dtype,
        layer_scales,
        num_window_slots=spec.window_tokens,
        make=make,
        here=here,
    )


def make_state_pool(spec: RunnerSpec, device: torch.device) -> StatePool | None:
    """Room for the states of the layers that keep a state, if there are any."""
    if not spec.model.state_bytes:
        return None
    assert spec.num_state_slots, f"{spec.model.name} keeps states, and has no slots for them"
    return StatePool(spec.model, spec.num_state_slots, device)


def make_encoded_pool(spec: RunnerSpec, device: torch.device) -> EncodedPool | None:
    """Room for what each row reads of an encoder, if the layers attend to one."""
    if spec.model.decoder.cross is None:
        return None
    return EncodedPool(spec.model, spec.max_rows, device)


def tensors_of(*pools: KVPool | StatePool | EncodedPool | None) -> list[Tensor]:
    """All tensors on the device that depend on requests."""
    return [tensor for pool in pools if pool is not None for tensor in pool.tensors]


@dataclass(frozen=True)
class BuiltTower:
    """The encoder of pictures, videos or sounds beside a decoder."""

    tower: Tower
    backend: TowerBackend

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of its weights, after they have been filled."""
        return self.backend.ops.tensors


def build_tower(spec: RunnerSpec, make_backend: Callable[[], TowerBackend]) -> BuiltTower | None:
    """The tower of the model, without weights yet; None: the model has none, or is served
    without."""
    if spec.model.vision is None:
        return None
    backend = make_backend()
    return BuiltTower(make_tower(spec.model.vision, backend), backend)


def fill_weights(
    spec: RunnerSpec,
    model: DecoderModel | EncoderModel,
    device: torch.device,
    tower: BuiltTower | None = None,
) -> None:
    """Fill the weights of the model, and of its tower. Raises ModelError."""
    weights = model.weights()
    if tower is not None:
        weights = chain(weights, tower.tower.weights())
    if spec.is_dummy:
        randomize(weights, device)
    elif isinstance(model, TransformersModel):
        model.load(spec.folder)
    else:
        beside = files_beside(spec.model, spec.folder)
        load_weights(weights, spec.folder, unread_of(spec.model), beside)


def make_pooler(
    spec: RunnerSpec, model: DecoderModel | EncoderModel, device: torch.device
) -> Pooler:
    return Pooler(
        spec.model,
        model.normed,
        model.logits,
        spec.max_rows,
        device,
    )


def make_weight_store(
    spec: RunnerSpec,
    model: DecoderModel | EncoderModel,
    weights: Sequence[Tensor],
    kv_cache: Sequence[Tensor],
    device: torch.device,
    experts: ExpertRecorder | None = None,
    adapters: AdapterTable | None = None,
    tower: BuiltTower | None = None,
    on_new_weights: Callable[[], None] | None = None,
) -> WeightStore:
    """The store of a model whose weights and KV cache are in these tensors, and of its tower."""
    memory = ModelMemory(
        model=model,
        config=spec.model,
        weights=weights if tower is None else [*weights, *tower.tensors],
        kv_cache=kv_cache,
        device=device,
        tower=None if tower is None else tower.tower,
        on_new_weights=on_new_weights,
    )
    root = default_root(spec.folder)
    if spec.engine.weights_root:
        root = Path(spec.engine.weights_root).expanduser()
    source = None if spec.is_dummy else spec.folder.resolve()
    return WeightStore(memory, source, WeightsRoot(root), experts, adapters)


def make_adapter_table(
    spec: RunnerSpec, model: DecoderModel, ops: AdapterOps | None
) -> AdapterTable | None:
    """The table of adapters for a model with filled weights; None without places."""
    if ops is None:
        return None
    return AdapterTable(
        spec.model,
        model.weights(),
        ops,
        num_adapter_slots=spec.engine.max_loaded_loras,
        max_rank=spec.engine.max_lora_rank,
        full_modules=spec.engine.lora_full_modules,
        folders=AdapterFolders.of(spec.engine, spec.folder),
    )


def adapter_passes(table: AdapterTable | None) -> list[Pass]:
    """The pass for adapters, if there is a table."""
    return [] if table is None else [AdapterPass(table)]


def copy_passes(spec: RunnerSpec, pool: KVPool, others: Sequence[Tensor] = ()) -> list[Pass]:
    """The pass that copies K and V, and what `others` keep, between slots, if plans may ask for
    it."""
    if not spec.engine.page_copies or spec.engine.page_size <= 1 or pool.has_windows:
        return []
    return [CopyPass([*pool.tensors, *others])]


def media_passes(
    spec: RunnerSpec,
    rows: DeviceRowTable,
    tower: BuiltTower | None,
    heard: HeardMemory | None = None,
) -> list[Pass]:
    """The pass for the encoder of pictures, videos or sounds, if there is one. `heard`: where the
    decoder reads keys and values, if it attends to vectors."""
    if tower is None:
        return []
    device = rows.slots.device
    media = MediaStore(tower.tower, hidden_size=spec.model.hidden_size, device=device, heard=heard)
    rows.media = media
    return [MediaPass(media)]


def make_expert_recorder(spec: RunnerSpec, ops: Ops) -> ExpertRecorder | None:
    """The recorder of the experts that `ops` chooses, if the model has experts."""
    if not spec.model.has_experts:
        return None
    folder = None
    if spec.engine.profile_dir:
        folder = Path(spec.engine.profile_dir).expanduser()
    return ExpertRecorder(spec.model, ops.chosen, folder)
