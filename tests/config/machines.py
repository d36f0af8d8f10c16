"""Machines and models that settings are resolved for."""

from __future__ import annotations

import pytest

from weft.config.amounts import GB
from weft.config.engine import EngineConfig
from weft.config.machine import GpuCard, Machine
from weft.config.model import ModelConfig
from weft.config.options import SettingsError
from weft.config.resolve import Resolved, resolve

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    name="tiny",
    vocab_size=1_000,
    hidden_size=100,
    num_layers=25,
    num_heads=10,
    num_kv_heads=1,
    head_dim=10,
    intermediate_size=400,
    max_position=8_192,
    norm_eps=1e-6,
    dtype="bfloat16",
)
KV_BYTES = 1_000


def machine(free_gb: float = 16.0, *, gpus: tuple[GpuCard, ...] = ()) -> Machine:
    return Machine(
        cores=6,
        free_bytes=int(free_gb * GB),
        total_bytes=int(free_gb * GB),
        gpus=gpus,
        no_gpu_reason="none",
    )


def solve(free_gb: float = 16.0, model: ModelConfig = MODEL, **settings: object) -> Resolved:
    return resolve(EngineConfig(**settings), model, machine(free_gb))  # type: ignore[arg-type]


def refusal(free_gb: float = 16.0, model: ModelConfig = MODEL, **settings: object) -> str:
    with pytest.raises(SettingsError) as caught:
        solve(free_gb, model, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)
