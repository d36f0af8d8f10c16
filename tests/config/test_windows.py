"""How memory is shared between layers with windows and all others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.config.decoder import AttentionSpec, DecoderSpec, LayerSpec
from weft.config.engine import EngineConfig
from weft.config.machine import Machine
from weft.config.model import ModelConfig
from weft.config.resolve import Resolved, resolve
from weft.config.sizing import window_tokens
from weft.config.windows import one_pool

GB = 1_000_000_000
CONTEXT = 32_768
WINDOWED = LayerSpec(attention=AttentionSpec(window=1_024))
GEMMA3 = ModelConfig(
    architecture="Gemma3ForCausalLM",
    name="of the shape of Gemma 3 27B",
    vocab_size=1_000,
    hidden_size=64,
    num_layers=60,
    num_heads=32,
    num_kv_heads=16,
    head_dim=128,
    intermediate_size=64,
    max_position=CONTEXT,
    norm_eps=1e-6,
    dtype="bfloat16",
    decoder=DecoderSpec(layers=(*[WINDOWED] * 5, LayerSpec())),
)
MISTRAL = replace(GEMMA3, decoder=DecoderSpec(layers=(WINDOWED,)))


def solve(model: ModelConfig, gigabytes: float = 64, **settings: object) -> Resolved:
    free = int(gigabytes * GB)
    machine = Machine(cores=2, free_bytes=free, total_bytes=free, gpus=(), no_gpu_reason="none")
    return resolve(EngineConfig(model="m", **settings), model, machine)  # type: ignore[arg-type]


def test_a_long_request_of_gemma_3_takes_a_quarter_of_the_memory() -> None:
    sizing = solve(GEMMA3, kv_tokens=CONTEXT).sizing
    assert sizing.window_tokens >= 1_024 + 512
    row = 1_024 + 512 + 2 * 16
    of_one_request = 8_192 * (10 * CONTEXT + 50 * row)
    assert of_one_request <= 0.25 * one_pool(GEMMA3, 16).num_bytes(CONTEXT)


def test_the_same_bytes_hold_more_tokens_in_two_pools() -> None:
    one = solve(GEMMA3, memory_fraction=0.5, disable_hybrid_swa_memory=True)
    two = solve(GEMMA3, memory_fraction=0.5)
    assert one.sizing.window_tokens == 0
    assert two.sizing.kv_tokens > 1.5 * one.sizing.kv_tokens
    for sizing in (one.sizing, two.sizing):
        assert sizing.weight_bytes + sizing.kv_bytes <= 0.5 * sizing.free_bytes
    assert "in layers with windows of 1,024 tokens" in str(two.sizing)


@pytest.mark.parametrize("model", [GEMMA3, MISTRAL])
@pytest.mark.parametrize("settings", [{}, {"kv_tokens": 50_000}, {"swa_full_tokens_ratio": 0.3}])
def test_the_engine_gets_the_sizes_that_were_worked_out(
    model: ModelConfig, settings: dict[str, object]
) -> None:
    resolved = solve(model, **settings)
    assert window_tokens(resolved.config) == resolved.sizing.window_tokens
    assert 0 < resolved.sizing.window_tokens < resolved.sizing.kv_tokens
    assert resolved.sizing.window_tokens % resolved.config.page_size == 0


def test_a_ratio_is_of_the_tokens_of_the_other_pool() -> None:
    sizing = solve(GEMMA3, kv_tokens=100_000, swa_full_tokens_ratio=0.25).sizing
    assert abs(sizing.window_tokens - 25_000) <= 16


@pytest.mark.parametrize("kv_tokens", [2_048, 8_192, 16_384, 40_000])
def test_a_context_that_is_cut_to_the_cache_counts_as_it_is_served(kv_tokens: int) -> None:
    long = replace(GEMMA3, max_position=131_072)
    cut = solve(long, kv_tokens=kv_tokens).sizing
    assert cut.context_length == kv_tokens
    told = solve(long, kv_tokens=kv_tokens, context_length=kv_tokens).sizing
    assert cut.window_tokens == told.window_tokens
    # Requests of an eighth of the context fill both pools: each has its window and one in the
    # cache.
    typical = max(kv_tokens // 8, 512)
    kept = cut.window_tokens or kv_tokens
    assert kept >= min(2 * 1_024 / typical, 1) * kv_tokens


def test_a_window_of_half_the_context_is_no_reason_for_a_second_pool() -> None:
    assert solve(GEMMA3, context_length=2_048).sizing.window_tokens == 0
    assert solve(GEMMA3, chunked_prefill_size=-1).sizing.window_tokens == 0
    assert solve(replace(GEMMA3, library_config="{}")).sizing.window_tokens == 0
