"""GGUF files of models with layers that keep a state: weights, codes, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.caches import set_own_cache
from tests.executor.driver import Turn, make_driver
from tests.executor.gguf_files import plain, random_blocks, write_gguf
from tests.executor.gguf_models import (
    GRANITE4_DENSE,
    GRANITE_SHARED,
    STATE_VARIANTS,
    described,
    hf_weights,
    loaded,
    metadata,
    stored,
    tensors_of,
    write_folder,
)
from weft.config.decoder import GatedDeltaSpec, LightningSpec, Mamba1Spec, MambaSpec, ShortConvSpec
from weft.config.model import BadCheckpoint, ModelConfig, UnsupportedModel

TOKENS = list(range(1, 40))


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_own_cache(tmp_path / "cache", monkeypatch)


def written(folder: Path, architecture: str, remove: tuple[str, ...] = (), **changes: Any) -> Path:
    config, keys = STATE_VARIANTS[architecture]
    tensors = stored(hf_weights(architecture, **config), architecture)
    for name in remove:
        del tensors[name]
    values = metadata(architecture, **{**keys, **changes})
    return write_gguf(folder / "tiny.gguf", values, tensors)


def logprobs(folder: Path, kernels: str) -> torch.Tensor:
    driver = make_driver(ModelConfig.from_folder(folder), folder, kernels=kernels)
    found: torch.Tensor = driver.run(Turn(0, TOKENS))[0]
    driver.runner.close()
    return found


@pytest.mark.parametrize("architecture", STATE_VARIANTS)
def test_kinds_of_layers_follow_from_their_tensors(tmp_path: Path, architecture: str) -> None:
    config = ModelConfig.from_folder(described(written(tmp_path, architecture)))
    layers = [config.decoder.layer(layer) for layer in range(config.num_layers)]
    of_others = {"lfm2": ShortConvSpec, "lfm2moe": ShortConvSpec, "granitehybrid": MambaSpec}
    of_others |= dict.fromkeys(("falcon-h1", "mamba2", "nemotron_h", "nemotron_h_moe"), MambaSpec)
    of_others |= {"mamba": Mamba1Spec, "minimax-01": LightningSpec}
    state = of_others.get(architecture, GatedDeltaSpec)
    expected: dict[str, list[object]] = {}
    expected |= {one: [state] * 2 for one in ("falcon-h1", "mamba", "mamba2")}
    expected |= {one: [state, None, state, None] for one in ("nemotron_h", "nemotron_h_moe")}
    found = [layer.state and type(layer.state) for layer in layers]
    assert found == expected.get(architecture, [state, None, state])
    attending = {"falcon-h1": 2, "mamba": 0, "mamba2": 0}
    assert config.num_kv_layers == attending.get(architecture, 1)
    assert config.num_kv_heads == (1 if architecture.startswith("mamba") else 2)


def test_value_heads_stay_in_the_order_of_the_file(tmp_path: Path) -> None:
    config, _ = STATE_VARIANTS["qwen35"]
    weights = hf_weights("qwen35", **config)
    found = loaded(described(written(tmp_path, "qwen35")))
    name = "model.layers.0.linear_attn.in_proj_b.weight"
    assert torch.equal(found[name], weights[name][[0, 2, 1, 3]])
    state = ModelConfig.from_folder(described(written(tmp_path, "qwen35"))).decoder.layer(0).state
    assert isinstance(state, GatedDeltaSpec)
    assert state.is_tiled


def test_decays_are_those_of_the_model(tmp_path: Path) -> None:
    config, _ = STATE_VARIANTS["qwen3next"]
    weights = hf_weights("qwen3next", **config)
    found = loaded(described(written(tmp_path, "qwen3next")))
    name = "model.layers.2.linear_attn.A_log"
    torch.testing.assert_close(found[name], -weights[name].exp())


@pytest.mark.parametrize(
    ("architecture", "variant"),
    [("granitehybrid", GRANITE4_DENSE), ("granitemoe", GRANITE_SHARED)],
)
def test_granite_is_read_without_experts_and_with_a_part_that_all_tokens_share(
    tmp_path: Path, architecture: str, variant: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    config, keys = variant
    weights = hf_weights(architecture, **config)
    tensors = stored(weights, architecture)
    file = write_gguf(tmp_path / "tiny.gguf", metadata(architecture, **keys), tensors)
    folder = write_folder(tmp_path / "same", weights, architecture, **config)
    torch.testing.assert_close(logprobs(described(file), "torch"), logprobs(folder, "torch"))


def test_files_of_the_first_converter_have_one_tensor_of_inputs(tmp_path: Path) -> None:
    config, keys = STATE_VARIANTS["qwen3next"]
    weights = hf_weights("qwen3next", **config)
    tensors = tensors_of(weights, "qwen3next")
    for layer in (0, 2):
        del tensors[f"blk.{layer}.attn_qkv.weight"]
        del tensors[f"blk.{layer}.attn_gate.weight"]
        name = f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight"
        tensors[f"blk.{layer}.ssm_in.weight"] = weights[name]
    values = metadata("qwen3next", **keys)
    old = write_gguf(tmp_path / "old.gguf", values, {n: plain(t) for n, t in tensors.items()})
    new = written(tmp_path, "qwen3next")
    assert torch.equal(logprobs(described(old), "torch"), logprobs(described(new), "torch"))


@pytest.mark.parametrize(
    "architecture", ["lfm2", "qwen35", "qwen3next", "granitehybrid", "nemotron_h_moe"]
)
def test_codes_are_computed_with(tmp_path: Path, architecture: str) -> None:
    """Of several types, as files have them: none is widened, nor put into another order."""
    config, keys = STATE_VARIANTS[architecture]
    tensors = stored(hf_weights(architecture, **config), architecture)
    types = {
        "attn_qkv": "Q4_0",
        "attn_gate": "Q8_0",
        "ssm_alpha": "Q8_0",
        "ssm_beta": "Q8_0",
        "ssm_ba": "Q8_0",
        "ssm_out": "Q5_0",
        "ssm_in": "Q8_0",
        "ffn_gate_shexp": "Q4_0",
        "ffn_up_shexp": "Q4_0",
        "ffn_up_exps": "Q4_0",
        "ffn_down_exps": "Q8_0",
        "shortconv.in_proj": "Q4_0",
        "shortconv.out_proj": "Q8_0",
    }
    for name in tensors:
        part = name.removesuffix(".weight").partition(".")[2].partition(".")[2]
        if part in types:
            tensors[name] = random_blocks(types[part], tensors[name].shape, seed=len(name))
    file = write_gguf(tmp_path / "tiny.gguf", metadata(architecture, **keys), tensors)
    folder = described(file)
    # The kernels round what they multiply with codes.
    torch.testing.assert_close(
        logprobs(folder, "torch"), logprobs(folder, "auto"), atol=0.05, rtol=0
    )


def test_layers_that_guess_ahead_are_left_out(tmp_path: Path) -> None:
    config, keys = STATE_VARIANTS["qwen35"]
    tensors = stored(hf_weights("qwen35", **config), "qwen35")
    tensors["blk.3.nextn.eh_proj.weight"] = plain(torch.ones(64, 128))
    tensors["blk.3.attn_q.weight"] = plain(torch.ones(128, 64))
    values = metadata("qwen35", **{**keys, "block_count": 4, "nextn_predict_layers": 1})
    folder = described(write_gguf(tmp_path / "tiny.gguf", values, tensors))
    assert ModelConfig.from_folder(folder).num_layers == 3
    assert loaded(folder)


REFUSED: dict[str, tuple[str, dict[str, Any], tuple[str, ...], str]] = {
    "more layers than tensors": (
        "lfm2",
        {"block_count": 2**31, "attention__head_count_kv": 2},
        (),
        "block_count is 2,147,483,648, but it has",
    ),
    "no layers": ("mamba2", {"block_count": 0}, (), "mamba2.block_count is 0, but it has"),
    "keys that are not there": ("qwen35", {"ssm__group_count": None}, (), "no qwen35.ssm.group"),
    "heads that do not divide": (
        "qwen35",
        {"ssm__time_step_rank": 3},
        (),
        "inner_size is 128; it must be a multiple of qwen35.ssm.time_step_rank, which is 3",
    ),
    "keys of another size": (
        "qwen35",
        {"ssm__state_size": 32},
        (),
        r"blk.0.attn_qkv.weight is \[192, 64\]; its metadata says \[256, 64\]",
    ),
    "lightning attention of another size": (
        "minimax-01",
        {"attention__key_length": 32, "attention__value_length": 32},
        (),
        r"blk.0.attn_qkv.weight is \[192, 64\]; its metadata says \[384, 64\]",
    ),
    "a convolution of another size": (
        "lfm2",
        {"shortconv__l_cache": 4},
        (),
        r"conv.conv.weight \[64, 1, 3\] instead of \[64, 1, 4\]",
    ),
    "a size that no file of it has": (
        "mamba2",
        {"ssm__inner_size": 144},
        (),
        "inner_size is 144; it must be a multiple of mamba2.embedding_length, which is 64",
    ),
    "a state of another size": (
        "falcon-h1",
        {"ssm__state_size": 16},
        (),
        r"blk.0.ssm_in.weight is \[392, 64\]; its metadata says \[328, 64\]",
    ),
    "steps of another size": (
        "mamba",
        {"ssm__time_step_rank": 2**31 - 1},
        (),
        r"blk.0.ssm_x.weight is \[36, 128\]; its metadata says \[2147483679, 128\]",
    ),
    "a layer without any part": (
        "nemotron_h",
        {},
        ("blk.1.attn_q.weight",),
        "no tensor blk.1.ffn_up.weight",
    ),
    "a tensor that is not there": (
        "qwen35",
        {},
        ("blk.2.ssm_a",),
        "1 missing: model.layers.2.linear_attn.A_log",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_sense_is_refused(tmp_path: Path, name: str) -> None:
    architecture, changes, remove, message = REFUSED[name]
    with pytest.raises((BadCheckpoint, UnsupportedModel), match=message):
        loaded(described(written(tmp_path, architecture, remove, **changes)))
