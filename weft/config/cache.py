"""Settings of KV in a folder (`--cache-dir`): what they need of a model and of other settings."""

from __future__ import annotations

from weft.config.engine import EngineConfig
from weft.config.model import ModelConfig
from weft.config.options import SettingsError

BLOCK_LEN = 64  # tokens


def block_len(config: EngineConfig) -> int:
    """Tokens of a block; `config` has its page size."""
    if config.cache_block:
        return config.cache_block
    page_size = config.page_size
    return max(BLOCK_LEN // page_size, 1) * page_size


def check_cache(config: EngineConfig, model: ModelConfig) -> None:
    """Raises SettingsError where KV cannot be stored. `config` is resolved."""
    why = _why_not(config, model)
    if why:
        raise SettingsError(f"--cache-dir: {why}")
    if config.cache_block % config.page_size:
        raise SettingsError(
            f"--cache-block is {config.cache_block}; whole pages of {config.page_size} tokens "
            "are expected"
        )


def _why_not(config: EngineConfig, model: ModelConfig) -> str:
    if config.device == "cuda":
        return "KV of a GPU cannot be stored yet, only that of a CPU (--device cpu)"
    if not config.prefix_cache:
        return "it stores what the prefix cache has, and there is none (--no-prefix-cache)"
    return ""
