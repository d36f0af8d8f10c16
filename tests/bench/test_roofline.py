"""The roofline of a machine: what a step must do is counted, and set against what the machine can
do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.launch.tiny_model import write_model_with_experts
from weft.bench.roofline import (
    PRODUCT,
    LeastWork,
    Point,
    Roofs,
    cache_bytes,
    measure_roofs,
    point,
    read_sizes,
    report,
)
from weft.cli.main import main
from weft.config.model import ModelConfig
from weft.config.options import SettingsError
from weft.sim.fit import StepTime

HEAD = 100 * 16  # vocabulary * hidden size
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}


def model() -> ModelConfig:
    return ModelConfig.from_hf(CONFIG, "tiny")


def test_the_work_of_a_step_is_what_it_computes_and_reads_at_least() -> None:
    config = model()
    in_layers = config.num_parameters - HEAD
    decode = LeastWork.of(StepTime(num_tokens=4, context=40, num_samples=4, seconds=1.0), config)
    assert decode.num_bytes == config.weights_bytes + 40 * config.kv_bytes_per_token
    pairs = 4 * 40 * 16 * 2  # K and V, two operations each: of all heads and layers
    assert decode.num_ops == 2 * 4 * (in_layers + HEAD) + pairs
    prompt = LeastWork.of(StepTime(num_tokens=8, context=8, num_samples=1, seconds=1.0), config)
    pairs = 4 * (8 * 9 // 2) * 16 * 2
    assert prompt.num_ops == 2 * 8 * in_layers + 2 * HEAD + pairs


def test_codes_are_read_with_the_bytes_of_their_file() -> None:
    config = model()
    coded = replace(
        config, keeps_codes=True, num_coded=config.num_parameters - HEAD, coded_bytes=1_000
    )
    step = StepTime(num_tokens=1, context=1, num_samples=1, seconds=1.0)
    work = LeastWork.of(step, coded)
    assert work.num_bytes == pytest.approx(1_000 + 2 * HEAD + config.kv_bytes_per_token)
    assert work.num_ops == LeastWork.of(step, config).num_ops


def test_a_model_with_experts_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model_with_experts(tmp_path / "experts")
    assert main(["bench", "roofline", str(folder)]) != 0
    assert "experts is no dense decoder" in capsys.readouterr().err


def test_only_the_faster_kind_of_numbers_has_the_large_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def product_s(dtype: torch.dtype, rows: int) -> float:
        asked.append((dtype, rows))
        return 0.5 if dtype == torch.float32 else 60.0

    monkeypatch.setattr("weft.bench.roofline.READ_BYTES", 1_000_000)
    monkeypatch.setattr("weft.bench.roofline._product_s", product_s)
    rows, inner, columns = PRODUCT
    assert measure_roofs(1).ops_per_s == 4.0 * rows * inner * columns
    assert [one for one in asked if one[1] == rows] == [(torch.float32, rows)]


def test_a_step_is_bound_by_the_roof_that_it_is_nearer_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weft.bench.roofline.cache_bytes", lambda: 0)
    step = StepTime(num_tokens=1, context=1, num_samples=1, seconds=0.5)
    work = LeastWork.of(step, model())
    roofs = Roofs(bytes_per_s=4 * work.num_bytes, ops_per_s=20 * work.num_ops)
    one = point("decode", 1, step, model(), roofs)
    assert one.of_bytes == 0.5
    assert one.of_ops == 0.1
    assert one.bound_by == "bandwidth"
    assert one._replace(of_ops=0.6).bound_by == "compute"
    assert roofs.best(Roofs(1.0, 1e30)) == Roofs(4 * work.num_bytes, 1e30)


def test_the_nearer_roof_is_drawn() -> None:
    half = Point("decode", 1, 0.02, of_bytes=0.5, of_ops=0.1)
    full = Point("prefill", 64, 0.32, of_bytes=0.2, of_ops=1.3)
    lines = report([half, full]).splitlines()
    assert lines[2].endswith("bandwidth  " + "#" * 15)
    assert lines[3].split()[:7] == ["prefill", "64", "320.0", "5.00", "20%", "130%", "compute"]
    assert lines[3].endswith(" " + "#" * 30)


def test_what_fits_the_cache_is_named_and_has_no_part_of_the_bandwidth() -> None:
    cached = Point("decode", 1, 0.02, of_bytes=2.5, of_ops=0.5, is_cached=True)
    line = report([cached]).splitlines()[2]
    assert "%" not in line.replace("50%", "")
    assert "in cache" in line
    assert line.endswith("cache or compute  " + "#" * 15)
    assert cache_bytes() >= 0


def test_sizes_that_are_no_numbers_are_refused() -> None:
    assert read_sizes("1,16", "--batches") == [1, 16]
    for wrong in ("", "0", "a", "1,,2"):
        with pytest.raises(SettingsError, match="--batches is"):
            read_sizes(wrong, "--batches")


def test_the_command_measures_both_kinds_in_one_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.bench.roofline.READ_BYTES", 1_000_000)
    monkeypatch.setattr("weft.bench.roofline.PRODUCT", (16, 16, 16))
    sizes = ("--batches", "1,3", "--prompts", "16", "--rounds", "1", "--speculative", "off")
    assert main(["bench", "roofline", "weft-nano", *sizes, "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert "GB/s read" in out
    rows = [line.split()[:2] for line in out.splitlines()[4:]]
    assert rows == [["decode", "1"], ["decode", "3"], ["prefill", "16"]]
