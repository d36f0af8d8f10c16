"""How memory is shared between K and V and the states of layers that keep one."""

from __future__ import annotations

import pytest

from weft.config.engine import EngineConfig
from weft.config.machine import Machine
from weft.config.model import ModelConfig
from weft.config.options import SettingsError
from weft.config.resolve import Resolved, resolve

GB = 1_000_000_000
MB = 1_000_000
CONTEXT = 32_768


class Hybrid(ModelConfig):
    """A model of which a request has a state of so many bytes."""

    state_bytes = 50 * MB  # type: ignore[assignment]


class SmallHybrid(ModelConfig):
    state_bytes = 80_000  # type: ignore[assignment]


SHAPE = {
    "architecture": "Qwen3ForCausalLM",
    "name": "of the shape of Qwen3.5 9B",
    "vocab_size": 1_000,
    "hidden_size": 64,
    "num_layers": 8,
    "num_heads": 16,
    "num_kv_heads": 4,
    "head_dim": 256,
    "intermediate_size": 64,
    "max_position": CONTEXT,
    "norm_eps": 1e-6,
    "dtype": "bfloat16",
}


def solve(model: ModelConfig, gigabytes: float = 64, **settings: object) -> Resolved:
    free = int(gigabytes * GB)
    machine = Machine(cores=2, free_bytes=free, total_bytes=free, gpus=(), no_gpu_reason="none")
    return resolve(EngineConfig(model="m", **settings), model, machine)  # type: ignore[arg-type]


def hybrid() -> ModelConfig:
    return Hybrid(**SHAPE)  # type: ignore[arg-type]


def test_memory_is_shared_between_tokens_and_states() -> None:
    without = solve(ModelConfig(**SHAPE), memory_fraction=0.5)  # type: ignore[arg-type]
    resolved = solve(hybrid(), memory_fraction=0.5)
    sizing = resolved.sizing
    assert resolved.config.max_mamba_cache_size == sizing.state_slots > 4
    assert 0 < sizing.kv_tokens < without.sizing.kv_tokens
    assert sizing.kv_bytes == sizing.kv_tokens * 32_768 + sizing.state_slots * 50 * MB
    assert sizing.kv_bytes <= 0.5 * 64 * GB
    assert f"and {sizing.state_slots:,} states of 50 MB" in str(sizing)


def test_no_more_requests_run_than_have_a_state() -> None:
    resolved = solve(hybrid(), memory_fraction=0.5)
    assert resolved.config.max_running_requests <= resolved.sizing.state_slots


def test_states_take_half_as_many_bytes_as_keys_and_values() -> None:
    sizing = solve(hybrid(), memory_fraction=0.5).sizing
    in_states = sizing.state_slots * 50 * MB
    assert in_states == pytest.approx(0.5 * sizing.kv_tokens * 32_768, rel=0.01)


def test_of_small_states_a_short_request_has_three() -> None:
    resolved = solve(SmallHybrid(**SHAPE), kv_tokens=200_000)  # type: ignore[arg-type]
    assert resolved.sizing.state_slots == 3 * 200_000 // 512


def test_four_states_are_kept_however_few_tokens_there_are() -> None:
    assert solve(hybrid(), kv_tokens=2_048, context_length=2_048).sizing.state_slots == 4


def test_the_number_of_states_and_their_part_of_memory_may_be_given() -> None:
    assert solve(hybrid(), max_mamba_cache_size=30).sizing.state_slots == 30
    sizing = solve(hybrid(), kv_tokens=100_000, mamba_full_memory_ratio=0.9).sizing
    assert sizing.state_slots == int(0.9 * 100_000 * 32_768 / (50 * MB))
    with pytest.raises(SettingsError, match="at least 2 states"):
        solve(hybrid(), max_mamba_cache_size=1)


def test_a_model_without_states_has_no_slots() -> None:
    resolved = solve(ModelConfig(**SHAPE), max_mamba_cache_size=30)  # type: ignore[arg-type]
    assert resolved.sizing.state_slots == 0
    assert resolved.config.max_mamba_cache_size == 0
