"""Replaces "auto" by values: the only module that combines settings, model and machine.

`sizing.py` divides the memory of the device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from weft.config.adapters import with_adapters
from weft.config.cache import block_len, check_cache, stores_kv
from weft.config.draft_model import (
    check_draft_model,
    draft_sources,
    no_draft_model,
    no_head,
    runs_as,
)
from weft.config.encoder import encoder
from weft.config.engine import EngineConfig
from weft.config.gpu import (
    MAX_RUNNING,
    SMALL_CHUNK_LEN,
    STORED,
    check_device,
    chunk_len,
    graph_sizes,
    quantize_by_default,
)
from weft.config.handoff import check_handoff
from weft.config.kv_events import check_kv_events
from weft.config.machine import Machine
from weft.config.model import ModelConfig
from weft.config.options import SettingsError
from weft.config.parallel import (
    check_divides,
    check_parallel,
    kept_together,
    num_ranks,
    sum_backend,
)
from weft.config.pooling import PoolingConfig
from weft.config.sizing import Sizing, heard_rows, sizing_of
from weft.config.windows import TYPICAL_LEN

MIN_RUNNING = 4

# While a piece of a prompt runs, all other requests wait for their next token; but matrix products
# reach full speed only from a certain length on.
# On a CPU that is about 256 rows; 512 rows take 0.1 s (weft-nano) to 1.2 s (a 0.6 B).
CHUNK_LEN = {"cpu": 512, "cuda": SMALL_CHUNK_LEN}  # a large GPU: `chunk_len`

# Streams wait for a piece of a prompt, which has one page or more. CPU kernels read pages of 4, 8
# and 16 tokens equally fast, GPU kernels those of one token as fast as larger pages.
PAGE_SIZE = {"cpu": 8, "cuda": 1}

KV_DTYPES = {
    "auto": "",
    "bf16": "bfloat16",
    "fp32": "float32",
    "int8": "int8",
    "fp8": "float8_e4m3fn",
}

LATENT_KV_DTYPES = ("auto", "bf16", "fp32")


# While prompts are computed beside them, streams then get their tokens with at least a third of the
# usual speed; 2.5 and not 3, because some steps take a little longer than expected.
MAX_SLOWDOWN = 2.5


class Resolved(NamedTuple):
    config: EngineConfig  # no "auto" left
    sizing: Sizing


def resolve(
    config: EngineConfig, model: ModelConfig, machine: Machine, draft: ModelConfig | None = None
) -> Resolved:
    """The settings with every "auto" replaced for this model on this machine. `draft`: the model of
    `--draft-model`.

    Raises SettingsError for settings that contradict each other or the model, and for too little
    memory.
    """
    device = device_of(config, machine)
    check_device(config, device, machine.gpus)
    config = replace(config, task=_task(config.task, model))
    _check_encoder_format(config, model, device, has_kernels=machine.has_kernels)
    if config.quantize == "auto":
        quantize = quantize_by_default(model, device, machine.gpus)
        by_torch = computes_by_torch(config) or not machine.has_kernels
        if quantize == STORED and by_torch:
            quantize = "none"  # torch expands codes
        config = replace(config, quantize=quantize)
    placed = replace(config, device=device)
    model = kept_as(placed, replace(model, dtype=_dtype(config.dtype, model.dtype, device)))
    filled = replace(
        config,
        device=device,
        dtype=model.dtype,
        threads=config.threads or max(machine.cores * config.nnodes // num_ranks(config), 1),
        context_length=_context_length(config, model),
        page_size=config.page_size or PAGE_SIZE[device],
        overlap=_overlaps(config, device),
    )
    filled = replace(
        filled,
        chunked_prefill_size=_chunk_len(filled, machine),
        max_prefill_tokens=max(config.max_prefill_tokens, filled.page_size),
    )
    filled = replace(
        filled, max_slowdown=_max_slowdown(filled), speculative=draft_sources(filled, model, draft)
    )
    filled = with_adapters(filled, model)
    _check_split(config, model)
    _check_latent(config, model)
    check_parallel(filled, model)
    can_share = machine.has_kernels and not computes_by_torch(config)
    filled = replace(filled, dist_backend=sum_backend(filled, can_share=can_share))
    model = kept_together(model, config.tp_size)
    is_head = draft is not None and draft.head is not None
    hindrance = no_head(filled, model) if is_head else no_draft_model(filled, model)
    check_draft_model(filled, draft, hindrance)
    if draft is not None:
        draft = kept_as(runs_as(filled, draft), draft)
    if draft is not None and is_head:
        check_divides(config.tp_size, draft)
        draft = kept_together(draft, config.tp_size)
    # Nodes hold equal parts: a part fits into each node if the whole fits into all together.
    free = machine.free_bytes * config.nnodes
    if device == "cuda":
        free = machine.gpus[0].free_bytes
    if model.is_encoder:
        return Resolved(*encoder(config, filled, model, free))
    if model.pooling is not None and model.pooling.kind == "mean":
        filled = replace(filled, prefix_cache=False)  # the mean needs every token of a prompt
    copies_head = device == "cpu" and machine.has_kernels and not computes_by_torch(config)
    head_copy = model.head_copy_bytes if copies_head else 0
    sizing = sizing_of(config, filled, model, free, draft, head_copy)
    typical = min(sizing.context_length, TYPICAL_LEN)
    fitting = sizing.kv_tokens // typical
    in_windows = sizing.window_tokens
    if in_windows:
        fitting = min(fitting, in_windows // min(sizing.pools.window, typical))
    if sizing.state_slots:
        fitting = min(fitting, sizing.state_slots)
    heard = heard_rows(config, model, free)
    if heard:
        fitting = min(fitting, heard)
    running = config.max_running_requests or max(MIN_RUNNING, min(MAX_RUNNING, fitting))
    filled = replace(
        filled,
        kv_tokens=sizing.kv_tokens,
        context_length=sizing.context_length,
        max_running_requests=running,
        # The ratio of whole pages, so that `window_tokens` computes the exact number from it.
        swa_full_tokens_ratio=in_windows / sizing.kv_tokens,
        max_mamba_cache_size=sizing.state_slots,
    )
    if stores_kv(filled):
        filled = replace(filled, cache_block=block_len(filled))
        check_cache(filled, model)
    if filled.disaggregation_mode != "none":
        check_handoff(filled, model)
    if filled.kv_events_config:
        check_kv_events(filled)
    if device == "cuda":
        filled = replace(filled, cuda_graph_sizes=",".join(map(str, graph_sizes(filled))))
    return Resolved(filled, sizing)


def _overlaps(config: EngineConfig, device: str) -> bool:
    """Whether the next step is planned while one runs. Default: not on a CPU, where both share the
    cores, unless the running step is at another stage; and not with a draft model, which guesses
    after known tokens."""
    if config.overlap is not None:
        return config.overlap
    is_apart = device == "cuda" or config.pp_size > 1
    return is_apart and not config.draft_model


def kept_as(config: EngineConfig, model: ModelConfig) -> ModelConfig:
    """The model with the task of the settings, and with their types of weights and KV."""
    pooling = model.pooling
    if config.task == "generate":
        pooling = None
    elif config.task == "embed" and pooling is None:
        pooling = PoolingConfig()
    return replace(
        model,
        pooling=pooling,
        dtype=model.dtype if config.dtype == "auto" else config.dtype,
        kv_dtype=KV_DTYPES[config.kv_dtype],
        quantize="" if config.quantize in ("auto", "none", STORED) else config.quantize,
        quantize_encoder="" if config.quantize_encoder == "none" else config.quantize_encoder,
        keeps_codes=_keeps_codes(config, model),
    )


def _keeps_codes(config: EngineConfig, model: ModelConfig) -> bool:
    """Whether the codes of the checkpoint stay as they are stored: nothing else is asked for, or
    what is asked for has no fewer bits. Some other matrices keep codes beside wider ones that are
    rounded, which this does not count."""
    if config.quantize == STORED:
        return True
    if config.device != "cpu" or not model.stored.has_codes:
        return False
    return config.quantize == "int8" or (config.quantize == "int4" and not model.num_wide)


def _check_encoder_format(
    config: EngineConfig, model: ModelConfig, device: str, *, has_kernels: bool
) -> None:
    """Raise SettingsError if the encoder's format cannot be computed here."""
    if config.quantize_encoder == "none":
        return
    asked = f"--quantize-encoder is {config.quantize_encoder}"
    if model.vision is None:
        raise SettingsError(f"{asked}, but {model.name} has no encoder beside its decoder")
    if device != "cpu":
        raise SettingsError(f"{asked}, which needs --device cpu; the device is {device}")
    if computes_by_torch(config) or not has_kernels:
        raise SettingsError(
            f"{asked}, which only weft's CPU kernels compute; here torch would compute"
        )


def _check_latent(config: EngineConfig, model: ModelConfig) -> None:
    """Raise SettingsError for a type of KV that is not supported for latents."""
    if model.latent is not None and config.kv_dtype not in LATENT_KV_DTYPES:
        raise SettingsError(
            f"--kv-dtype is {config.kv_dtype}, but {model.name} keeps one vector for all heads "
            f"of a token, which needs more bits; {', '.join(LATENT_KV_DTYPES)} are allowed"
        )


def _check_split(config: EngineConfig, model: ModelConfig) -> None:
    """Raise SettingsError if prefills should be split by layers, but this model does not allow
    it."""
    if not config.split_prefill_layers:
        return
    why = ""
    if model.library_config:
        why = "computed by the package transformers, whose steps cannot stop between two layers"
    elif model.state_bytes:
        why = "a model whose layers keep states, which pieces of a prefill would not share"
    elif model.decoder.layer_inputs is not None:
        why = "a model with inputs for each layer, which pieces of a prefill would not share"
    if why:
        raise SettingsError(
            f"--split-prefill-layers is {config.split_prefill_layers}, but {model.name} is {why}"
        )


def _task(asked: str, model: ModelConfig) -> str:
    """The task of the model. Raises SettingsError if the model does not support `asked`."""
    own = "generate"
    if model.pooling is not None:
        own = model.pooling.task
    if asked in ("auto", own):
        return own
    if (asked == "embed" and own == "generate") or (
        asked == "generate" and model.architecture.endswith("ForCausalLM")
    ):
        return asked
    raise SettingsError(
        f"--task is {asked}, but {model.name} ({model.architecture}) is made to {own}"
    )


def device_of(config: EngineConfig, machine: Machine) -> str:
    """The device that computes. Raises SettingsError if it is not there."""
    if config.device == "cuda" and not machine.gpus:
        raise SettingsError(f"--device is cuda, but no GPU can be used: {machine.no_gpu_reason}")
    if config.device == "auto":
        if machine.gpus:
            return "cuda"
        return "cpu"
    return config.device


def computes_by_torch(config: EngineConfig) -> bool:
    """Whether the settings choose torch, or something that weft's CPU kernels do not support."""
    has_kernels = config.kernels != "torch" and config.attention_backend == "auto"
    return not has_kernels or config.dtype == "float16"


def _dtype(asked: str, stored: str, device: str) -> str:
    if asked != "auto":
        return asked
    if device == "cuda" and stored == "float32":
        return "bfloat16"  # twice as much fits, and products are many times faster
    if device == "cpu" and stored == "float16":
        return "bfloat16"  # float16 products are 5 to 8 times slower here from a few rows on
    return stored


def _context_length(config: EngineConfig, model: ModelConfig) -> int:
    if config.context_length > model.max_position:
        raise SettingsError(
            f"--context-length is {config.context_length:,}, but {model.name} was made for at most "
            f"{model.max_position:,} positions (max_position_embeddings in its config.json)"
        )
    return config.context_length or model.max_position


def _chunk_len(config: EngineConfig, machine: Machine) -> int:
    """Tokens of a prompt in one step. `config` has its device and page size. Raises
    SettingsError."""
    usual = chunk_len(machine.gpus[0]) if config.device == "cuda" else CHUNK_LEN["cpu"]
    chunk = config.chunked_prefill_size or max(usual, config.page_size)
    if 0 < chunk < config.page_size:
        raise SettingsError(
            f"--chunked-prefill-size is {chunk}, less than one page (--page-size is "
            f"{config.page_size}); a prompt is cut between pages"
        )
    return chunk


def _max_slowdown(config: EngineConfig) -> float:
    """The factor by which prompts may slow down streams; -1: no limit. `config` has its chunk. If
    steps are not mixed, every piece of a prompt costs a further step, so a limit would let prompts
    wait for long.
    """
    if config.max_slowdown < 1 and config.max_slowdown not in (0, -1):
        raise SettingsError(
            f"--max-slowdown is {config.max_slowdown:g}; at least 1 is expected, 0 or -1"
        )
    if config.max_slowdown:
        return config.max_slowdown
    is_mixed = config.mixed_chunk and not config.split_prefill_layers
    if is_mixed and config.chunked_prefill_size > 0:
        return MAX_SLOWDOWN
    return -1.0
