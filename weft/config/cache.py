"""Settings of KV in a folder (`--cache-dir`), in host memory (`--cache-host-gb`) and in a store
from outside (`--plugins tiers=`), and their conditions on the model and other settings."""

from __future__ import annotations

from weft.config.engine import EngineConfig
from weft.config.model import ModelConfig
from weft.config.options import SettingsError
from weft.config.plugins import plugin_names

BLOCK_LEN = 64  # tokens


def block_len(config: EngineConfig) -> int:
    """Tokens of a block; `config` has its page size."""
    if config.cache_block:
        return config.cache_block
    page_size = config.page_size
    return max(BLOCK_LEN // page_size, 1) * page_size


def stores_kv(config: EngineConfig) -> bool:
    """Whether KV is also stored outside the pool."""
    return outlives(config) or has_host_tier(config)


def outlives(config: EngineConfig) -> bool:
    """Whether KV is stored where it outlives the process."""
    return bool(config.cache_dir or own_store(config))


def own_store(config: EngineConfig) -> str:
    """The name of the store from outside of weft; "" without one."""
    return next(iter(plugin_names(config.plugins, "tiers")), "")


def of_store(config: EngineConfig) -> str:
    """The option of the store that outlives the process."""
    if own_store(config):
        return f"--plugins tiers={own_store(config)}"
    return "--cache-dir"


def has_host_tier(config: EngineConfig) -> bool:
    return config.cache_host_gb > 0 or config.cache_host_ratio > 0


def host_bytes(config: EngineConfig, pool_bytes: int) -> int:
    """Bytes of host memory for KV, for a pool of `pool_bytes`."""
    if config.cache_host_gb:
        return int(config.cache_host_gb * 1e9)
    return int(config.cache_host_ratio * pool_bytes)


def check_cache(config: EngineConfig, model: ModelConfig) -> None:
    """Raise SettingsError if KV cannot be stored. `config` is resolved."""
    if own_store(config):
        why = _no_own_store(config)
        if why:
            raise SettingsError(f"{of_store(config)}: {why}")
    if has_host_tier(config):
        why = _no_prefixes(config) or _no_host_tier(config, model)
        if why:
            name = "--cache-host-gb" if config.cache_host_gb else "--cache-host-ratio"
            raise SettingsError(f"{name}: {why}")
    elif outlives(config):
        why = _no_prefixes(config)
        if config.device == "cuda":
            why = "KV of a GPU reaches it only by the memory of the host; set --cache-host-gb"
        if why:
            raise SettingsError(f"{of_store(config)}: {why}")
    if config.cache_block % config.page_size:
        raise SettingsError(
            f"--cache-block is {config.cache_block}; whole pages of {config.page_size} tokens "
            "are expected"
        )


def _no_own_store(config: EngineConfig) -> str:
    if len(plugin_names(config.plugins, "tiers")) > 1:
        return "one store from outside is possible"
    if config.cache_dir:
        return "--cache-dir is another store for the same KV; one of the two is possible"
    for option, size in (("--tp-size", config.tp_size), ("--pp-size", config.pp_size)):
        if size > 1:
            return f"KV that is divided between processes does not reach it ({option} 1)"
    if config.disaggregation_mode == "decode":
        return "a decode server takes KV only from other servers (--disaggregation-mode)"
    return ""


def _no_prefixes(config: EngineConfig) -> str:
    if config.prefix_cache:
        return ""
    return "it stores the content of the prefix cache, and there is none (--no-prefix-cache)"


def _no_host_tier(config: EngineConfig, model: ModelConfig) -> str:
    for option, size in (("--tp-size", config.tp_size), ("--pp-size", config.pp_size)):
        if size > 1:
            return f"it is for a model on one device ({option} 1)"
    if config.disaggregation_mode == "decode":
        return "a decode server takes KV only from other servers (--disaggregation-mode)"
    if config.device == "cpu" and config.kernels != "torch":
        return (
            "it is for pools in the memory of a GPU; on a CPU the pool is in the host's memory "
            "already: --kv-tokens makes it larger"
        )
    if config.swa_full_tokens_ratio or model.state_bytes or config.draft_model:
        return (
            "models with layers that keep a state or have windows in a pool of their own, and "
            "draft models, cannot use it"
        )
    return ""
