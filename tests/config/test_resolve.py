"""What "auto" becomes on machines of various sizes. One token of the model takes 1,000 bytes of KV
in bfloat16."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.config.machines import KV_BYTES, MODEL, machine, refusal, solve
from weft.config.amounts import GB
from weft.config.decoder import DecoderSpec
from weft.config.engine import EngineConfig
from weft.config.machine import GpuCard, Machine
from weft.config.options import SettingsError
from weft.config.resolve import CHUNK_LEN, MAX_RUNNING, MAX_SLOWDOWN, resolve
from weft.config.sizing import CPU_KV_BYTES
from weft.config.vision.qwen import MlpNames, QwenTowerSpec


def test_the_model_of_these_tests_has_a_thousand_bytes_a_token() -> None:
    assert MODEL.kv_bytes_per_token == KV_BYTES


def test_nothing_is_auto_afterwards() -> None:
    config = solve().config
    assert config.device == "cpu"
    assert config.dtype == "bfloat16"
    assert config.threads == 6
    assert config.context_length == 8_192
    assert config.chunked_prefill_size == CHUNK_LEN["cpu"]
    assert config.kv_tokens > 0
    assert config.max_running_requests > 0


def test_what_the_user_sets_stays() -> None:
    asked = {
        "dtype": "float32",
        "threads": 3,
        "context_length": 1_000,
        "kv_tokens": 4_096,
        "max_running_requests": 7,
    }
    config = solve(**asked, chunked_prefill_size=-1).config
    assert {name: getattr(config, name) for name in asked} == asked
    assert config.chunked_prefill_size == -1


def test_kv_cache_stops_at_what_the_running_requests_can_use() -> None:
    config = solve(64, context_length=1_024).config
    assert config.kv_tokens == MAX_RUNNING * 1_024
    assert config.max_running_requests == MAX_RUNNING


def test_kv_cache_on_a_cpu_stops_at_four_gigabytes() -> None:
    kv_tokens = solve(64, max_running_requests=100_000).config.kv_tokens
    assert kv_tokens == CPU_KV_BYTES // KV_BYTES // 16 * 16


def test_kv_cache_on_a_cpu_exceeds_four_gigabytes_for_one_whole_context() -> None:
    config = solve(64, replace(MODEL, max_position=6_000_000)).config
    assert config.kv_tokens == config.context_length == 6_000_000


def test_kv_cache_takes_half_of_what_weights_and_work_leave() -> None:
    sizing = solve(2, max_running_requests=10_000).sizing
    rest = sizing.free_bytes - sizing.weight_bytes - sizing.work_bytes
    assert sizing.kv_bytes == rest // 2 // KV_BYTES // 8 * 8 * KV_BYTES


def test_memory_fraction_covers_weights_and_kv_cache() -> None:
    sizing = solve(10, memory_fraction=0.25, max_running_requests=10_000).sizing
    assert 0 <= 2.5 * GB - (sizing.weight_bytes + sizing.kv_bytes) < 16 * KV_BYTES


def test_a_gpu_gives_nine_tenths_of_what_is_left_of_its_own_memory() -> None:
    gpus = (GpuCard("H200", 10 * GB, 12 * GB),)
    config, sizing = resolve(
        EngineConfig(max_running_requests=10_000), MODEL, machine(1, gpus=gpus)
    )
    assert config.device == "cuda"
    assert config.chunked_prefill_size == CHUNK_LEN["cuda"]
    rest = 10 * GB - sizing.weight_bytes - sizing.work_bytes
    assert 0 <= rest * 0.9 - sizing.kv_bytes < 16 * KV_BYTES + 1


def test_kv_tokens_are_rounded_up_to_whole_pages() -> None:
    assert solve(kv_tokens=1_001, page_size=64).config.kv_tokens == 1_024


def test_float32_doubles_weights_and_kv() -> None:
    narrow = solve(kv_tokens=1_024).sizing
    wide = solve(kv_tokens=1_024, dtype="float32").sizing
    assert wide.weight_bytes == 2 * narrow.weight_bytes
    assert wide.kv_bytes == 2 * narrow.kv_bytes


def test_float16_becomes_bfloat16_on_a_cpu_and_stays_on_a_gpu() -> None:
    stored = replace(MODEL, dtype="float16")
    assert resolve(EngineConfig(), stored, machine()).config.dtype == "bfloat16"
    gpus = (GpuCard("H200", 10 * GB, 12 * GB),)
    assert resolve(EngineConfig(), stored, machine(gpus=gpus)).config.dtype == "float16"


def test_context_that_was_not_asked_for_is_cut_to_what_fits() -> None:
    config, sizing = solve(16, kv_tokens=2_000)
    assert config.context_length == sizing.context_length == 2_000
    assert sizing.note == "context cut from 8,192 to 2,000 tokens to fit the KV cache"


def test_context_that_was_asked_for_gets_more_than_the_usual_share() -> None:
    rest = solve(1).sizing
    half = rest.kv_tokens
    assert half < 400_000
    longer = half + half // 2
    model = replace(MODEL, max_position=10_000_000)
    config = solve(1, model, context_length=longer, chunked_prefill_size=512).config
    assert config.context_length == longer <= config.kv_tokens


@pytest.mark.parametrize("asked", [0, 2_049])
def test_one_request_at_a_time_has_its_whole_context_in_whole_pages(asked: int) -> None:
    config = solve(
        model=replace(MODEL, max_position=2_049), max_running_requests=1, context_length=asked
    ).config
    assert config.context_length == 2_049
    assert config.kv_tokens == 2_056


def test_context_above_the_models_is_refused_with_both_numbers() -> None:
    assert "--context-length is 9,000, but tiny was made for at most 8,192 positions" in refusal(
        context_length=9_000
    )


def test_kv_cache_shorter_than_the_context_asked_for_is_refused() -> None:
    assert "--kv-tokens is 500, less than --context-length (1,000)" in refusal(
        kv_tokens=500, context_length=1_000
    )


def test_chunk_shorter_than_a_page_is_refused() -> None:
    assert "--chunked-prefill-size is 7, less than one page" in refusal(chunked_prefill_size=7)


def test_large_page_enlarges_the_default_chunk() -> None:
    assert solve(page_size=1_024).config.chunked_prefill_size == 1_024


def test_gpu_that_is_not_there_is_refused_with_the_reason() -> None:
    assert refusal(device="cuda") == "--device is cuda, but no GPU can be used: none"


def test_too_little_memory_for_the_weights_names_the_numbers() -> None:
    message = refusal(0.3, dtype="float32")
    assert "tiny does not fit into memory: weights take " in message
    assert "300 MB are free" in message
    assert "--dtype bfloat16" in message


def test_more_rows_than_there_is_memory_for_are_blamed_on_their_option() -> None:
    assert "Lower --max-running-requests, 100,000,000." in refusal(
        2, max_running_requests=100_000_000
    )


def test_too_many_kv_tokens_are_refused_with_the_number_that_fits() -> None:
    message = refusal(2, kv_tokens=10_000_000)
    assert "10.0 GB" in message
    fitting = int(
        message.rpartition("Lower --kv-tokens: ")[2].removesuffix(" fit.").replace(",", "")
    )
    assert solve(2, kv_tokens=fitting).config.kv_tokens == fitting


def test_too_small_a_fraction_is_refused_with_one_that_is_enough() -> None:
    message = refusal(2, memory_fraction=0.001)
    enough = float(message.rpartition("): ")[2].removesuffix(" is enough."))
    assert solve(2, memory_fraction=enough).config.kv_tokens >= 512


def test_too_long_a_context_is_refused_with_one_that_fits() -> None:
    model = replace(MODEL, max_position=50_000_000)
    message = refusal(2, model, context_length=40_000_000, chunked_prefill_size=512)
    fits = int(
        message.rpartition("Lower --context-length: ")[2].removesuffix(" fits.").replace(",", "")
    )
    assert (
        solve(2, model, context_length=fits, chunked_prefill_size=512).config.context_length == fits
    )


def test_sizing_is_readable() -> None:
    assert (
        str(solve(kv_tokens=16_384).sizing)
        == "16 MB = 16,384 tokens (page 8) · 2 requests of 8,192 tokens"
    )


def test_streams_are_protected_from_prompts_where_steps_are_mixed() -> None:
    assert solve().config.max_slowdown == MAX_SLOWDOWN
    assert solve(max_slowdown=4.0).config.max_slowdown == 4.0
    assert solve(max_slowdown=-1.0).config.max_slowdown == -1.0
    assert solve(mixed_chunk=False).config.max_slowdown == -1.0
    assert solve(chunked_prefill_size=-1).config.max_slowdown == -1.0
    for below in (0.5, -0.5):
        told = refusal(max_slowdown=below)
        assert f"--max-slowdown is {below}; at least 1 is expected, 0 or -1" in told


def test_prefills_are_split_only_where_steps_can_stop_between_layers() -> None:
    told = refusal(model=replace(MODEL, library_config="{}"), split_prefill_layers=2)
    assert "--split-prefill-layers is 2" in told
    assert "the package transformers" in told
    resolved = solve(split_prefill_layers=2).config
    assert resolved.max_slowdown == -1  # steps are not mixed


def test_drafts_are_made_where_they_can_be() -> None:
    assert solve().config.speculative == "prediction,tree,ngram"
    assert solve(speculative="ngram,tree").config.speculative == "ngram,tree"
    assert solve(split_prefill_layers=2).config.speculative == "off"
    assert solve(speculative="off", split_prefill_layers=2).config.speculative == "off"
    told = refusal(speculative="tree", split_prefill_layers=2)
    assert told.startswith(
        "--speculative is tree, but there are no drafts while prefills are split"
    )
    assert told.endswith("off is allowed")


def test_on_a_gpu_drafts_are_made_where_they_are_asked_for() -> None:
    card = GpuCard("fake", 8 * GB, 8 * GB)
    machine = Machine(1, 8 * GB, 8 * GB, (card,))

    def sources(**changes: object) -> str:
        return resolve(EngineConfig(model="m", **changes), MODEL, machine).config.speculative  # type: ignore[arg-type]

    assert sources() == "off"
    assert sources(speculative="tree,ngram") == "tree,ngram"


def test_a_draft_model_is_refused_with_overlap_of_stages() -> None:
    with pytest.raises(SettingsError, match=r"stages work at different steps .--overlap"):
        resolve(
            EngineConfig(model="m", draft_model="small", overlap=True, pp_size=2),
            MODEL,
            Machine(1, 8 * GB, 8 * GB, (), "none"),
            MODEL,
        )


TOWER = QwenTowerSpec(
    name="tower",
    hidden_size=32,
    inner_size=64,
    out_size=100,
    num_layers=2,
    num_heads=2,
    patch_size=16,
    time_size=2,
    merge_size=2,
    theta=10_000.0,
    activation="silu",
    has_rms_norm=False,
    mlp=MlpNames(up=("up",), down="down"),
    merger=MlpNames(up=("up",), down="down"),
    merger_norm="norm",
    deepstack=(0, 1),
)


def test_what_stays_encoded_is_no_memory_for_the_kv_cache() -> None:
    seeing = replace(MODEL, vision=TOWER, decoder=DecoderSpec(deepstack=2))
    without, sizing = (solve(1.0, seeing, encoder_cache_tokens=num).sizing for num in (0, 5_000))
    # A token has a vector for the embedding, and one for each of two layers.
    assert sizing.work_bytes - without.work_bytes == 5_000 * 3 * MODEL.hidden_size * 4
    assert sizing.kv_tokens < without.kv_tokens


def test_an_encoder_of_twelve_bits_takes_two_bytes_a_weight() -> None:
    seeing = replace(MODEL, dtype="float32", vision=TOWER)
    whole, short = (
        solve(2.0, seeing, quantize_encoder=format).sizing.weight_bytes
        for format in ("none", "int12")
    )
    assert whole - short == 2 * TOWER.num_parameters


@pytest.mark.parametrize(
    ("vision", "settings", "words"),
    [
        (None, {}, "m has no encoder beside its decoder"),
        (TOWER, {"kernels": "torch"}, "which only weft's CPU kernels compute"),
        (TOWER, {"dtype": "float16"}, "which only weft's CPU kernels compute"),
    ],
)
def test_formats_of_encoders_are_refused_where_nothing_computes_them(
    vision: QwenTowerSpec | None, settings: dict[str, str], words: str
) -> None:
    model = replace(MODEL, name="m", vision=vision)
    assert words in refusal(2.0, model, quantize_encoder="int12", **settings)
