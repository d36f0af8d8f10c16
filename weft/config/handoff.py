"""Settings of handoff (`--disaggregation-mode`): their conditions on the model and other settings,
and the words that several packages share."""

from __future__ import annotations

from ipaddress import ip_address

from weft.config.engine import EngineConfig
from weft.config.lenders import parse_lenders
from weft.config.model import ModelConfig
from weft.config.options import SettingsError

PREFILL = "prefill"
DECODE = "decode"
# Reasons why a decode server computes a prompt itself.
REASONS = ("unreachable", "refused", "lost", "damaged", "late")


def check_handoff(config: EngineConfig, model: ModelConfig) -> None:
    """Raise SettingsError if KV cannot be handed over. `config` is resolved."""
    why = _why_not(config, model)
    if why:
        raise SettingsError(f"--disaggregation-mode {config.disaggregation_mode}: {why}")
    parse_lenders(config.handoff_lenders, config.disaggregation_bootstrap_port)
    if config.disaggregation_mode != PREFILL or config.handoff_secret:
        return
    if not is_loopback(config.handoff_host):
        raise SettingsError(
            f"--handoff-host is {config.handoff_host}, which others can reach: give both servers "
            "the same --handoff-secret (better: WEFT_HANDOFF_SECRET)"
        )


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this machine, without a look-up."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _why_not(config: EngineConfig, model: ModelConfig) -> str:
    if model.is_encoder:
        return f"{model.name} is an encoder: it has no KV cache"
    for option, size in (("--tp-size", config.tp_size), ("--pp-size", config.pp_size)):
        if size > 1:
            return f"KV that is divided between processes cannot be handed over yet ({option})"
    if config.device == "cuda":
        return "KV of a GPU cannot be handed over yet, only that of a CPU (--device cpu)"
    if not config.prefix_cache:
        return "KV comes into the prefix cache, and there is none (--no-prefix-cache)"
    if config.cache_dir and config.disaggregation_mode == DECODE:
        return (
            "KV cannot come both from another server and from --cache-dir, which the prefill "
            "server may have"
        )
    return ""
