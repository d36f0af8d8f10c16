"""Replaces "auto" by values: the only module that combines settings, model and machine.

The device's free memory is divided in this order:

    |<------------------------------- free -------------------------------->|
    | weights | work (activations, logits, libraries) |   KV cache   | left |

The KV cache takes a share of the memory that weights and work leave: 90 % on a GPU, which only weft
uses; 50 % on a CPU, whose memory other processes also use, and there at most 4 GB unless a single
context needs more. It never takes more than `max_running_requests` whole contexts can fill.
`--memory-fraction F` replaces the share: weights and KV cache take F of the free memory.
`--kv-tokens N` replaces the whole rule. A context length that the user did not set is cut to fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from weft.config.adapters import parse_lora_paths
from weft.config.cache import block_len, check_cache, stores_kv
from weft.config.draft_model import check_draft_model, runs_as
from weft.config.drafts import AUTO, OFF, all_sources, parse_draft_sources
from weft.config.engine import EngineConfig
from weft.config.gpu import (
    MAX_RUNNING,
    SMALL_CHUNK_LEN,
    STORED,
    check_device,
    chunk_len,
    graph_bytes,
    graph_sizes,
    prompt_graph_sizes,
    quantize_by_default,
)
from weft.config.handoff import check_handoff
from weft.config.kv_events import check_kv_events
from weft.config.lockstep import elsewhere_bytes
from weft.config.machine import Machine
from weft.config.model import ModelConfig
from weft.config.numbers import counted
from weft.config.options import SettingsError
from weft.config.parallel import check_parallel, kept_together, num_ranks, sum_backend
from weft.config.pooling import PoolingConfig
from weft.config.projections import EXPERTS, Targets, adapter_bytes, projections
from weft.config.states import with_states
from weft.config.windows import TYPICAL_LEN, KvPools, one_pool, two_pools, with_draft

GB = 1_000_000_000

KV_SHARE = {"cpu": 0.5, "cuda": 0.9}
LARGEST_KV_SHARE = 0.9  # for a context length that the user set
CPU_KV_BYTES = 4 * GB
MIN_RUNNING = 4
MIN_CONTEXT = 512  # minimum length of a context that is cut to fit

# While a piece of a prompt runs, all other requests wait for their next token; but matrix products
# reach full speed only from a certain length on.
# On a CPU that is about 256 rows; 512 rows take 0.1 s (weft-nano) to 1.2 s (a 0.6 B).
CHUNK_LEN = {"cpu": 512, "cuda": SMALL_CHUNK_LEN}  # a large GPU: `chunk_len`

PAGE_SIZE = {
    "cpu": 16,
    "cuda": 1,
}  # weft's GPU kernels read pages of one token as fast as larger pages

KV_DTYPES = {
    "auto": "",
    "bf16": "bfloat16",
    "fp32": "float32",
    "int8": "int8",
    "fp8": "float8_e4m3fn",
}

LATENT_KV_DTYPES = ("auto", "bf16", "fp32")

LIBRARY_BYTES = {
    "cpu": 400_000_000,
    "cuda": 800_000_000,
}  # torch, its context and its own workspaces

# Tokens in one step on a CPU, so that the values between two layers stay in the processor's cache.
ENCODER_STEP_TOKENS = 1_024
# While prompts are computed beside them, streams then get their tokens with at least a third of the
# usual speed; 2.5 and not 3, because some steps take a little longer than expected.
MAX_SLOWDOWN = 2.5
NOT_FOR_ENCODERS = (
    "kv_tokens",
    "memory_fraction",
    "kv_dtype",
    "swa_full_tokens_ratio",
    "disable_hybrid_swa_memory",
    "max_mamba_cache_size",
    "mamba_full_memory_ratio",
    "chunked_prefill_size",
    "split_prefill_layers",
    "attention_backend",
    "cache_dir",
    "disaggregation_mode",
)


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """The use of the device's memory."""

    free_bytes: int
    weight_bytes: int
    work_bytes: int
    kv_tokens: int
    pools: KvPools
    context_length: int
    note: str = ""  # what was cut to fit, as a text

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token in all layers."""
        return self.pools.bytes_per_token + self.pools.window_bytes

    @property
    def kv_bytes(self) -> int:
        return self.pools.num_bytes(self.kv_tokens)

    @property
    def window_tokens(self) -> int:
        """Tokens in the pool of layers with windows; 0 without such a pool."""
        return self.pools.window_tokens(self.kv_tokens)

    @property
    def state_slots(self) -> int:
        """Number of kept states; 0 if no layer keeps a state."""
        return self.pools.state_slots(self.kv_tokens)

    def __str__(self) -> str:
        if not self.kv_bytes:
            return f"none: prompts of up to {self.context_length:,} tokens are computed whole"
        whole = self.kv_tokens // self.context_length
        requests = f"{counted(whole, 'request')} of {self.context_length:,} tokens"
        windows = ""
        if self.window_tokens:
            windows = (
                f", {self.window_tokens:,} of them in layers with windows of "
                f"{self.pools.window:,} tokens"
            )
        states = ""
        if self.pools.states is not None:
            of_one = size(self.pools.states.bytes_per_slot)
            states = f" and {self.state_slots:,} states of {of_one}"
        return (
            f"{size(self.kv_bytes)} = {self.kv_tokens:,} tokens{windows}{states} "
            f"(page {self.pools.page_size}) · {requests}"
        )


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
    device = _device(config.device, machine)
    check_device(config, device, machine.gpus)
    config = replace(config, task=_task(config.task, model))
    _check_encoder_format(config, model, device, has_kernels=machine.has_kernels)
    if config.quantize == "auto":
        quantize = quantize_by_default(model, device, machine.gpus)
        by_torch = _computes_by_torch(config) or not machine.has_kernels
        if quantize == STORED and by_torch:
            quantize = "none"  # torch expands codes
        config = replace(config, quantize=quantize)
    model = kept_as(config, replace(model, dtype=_dtype(config.dtype, model.dtype, device)))
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
        filled, max_slowdown=_max_slowdown(filled), speculative=_speculative(filled, model)
    )
    filled = _with_adapters(filled, model)
    _check_split(config, model)
    _check_latent(config, model)
    check_parallel(filled, model)
    can_share = machine.has_kernels and not _computes_by_torch(config)
    filled = replace(filled, dist_backend=sum_backend(filled, can_share=can_share))
    model = kept_together(model, config.tp_size)
    check_draft_model(filled, draft, _no_draft_model(filled, model))
    if draft is not None:
        draft = kept_as(runs_as(filled, draft), draft)
    # Nodes hold equal parts: a part fits into each node if the whole fits into all together.
    free = machine.free_bytes * config.nnodes
    if device == "cuda":
        free = machine.gpus[0].free_bytes
    if model.is_encoder:
        return _encoder(config, filled, model, free)
    if model.pooling is not None and model.pooling.kind == "mean":
        filled = replace(filled, prefix_cache=False)  # the mean needs every token of a prompt
    copies_head = device == "cpu" and machine.has_kernels and not _computes_by_torch(config)
    head_copy = model.head_copy_bytes if copies_head else 0
    sizing = _sizing(config, filled, model, free, draft, head_copy)
    typical = min(sizing.context_length, TYPICAL_LEN)
    fitting = sizing.kv_tokens // typical
    in_windows = sizing.window_tokens
    if in_windows:
        fitting = min(fitting, in_windows // min(sizing.pools.window, typical))
    if sizing.state_slots:
        fitting = min(fitting, sizing.state_slots)
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
    cores, unless the running step is at another stage; and not with a draft model, which needs to
    know all tokens."""
    if config.overlap is not None:
        return config.overlap
    is_apart = device == "cuda" or config.pp_size > 1
    return is_apart and not config.draft_model


def window_tokens(config: EngineConfig) -> int:
    """Tokens in the pool of layers with windows; 0: all layers share one pool. `config` is
    resolved."""
    num_pages = config.kv_tokens / config.page_size * config.swa_full_tokens_ratio
    return round(num_pages) * config.page_size


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
        keeps_codes=config.quantize == STORED,
    )


def size(num_bytes: float) -> str:
    """A number of bytes as a text: 3.1 PB, 2.0 TB, 16.4 GB, 512 MB, 4 kB."""
    if num_bytes >= 1e15:
        return f"{num_bytes / 1e15:,.1f} PB"
    if num_bytes >= 1e12:
        return f"{num_bytes / 1e12:.1f} TB"
    if num_bytes >= GB:
        return f"{num_bytes / GB:.1f} GB"
    if num_bytes >= 1e6:
        return f"{num_bytes / 1e6:.0f} MB"
    return f"{num_bytes / 1e3:.0f} kB"


def count(num_parameters: int) -> str:
    """A number of parameters as a text: 0.6 B, 11.4 M."""
    if num_parameters >= 5e8:
        return f"{num_parameters / 1e9:.1f} B"
    return f"{num_parameters / 1e6:.1f} M"


def parameters(model: ModelConfig) -> str:
    """The parameters of a model as a text; with experts, also the parameters that a token uses."""
    size = count(model.num_parameters)
    if model.has_experts:
        size += f", {count(model.num_active_parameters)} active"
    return size


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
    if _computes_by_torch(config) or not has_kernels:
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


def _with_adapters(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """The settings with the maximal number of adapters in memory; 0: none. `config` has its device.
    Raises SettingsError if adapters are requested but cannot be computed, or for too many."""
    named = parse_lora_paths(config.lora_paths)
    if not config.enable_lora and not named and not config.lora_dir:
        return replace(config, max_loaded_loras=0)
    why_not = why_no_adapters(config, model)
    if why_not:
        raise SettingsError(f"--enable-lora: {why_not}")
    num_loaded = config.max_loaded_loras or max(config.max_loras_per_batch, len(named))
    if len(named) > num_loaded:
        raise SettingsError(
            f"--lora-paths names {len(named):,} adapters, but --max-loaded-loras is {num_loaded:,}"
        )
    num_pinned = sum(one.pinned for one in named)
    if num_pinned > config.max_loras_per_batch - 1:
        raise SettingsError(
            f"--lora-paths pins {num_pinned:,} adapters, but --max-loras-per-batch is "
            f"{config.max_loras_per_batch:,}: at most {config.max_loras_per_batch - 1:,} may be"
        )
    return replace(config, enable_lora=True, max_loaded_loras=num_loaded)


def why_no_adapters(config: EngineConfig, model: ModelConfig) -> str:
    """The reason why adapters cannot be computed for this model on this device; "" if they can."""
    if model.is_encoder:
        return f"{model.name} is an encoder, which takes no adapters"
    if model.library_config:
        return f"{model.name} is computed by the package transformers, which takes no adapter"
    if not projections(model):
        return f"{model.name} has no matrix that an adapter can change"
    by_kernels = config.device == "cuda" and config.attention_backend != "torch"
    if by_kernels and EXPERTS in Targets(config.lora_target_modules):
        return (
            "adapters of experts are computed on a CPU (--device cpu), or by torch alone "
            "(--attention-backend torch)"
        )
    return ""


def _adapters_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Bytes of memory for all adapters that may be loaded."""
    if not config.max_loaded_loras:
        return 0
    return config.max_loaded_loras * adapter_bytes(
        model, config.max_lora_rank, config.lora_target_modules
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


def _encoder(
    asked: EngineConfig, config: EngineConfig, model: ModelConfig, free_bytes: int
) -> Resolved:
    """The settings of a model without KV. Slots are counted like everywhere, so that the scheduler
    is the same; there are enough slots for all running requests, and they have no memory.
    """
    default = EngineConfig()
    for name in NOT_FOR_ENCODERS:
        if getattr(asked, name) != getattr(default, name):
            raise SettingsError(
                f"--{name.replace('_', '-')} is given, but {model.name} is an encoder: it has no "
                "KV cache"
            )
    running = config.max_running_requests or MAX_RUNNING
    context = config.context_length
    tokens = config.max_prefill_tokens
    if config.device == "cpu":
        tokens = min(tokens, max(context, ENCODER_STEP_TOKENS))
    filled = replace(
        config,
        chunked_prefill_size=-1,
        prefix_cache=False,
        max_prefill_tokens=tokens,
        max_running_requests=running,
        kv_tokens=(running + 1) * (_whole_pages(context, config) + config.page_size),
    )
    work = _work_bytes(replace(filled, chunked_prefill_size=tokens), model)
    sizing = Sizing(
        free_bytes=free_bytes,
        weight_bytes=model.weights_bytes,
        work_bytes=work,
        kv_tokens=filled.kv_tokens,
        pools=KvPools(bytes_per_token=0, page_size=filled.page_size),
        context_length=context,
    )
    if model.weights_bytes + work > free_bytes:
        raise SettingsError(
            f"{model.name} does not fit into memory: weights take {size(model.weights_bytes)}, "
            f"the work {size(work)}, and {size(free_bytes)} are free. Lower --max-prefill-tokens "
            f"(now {tokens:,}) or take a smaller model."
        )
    return Resolved(filled, sizing)


def _device(asked: str, machine: Machine) -> str:
    if asked == "cuda" and not machine.gpus:
        raise SettingsError(f"--device is cuda, but no GPU can be used: {machine.no_gpu_reason}")
    if asked == "auto":
        if machine.gpus:
            return "cuda"
        return "cpu"
    return asked


def _computes_by_torch(config: EngineConfig) -> bool:
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
    if config.max_slowdown:
        return config.max_slowdown
    is_mixed = config.mixed_chunk and not config.split_prefill_layers
    if is_mixed and config.chunked_prefill_size > 0:
        return MAX_SLOWDOWN
    return -1.0


def _speculative(config: EngineConfig, model: ModelConfig) -> str:
    """The sources of drafts. `config` has its device. Raises SettingsError."""
    if config.ngram_min > config.ngram_max:
        raise SettingsError(
            f"--ngram-min is {config.ngram_min}, above --ngram-max ({config.ngram_max})"
        )
    hindrance = _no_drafts(config, model)
    if config.speculative == AUTO:
        # The gain of drafts on a GPU has not been measured.
        is_off = hindrance or config.device == "cuda"
        return OFF if is_off else all_sources(config.draft_model)
    if parse_draft_sources(config.speculative, "--speculative") and hindrance:
        raise SettingsError(
            f"--speculative is {config.speculative}, but {hindrance}; {OFF} is allowed"
        )
    return config.speculative


def _no_drafts(config: EngineConfig, model: ModelConfig) -> str:
    """The reason why drafts are impossible; "" if they are possible."""
    if config.split_prefill_layers:
        return (
            "there are no drafts while prefills are split (--split-prefill-layers is "
            f"{config.split_prefill_layers})"
        )
    if model.is_encoder:
        return f"{model.name} is an encoder, which generates nothing"
    if model.state_bytes:
        return f"{model.name} has layers that keep a state, which cannot go back to before a draft"
    return ""


def _no_draft_model(config: EngineConfig, model: ModelConfig) -> str:
    """The reason why a draft model cannot be used; "" if it can."""
    if config.device == "cuda":
        return "a draft model runs on a CPU only, and --device is cuda"
    if config.overlap:
        return "a draft model needs known tokens, and --overlap is on"
    return _no_drafts(config, model)


def _sizing(
    asked: EngineConfig,
    config: EngineConfig,
    model: ModelConfig,
    free_bytes: int,
    draft: ModelConfig | None,
    head_copy: int,
) -> Sizing:
    """Divide `free_bytes`. `config` is `asked` with device, dtype, context and chunk filled in;
    `head_copy`: bytes of the copy of the head.
    Raises SettingsError if memory is too small."""
    weights = model.weights_bytes - elsewhere_bytes(config, model)
    work = num_ranks(config) * _work_bytes(config, model) + _adapters_bytes(config, model)
    work += head_copy
    pools = _with_states(_pools(asked, config, model), config, model)
    if draft is not None:
        weights += draft.weights_bytes
        work += _draft_work_bytes(config, draft)
        pools = with_draft(model, draft, config.page_size)
    rest = free_bytes - weights - work
    kv_tokens = _kv_tokens(asked, config, pools, rest, free_bytes, weights)
    if pools.window and pools.window_tokens(kv_tokens) >= kv_tokens:
        # Two pools would take more memory than one.
        pools = one_pool(model, config.page_size)
        kv_tokens = _kv_tokens(asked, config, pools, rest, free_bytes, weights)
    context = min(config.context_length, kv_tokens)
    sizing = Sizing(
        free_bytes=free_bytes,
        weight_bytes=weights,
        work_bytes=work,
        kv_tokens=kv_tokens,
        pools=pools,
        context_length=context,
        note=f"context cut from {config.context_length:,} to {context:,} tokens to fit the KV cache"
        if context < config.context_length
        else "",
    )
    _check_fit(asked, config, model, sizing)
    return sizing


def _pools(asked: EngineConfig, config: EngineConfig, model: ModelConfig) -> KvPools:
    """The pools of KV: one, or a second one for layers with windows. There is only one for the code
    of transformers, whose attention reads one table of slots for all layers; beside layers that
    keep a state, if KV leaves the pool; and on a GPU with what does not work with two pools there:
    states, drafts, pictures whose tokens see later ones, and KV in the memory of the host."""
    leaves_pool = stores_kv(config) or config.disaggregation_mode != "none"
    has_one_table = bool(model.library_config or (model.state_bytes and leaves_pool))
    if config.device != "cpu":
        sees_both_ways = model.vision is not None and model.vision.rules.sees_both_ways
        drafts = config.speculative != OFF
        has_states = model.state_bytes > 0
        is_simple = not (drafts or sees_both_ways or has_states or leaves_pool)
        has_one_table = has_one_table or not is_simple
    if config.disable_hybrid_swa_memory or has_one_table:
        return one_pool(model, config.page_size)
    # The context is cut to the given size of the cache.
    context_length = min(config.context_length, asked.kv_tokens or config.context_length)
    return two_pools(
        model,
        page_size=config.page_size,
        chunk_len=config.chunked_prefill_size,
        context_length=context_length,
        ratio=config.swa_full_tokens_ratio,
        is_given=asked.kv_tokens > 0,
    )


def _with_states(pools: KvPools, config: EngineConfig, model: ModelConfig) -> KvPools:
    if model.state_bytes and config.max_mamba_cache_size == 1:
        raise SettingsError(
            "--max-mamba-cache-size is 1; at least 2 states are needed: the one that a request "
            "continues from, and its own"
        )
    return with_states(
        pools,
        model,
        num_slots=config.max_mamba_cache_size,
        ratio=config.mamba_full_memory_ratio,
    )


def _kv_tokens(
    asked: EngineConfig,
    config: EngineConfig,
    pools: KvPools,
    rest: int,
    free_bytes: int,
    weights: int,
) -> int:
    """Tokens of the KV cache: the user's number in whole pages, or as many as its bytes hold."""
    if asked.kv_tokens:
        return _whole_pages(asked.kv_tokens, config)
    fitting = pools.fitting(_kv_budget(asked, config, pools, weights, rest, free_bytes))
    # If every layer has a window, the other pool takes no memory: more tokens fit than are useful.
    return min(fitting, _most_tokens(config))


def _work_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Bytes of memory during a step: activations of the longest piece of a prompt, logits,
    libraries, and encoded pictures that are kept; on a GPU also graphs, which have their own
    activations, and the table of slots.
    """
    tokens = config.context_length
    if config.chunked_prefill_size > 0:
        tokens = config.chunked_prefill_size
    on_gpu = config.device == "cuda"
    widened = 0
    if on_gpu:
        tokens += max((*graph_sizes(config), *prompt_graph_sizes(config)), default=0)
        if (
            config.quantize == "int4"
        ):  # expanded at each use: 10 bytes per weight of the largest matrix
            widened = 10 * 2 * model.hidden_size * model.intermediate_size
    per_token = 4 * model.hidden_size + model.inner_size + model.mixer_size
    activations = tokens * (per_token + model.layer_inputs_size) * 4
    logits = 2 * (config.max_running_requests or MAX_RUNNING) * model.vocab_size * 4
    encoder = 0
    if model.vision is not None:
        encoder = 4 * model.vision.num_work_floats
        encoder += config.encoder_cache_tokens * encoded_bytes(model)
    return (
        activations
        + encoder
        + widened
        + logits
        + (graph_bytes(config) if on_gpu else 0)
        + LIBRARY_BYTES[config.device]
    )


def encoded_bytes(model: ModelConfig) -> int:
    """Bytes of the vectors of one token of a picture, in float32."""
    return 4 * model.hidden_size * (1 + model.decoder.deepstack)


def _draft_work_bytes(config: EngineConfig, draft: ModelConfig) -> int:
    """Bytes of memory of a draft model besides its weights and the K and V of known tokens: its
    work during a step, and K and V of its drafts."""
    num_drafts = (config.max_running_requests or MAX_RUNNING) * config.max_draft
    work = _work_bytes(config, draft) - LIBRARY_BYTES[config.device]
    return work + num_drafts * draft.kv_bytes_per_token


def _kv_budget(
    asked: EngineConfig,
    config: EngineConfig,
    pools: KvPools,
    weights: int,
    rest: int,
    free_bytes: int,
) -> int:
    """Bytes for the KV cache if the user gave no size. `rest`: bytes left by weights and work."""
    one_context = pools.num_bytes(_whole_pages(config.context_length, config))
    useful = pools.num_bytes(_most_tokens(config))
    if asked.memory_fraction:
        return min(useful, rest, int(free_bytes * asked.memory_fraction) - weights)
    budget = min(useful, int(rest * KV_SHARE[config.device]))
    if config.device == "cpu":
        budget = min(budget, max(CPU_KV_BYTES, one_context))
    if asked.context_length:
        budget = max(budget, min(one_context, int(rest * LARGEST_KV_SHARE)))
    return budget


def _most_tokens(config: EngineConfig) -> int:
    """Tokens of all requests that may run, each with a whole context: more are not needed."""
    num_requests = config.max_running_requests or MAX_RUNNING
    return num_requests * _whole_pages(config.context_length, config)


def _whole_pages(num_tokens: int, config: EngineConfig) -> int:
    return -(-num_tokens // config.page_size) * config.page_size


def _check_fit(
    asked: EngineConfig, config: EngineConfig, model: ModelConfig, sizing: Sizing
) -> None:
    """Raise SettingsError if weights, work and the smallest useful KV cache do not fit into
    memory."""
    shortest = asked.context_length or min(config.context_length, MIN_CONTEXT)
    if asked.context_length and 0 < asked.kv_tokens < asked.context_length:
        raise SettingsError(
            f"--kv-tokens is {asked.kv_tokens:,}, less than --context-length "
            f"({asked.context_length:,}): a request of that length could never run"
        )
    room = sizing.free_bytes - sizing.weight_bytes - sizing.work_bytes
    fitting = sizing.pools.fitting(room)
    if asked.kv_tokens:
        fits = sizing.kv_tokens <= fitting
    else:
        fits = sizing.kv_tokens >= shortest
    if fits:
        return
    wanted = shortest
    if asked.kv_tokens:
        wanted = sizing.kv_tokens
    raise SettingsError(
        f"{model.name} does not fit into memory: weights take {size(sizing.weight_bytes)}, the "
        f"work {size(sizing.work_bytes)}, a KV cache of {wanted:,} tokens "
        f"{size(sizing.pools.num_bytes(wanted))}, and {size(sizing.free_bytes)} are free. "
        f"{_cure(asked, config, sizing, fitting, shortest)}"
    )


def _cure(
    asked: EngineConfig, config: EngineConfig, sizing: Sizing, fitting: int, shortest: int
) -> str:
    """A sentence that names the option that makes the model fit. `fitting`: tokens that fit;
    `shortest`: tokens of the shortest useful context."""
    if fitting >= config.page_size:
        if asked.kv_tokens:
            return f"Lower --kv-tokens: {fitting:,} fit."
        if asked.memory_fraction and fitting >= shortest:
            needed = sizing.weight_bytes + sizing.pools.num_bytes(shortest)
            enough = needed / sizing.free_bytes
            return (
                f"Raise --memory-fraction (now {asked.memory_fraction:g}): {enough + 0.01:.2f} is "
                "enough."
            )
        if asked.context_length:
            return f"Lower --context-length: {int(fitting * LARGEST_KV_SHARE):,} fits."
    if asked.max_running_requests and sizing.work_bytes > sizing.free_bytes:
        return f"Lower --max-running-requests, {asked.max_running_requests:,}."
    narrow = ""
    if config.dtype == "float32":
        narrow = ", take --dtype bfloat16"
    return f"Free some memory{narrow} or take a smaller model."
