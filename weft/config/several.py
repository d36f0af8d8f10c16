"""Settings of a server with several models: of all of them together, and of each one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.config.engine import EngineConfig
from weft.config.options import Option, option, options_of
from weft.config.server import ServerConfig


@dataclass(frozen=True, kw_only=True)
class ModelsConfig:
    """Any of these settings makes a server that loads and unloads models."""

    models_dir: str = option(
        "",
        "folder with models, which are loaded when requests name them (docs/guides/models.md)",
        group="models",
        everyday=True,
    )
    models_store: bool = option(
        False,
        "offer every model that `weft list` shows, and what /api/pull and /api/copy bring",
        group="models",
        everyday=True,
    )
    memory: float = option(
        0.0,
        "GB that the engines of all models may take together; 0: nine tenths of the free memory",
        group="models",
        everyday=True,
        low=0.0,
    )
    models_max: int = option(
        4,
        "models in memory at a time; each may have its part of --memory for its KV cache",
        group="models",
        low=1,
        high=1_000,
    )
    model_ttl_s: float = option(
        0.0,
        "time without requests after which a model is unloaded; 0: it stays until another one "
        "needs the memory",
        group="models",
        low=0.0,
    )
    load_wait_s: float = option(
        600.0,
        "longest time that a request waits for its model to be loaded",
        group="models",
        low=0.1,
    )
    max_load_waiting: int = option(
        1_024,
        "requests that may wait for their models to be loaded, for all models together",
        group="models",
        low=1,
    )
    load_patience_s: float = option(
        5.0,
        "wait after which a model that others still use must make room for another one",
        group="models",
        low=0.0,
        high=3600.0,
    )


@dataclass(frozen=True, kw_only=True)
class ModelTable:
    """The keys of a table [models.NAME] of the configuration file, beside those of `per_model`."""

    path: str = option(
        "",
        "folder, GGUF file or name of the hub; without it, the name of the table",
        group="models",
    )
    aliases: str = option(
        "", "other names by which requests may name the model", group="models", several=True
    )
    pin: bool = option(
        False, "it is never unloaded, and keeps its KV cache, once it is loaded", group="models"
    )
    ttl_s: float = option(-1.0, "its own --model-ttl-s; -1: that of all", group="models", low=-1.0)
    on_start: bool = option(True, "it is loaded when the server starts", group="models")


GROUP = "models"  # name of the tables in the configuration file
# Settings of the server that a model may have of its own.
OF_SERVER = (
    *("auto_truncate", "chat_template", "clamp_max_tokens", "dp_size", "grammar_in_reasoning"),
    *("hang_after_s", "hang_timeout_s", "knee_output_per_s", "limit_mm_per_prompt"),
    "load_balance_method",
    *("reasoning_parser", "step_timeout_s", "stream_interval", "tool_call_parser"),
    "trust_request_chat_template",
)
# Settings of an engine that only a server with one model can have.
ALONE = {
    "nnodes": 1,
    "node_rank": 0,
    "disaggregation_mode": "none",
    "enable_dp_attention": False,
}


def per_model() -> Mapping[str, Option]:
    """The options that a table [models.NAME] may have, by name."""
    found = {one.name: one for one in options_of(EngineConfig) if one.name not in (*ALONE, "model")}
    found |= {one.name: one for one in options_of(ServerConfig) if one.name in OF_SERVER}
    found |= {one.name: one for one in options_of(ModelTable)}
    return found
