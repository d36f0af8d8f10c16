"""The settings of encoders: models without KV, which compute whole prompts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from weft.config.amounts import size
from weft.config.cache import of_store, outlives
from weft.config.engine import EngineConfig
from weft.config.gpu import MAX_RUNNING
from weft.config.model import ModelConfig
from weft.config.options import SettingsError, TooLarge
from weft.config.sizing import Sizing, rounded_up, work_bytes
from weft.config.windows import KvPools

# Tokens in one step on a CPU, so that the values between two layers stay in the processor's cache.
ENCODER_STEP_TOKENS = 1_024
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
OF_ADAPTERS = ("enable_lora", "lora_dir")


def without_kv(config: EngineConfig, own: Collection[str]) -> EngineConfig:
    """The settings of several models for one that is an encoder: without those that are for others.
    What is in `own` was set for this model, and stays."""
    default = EngineConfig()
    names = [name for name in (*NOT_FOR_ENCODERS, *OF_ADAPTERS) if name not in own]
    return replace(config, **{name: getattr(default, name) for name in names})


def encoder(
    asked: EngineConfig, config: EngineConfig, model: ModelConfig, free_bytes: int
) -> tuple[EngineConfig, Sizing]:
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
    if outlives(asked):
        raise SettingsError(f"{of_store(asked)}: {model.name} is an encoder: it has no KV cache")
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
        kv_tokens=(running + 1) * (rounded_up(context, config) + config.page_size),
    )
    work = work_bytes(replace(filled, chunked_prefill_size=tokens), model)
    sizing = Sizing(
        free_bytes=free_bytes,
        weight_bytes=model.weights_bytes,
        work_bytes=work,
        kv_tokens=filled.kv_tokens,
        pools=KvPools(bytes_per_token=0, page_size=filled.page_size),
        context_length=context,
    )
    if model.weights_bytes + work > free_bytes:
        raise TooLarge(
            f"{model.name} does not fit into memory: weights take {size(model.weights_bytes)}, "
            f"the work {size(work)}, and {size(free_bytes)} are free. Lower --max-prefill-tokens "
            f"(now {tokens:,}) or take a smaller model."
        )
    return filled, sizing
