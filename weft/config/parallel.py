"""One model in several processes, called ranks (`--tp-size`): which models can be divided, and the
part of each rank.

Every rank has some of the attention heads, some of the inner values of the feed-forward parts, and
some of the vocabulary (`ops/sharding.py`). If there are fewer KV heads than ranks, several ranks
have the same KV head.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace

from weft.config.decoder import LayerSpec, MlpSpec, MoeSpec, QkNorm
from weft.config.engine import EngineConfig
from weft.config.lockstep import check_lockstep
from weft.config.model import ModelConfig
from weft.config.nodes import check_nodes
from weft.config.options import SettingsError

MAX_RANKS = 64


def check_parallel(config: EngineConfig, model: ModelConfig) -> None:
    """Raise SettingsError if the model cannot be divided as the settings demand. `config` has its
    device."""
    size = config.tp_size
    check_lockstep(config, model)
    if config.pp_size > 1:
        _check_stages(config, model)
    check_nodes(config)
    if config.node_rank:
        raise SettingsError(
            f"--node-rank is {config.node_rank}: only weft serve follows another node"
        )
    if size == 1:
        return
    option = f"--tp-size is {size}"
    why = _hindrance(config, model)
    if why:
        raise SettingsError(f"{option}, but {why}")
    check_divides(size, model)


def check_divides(size: int, model: ModelConfig) -> None:
    """Raise SettingsError if the heads and inner values of a model, or of a head that guesses for
    it, cannot be divided between `size` ranks."""
    option = f"--tp-size is {size}"
    for what, number in _divided(model).items():
        if number % size:
            raise SettingsError(
                f"{option}, which does not divide the {number:,} {what} of {model.name}; "
                f"{_or(fitting_sizes(model))} would (heads of keys and values are repeated)"
            )
    if not _fits_kv(model.num_kv_heads, size):
        raise SettingsError(
            f"{option}, but {model.name} has {model.num_kv_heads} heads of keys and values, which "
            f"can neither be divided nor repeated evenly; {_or(fitting_sizes(model))} would do"
        )


def num_ranks(config: EngineConfig) -> int:
    """The number of processes that together hold the model."""
    return config.tp_size * config.pp_size


def _check_stages(config: EngineConfig, model: ModelConfig) -> None:
    """Raise SettingsError if the layers cannot be divided as the settings demand."""
    size = config.pp_size
    why = _not_in_parts(config, model)
    if config.tp_size > 1:
        why = f"--tp-size is {config.tp_size}: a model can be divided in only one of the two ways"
    elif config.nnodes > 1:
        why = f"--nnodes is {config.nnodes}: stages are processes of one machine"
    elif config.cache_dir:
        why = "KV of several stages is not stored (--cache-dir)"
    elif config.split_prefill_layers:
        why = "a stage has its layers in one piece (--split-prefill-layers)"
    elif not why and model.decoder.layer_inputs is not None:
        why = f"{model.name} has inputs for each layer, which only the first stage could make"
    elif not why and any(layer.attention.kv_of is not None for layer in model.decoder.layers):
        why = f"{model.name} has layers that read K and V of others, which may be in another stage"
    elif not why and size > model.num_layers:
        why = f"{model.name} has {model.num_layers} layers"
    if why:
        raise SettingsError(f"--pp-size is {size}, but {why}")


def sum_backend(config: EngineConfig, *, can_share: bool) -> str:
    """The way in which ranks add up their results. `can_share`: weft's kernels compute, which add
    up in shared memory within a program. Raises SettingsError."""
    if config.nnodes > 1:
        if config.dist_backend == "shm":
            raise SettingsError(
                f"--dist-backend is shm, but the {config.nnodes} nodes share no memory (--nnodes); "
                "tcp does without"
            )
        can_share = False
    can_share = can_share and sys.platform == "linux"
    if config.dist_backend == "shm" and not can_share:
        raise SettingsError(
            "--dist-backend is shm, but only our CPU kernels on Linux share memory; tcp does "
            "without"
        )
    if config.dist_backend != "auto" or config.tp_size == 1:
        return config.dist_backend
    return "shm" if can_share else "tcp"


def fitting_sizes(model: ModelConfig) -> list[int]:
    """The numbers of ranks into which the model can be divided, rising."""
    numbers = _divided(model).values()
    found = []
    for size in range(1, MAX_RANKS + 1):
        fits = all(number % size == 0 for number in numbers)
        if fits and _fits_kv(model.num_kv_heads, size):
            found.append(size)
    return found


def of_rank(model: ModelConfig, num_ranks: int) -> ModelConfig:
    """The model with the heads of one rank. All ranks have equally many."""
    if num_ranks == 1:
        return model
    return replace(
        model,
        num_heads=model.num_heads // num_ranks,
        num_kv_heads=max(model.num_kv_heads // num_ranks, 1),
    )


def kept_together(model: ModelConfig, num_ranks: int) -> ModelConfig:
    """The model as all ranks together keep it: a KV head that several ranks have counts once for
    each."""
    return replace(model, num_kv_heads=of_rank(model, num_ranks).num_kv_heads * num_ranks)


def _not_in_parts(config: EngineConfig, model: ModelConfig) -> str:
    """The reason why a model cannot be divided in any way; "" if it can."""
    if config.device == "cuda":
        return "ranks compute only on CPUs so far (--device cpu)"
    if model.is_encoder:
        return f"{model.name} is an encoder, which is not divided"
    if model.library_config:
        return (
            f"{model.name} is computed by the code of transformers, whose weights are not divided"
        )
    if model.decoder.cross is not None:
        return f"{model.name} attends to an encoder's vectors, which are not divided"
    return ""


def _hindrance(config: EngineConfig, model: ModelConfig) -> str:
    """The reason why heads and inner values cannot be divided; "" if they can."""
    why = _not_in_parts(config, model)
    if why:
        return why
    if config.cache_dir and config.nnodes > 1:
        return f"--nnodes is {config.nnodes}: KV of other nodes is not stored (--cache-dir)"
    if model.decoder.layer_inputs is not None:
        return f"{model.name} has inputs for each layer, which are not divided"
    for spec in model.decoder.layers:
        for name, has in _NOT_DIVIDED.items():
            if has(spec):
                return f"{model.name} has {name}, which are not divided"
    return ""


_NOT_DIVIDED: dict[str, Callable[[LayerSpec], bool]] = {
    "layers that keep a state": lambda spec: spec.state is not None,
    "attention by latents": lambda spec: spec.attention.latent is not None,
    "K and V of other sizes in some layers": lambda spec: bool(
        spec.attention.kv_heads or spec.attention.head_dim
    ),
    "layers that read the K and V of others": lambda spec: spec.attention.kv_of is not None,
    "experts beside a dense part": lambda spec: (
        isinstance(spec.mlp, MoeSpec) and spec.mlp.dense_size > 0
    ),
    "norms over all heads together": lambda spec: spec.attention.qk_norm is QkNorm.ALL_HEADS,
}


def _divided(model: ModelConfig) -> dict[str, int]:
    """The numbers that the number of ranks must divide: what is counted → number."""
    sizes: set[int] = set()
    of_experts: set[int] = set()
    for spec in model.decoder.layers:
        if isinstance(spec.mlp, MlpSpec):
            sizes.add(spec.mlp.size or model.intermediate_size)
        elif spec.mlp is not None:
            of_experts |= {spec.mlp.size, spec.mlp.shared_size or spec.mlp.size}
    found = {"heads": model.num_heads}
    if sizes:
        found["inner numbers of a feed-forward part"] = math.gcd(*sizes)
    if of_experts:
        found["inner numbers of an expert"] = math.gcd(*of_experts)
    return found


def _fits_kv(num_kv_heads: int, size: int) -> bool:
    return num_kv_heads % size == 0 or size % num_kv_heads == 0


def _or(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"only {numbers[0]}"
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}"
