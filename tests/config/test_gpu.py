"""What settings become on a machine with a GPU, and which are refused where."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from tests.config.machines import KV_BYTES, MODEL, machine, refusal
from weft.config.amounts import GB
from weft.config.engine import EngineConfig
from weft.config.gpu import GRAPH_BYTES, graph_sizes
from weft.config.machine import GpuCard
from weft.config.options import Command, SettingsError
from weft.config.resolve import Resolved, resolve


def on_gpu(gb: int = 141, **settings: object) -> Resolved:
    return resolve(
        EngineConfig(**settings), MODEL, machine(1, gpus=(GpuCard("H200", gb * GB, gb * GB),))
    )  # type: ignore[arg-type]


def test_a_gpu_is_taken_by_itself_with_overlap_and_pages_of_one_token() -> None:
    config = on_gpu().config
    assert (config.device, config.overlap, config.page_size) == ("cuda", True, 1)
    cpu = resolve(EngineConfig(), MODEL, machine(8)).config
    assert (cpu.device, cpu.overlap, cpu.page_size) == ("cpu", False, 8)


def test_what_the_user_sets_stays_on_a_gpu() -> None:
    config = on_gpu(overlap=False, page_size=32, chunked_prefill_size=64, dtype="float32").config
    assert (config.overlap, config.page_size, config.chunked_prefill_size) == (False, 32, 64)
    assert config.dtype == "float32"
    assert on_gpu(device="cpu", overlap=True).config.overlap is True


def test_models_in_float32_are_computed_in_bfloat16_on_a_gpu_and_as_stored_on_a_cpu() -> None:
    wide = replace(MODEL, dtype="float32")
    gpus = (GpuCard("H200", 10 * GB, 10 * GB),)
    assert resolve(EngineConfig(), wide, machine(1, gpus=gpus)).config.dtype == "bfloat16"
    assert resolve(EngineConfig(), wide, machine(8)).config.dtype == "float32"


@pytest.mark.parametrize(("gb", "expected"), [(141, 8192), (48, 4096), (16, 2048)])
def test_a_larger_gpu_takes_longer_pieces_of_prompts(gb: int, expected: int) -> None:
    assert on_gpu(gb).config.chunked_prefill_size == expected


def test_graphs_and_the_table_of_slots_are_taken_off_before_the_kv_cache() -> None:
    most = {"max_running_requests": 64, "context_length": 4096, "chunked_prefill_size": 512}
    without = on_gpu(cuda_graph=False, **most).sizing
    with_graphs = on_gpu(cuda_graph_sizes="1,2", **most).sizing
    assert with_graphs.work_bytes - without.work_bytes >= 2 * GRAPH_BYTES
    longer = on_gpu(cuda_graph=False, **{**most, "context_length": 8192}).sizing
    assert longer.work_bytes - without.work_bytes == 65 * 4096 * 4
    assert (
        0 <= on_gpu(12, memory_fraction=0.5, max_running_requests=50_000).sizing.kv_bytes <= 6 * GB
    )


def test_weights_that_are_widened_at_each_use_have_room_for_it() -> None:
    four, eight = (on_gpu(quantize=name).sizing.work_bytes for name in ("int4", "int8"))
    assert four - eight == 2 * MODEL.hidden_size * MODEL.intermediate_size * 10


def test_graph_sizes_end_with_the_most_that_may_run() -> None:
    for most in (1, 2, 7, 64, 100, 256, 1000):
        sizes = graph_sizes(EngineConfig(max_running_requests=most))
        assert sizes == sorted(set(sizes))
        assert sizes[0] == 1
        assert sizes[-1] == most
        assert all(after <= 2 * before for before, after in pairwise(sizes))
    assert on_gpu(max_running_requests=4).config.cuda_graph_sizes == "1,2,4"
    assert on_gpu(cuda_graph=False).config.cuda_graph_sizes == ""


def test_graph_sizes_that_were_asked_for_are_sorted_and_checked() -> None:
    assert on_gpu(cuda_graph_sizes="8, 1,8").config.cuda_graph_sizes == "1,8"
    for wrong in ("0", "257", "1,two", "1,,2"):
        with pytest.raises(SettingsError, match="numbers from 1 to 256"):
            on_gpu(cuda_graph_sizes=wrong)


def test_kv_in_fp8_halves_it_on_a_gpu_and_is_refused_on_a_cpu_and_int8_the_other_way_round() -> (
    None
):
    assert on_gpu(kv_dtype="fp8").sizing.kv_bytes_per_token * 2 == KV_BYTES
    assert refusal(kv_dtype="fp8") == "--kv-dtype fp8 needs --device cuda; the device is cpu"
    with pytest.raises(
        SettingsError, match="--kv-dtype int8 needs --device cpu; the device is cuda"
    ):
        on_gpu(kv_dtype="int8")
    with pytest.raises(SettingsError, match="--kv-dtype fp8 needs --attention-backend triton"):
        on_gpu(kv_dtype="fp8", attention_backend="torch")


def test_a_table_of_slots_with_places_beyond_int32_is_refused() -> None:
    with pytest.raises(
        SettingsError, match="--max-running-requests 300,000 with --context-length 8,192"
    ):
        on_gpu(max_running_requests=300_000)


def test_settings_of_gpus_are_refused_on_a_cpu() -> None:
    assert "--attention-backend triton needs --device cuda" in refusal(attention_backend="triton")
    assert "--cuda-graph-sizes needs --device cuda" in refusal(cuda_graph_sizes="1,2")


def test_a_switch_that_the_machine_decides_can_be_turned_both_ways() -> None:
    command = Command("weft serve", "", EngineConfig, positional="model")

    def read(*argv: str) -> bool | None:
        return command.read(argv, {}).make(EngineConfig).overlap

    assert [read(), read("--overlap"), read("--no-overlap"), read("--overlap", "off")] == [
        None,
        True,
        False,
        False,
    ]
    assert "[None]" not in command.help("all")
