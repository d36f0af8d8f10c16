"""Engines of one server that divide the experts of its model (`--enable-dp-attention`): checks
which settings and models allow it.

Each engine has the whole model except experts, its own scheduler and its own KV; the experts of a
layer are divided equally (`ops/expert_parallel.py`).
"""

from __future__ import annotations

from dataclasses import replace

from weft.config.decoder import MoeSpec
from weft.config.engine import EngineConfig
from weft.config.model import ModelConfig
from weft.config.options import SettingsError

OPTION = "--enable-dp-attention"


def with_engines(config: EngineConfig, num_engines: int) -> EngineConfig:
    """The settings of each engine of a server. Raises SettingsError if they contradict each other.

    Settings written for SGLang repeat the number of engines as --tp-size and --ep-size.
    """
    if not config.enable_dp_attention:
        if config.ep_size > 1:
            raise SettingsError(
                f"--ep-size is {config.ep_size}, which needs {OPTION}: engines that have the "
                "experts between them (--dp-size says how many)"
            )
        return config
    if num_engines == 1:
        raise SettingsError(f"{OPTION} is for several engines, and --dp-size is 1")
    for option, size in (("--tp-size", config.tp_size), ("--ep-size", config.ep_size)):
        if size not in (1, num_engines):
            raise SettingsError(
                f"{option} is {size}; with {OPTION} it is that of --dp-size, {num_engines}, or 1"
            )
    return replace(config, tp_size=1, ep_size=num_engines)


def check_lockstep(config: EngineConfig, model: ModelConfig) -> None:
    """Raise SettingsError if engines cannot divide the experts of the model."""
    if not config.enable_dp_attention:
        return
    why = ""
    if config.ep_size == 1:
        why = "there is only one engine: it is for weft serve with --dp-size"
    elif config.device == "cuda":
        why = "engines compute for each other only on CPUs so far (--device cpu)"
    elif model.library_config or not expert_specs(model):
        why = f"{model.name} has no experts that could be divided; --dp-size alone needs none"
    elif config.pp_size > 1:
        why = f"--pp-size is {config.pp_size}: a model can be divided in only one of the two ways"
    elif config.draft_model:
        why = "a draft model would wait for other engines (--draft-model)"
    elif config.max_loaded_loras:
        why = "adapters cannot change experts that other engines have (--enable-lora)"
    elif config.split_prefill_layers:
        why = "all layers of a step run at once (--split-prefill-layers)"
    elif _fewest_experts(model) < config.ep_size:
        why = f"{model.name} has {_fewest_experts(model)} experts for {config.ep_size} engines"
    if why:
        raise SettingsError(f"{OPTION}, but {why}")


def expert_specs(model: ModelConfig) -> list[MoeSpec]:
    """The experts of the layers that have some, in the order of layers."""
    if model.is_encoder or model.library_config:
        return []
    return [spec.mlp for spec in model.decoder.layers if isinstance(spec.mlp, MoeSpec)]


def elsewhere_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Bytes of the weights that only other engines hold, if every parameter has the same size."""
    if config.ep_size == 1 or not model.num_parameters:
        return 0
    of_experts = sum(
        spec.router.num_experts * spec.num_matrices * spec.size * model.hidden_size
        for spec in expert_specs(model)
    )
    share = min(of_experts / model.num_parameters, 1.0)
    return int(model.weights_bytes * share * (1 - 1 / config.ep_size))


def _fewest_experts(model: ModelConfig) -> int:
    return min(spec.router.num_experts for spec in expert_specs(model))
