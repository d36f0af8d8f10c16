"""MiniMax Text-01 and M1 as their publisher has them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.executor.driver import Turn, make_driver
from tests.models.many import MINIMAX, SHAPE, Checkpoint, make_checkpoint
from weft.config.decoder import LightningSpec
from weft.config.model import ModelConfig, UnsupportedModel

KEYS = {
    "full_attn_alpha_factor": "layernorm_full_attention_alpha",
    "full_attn_beta_factor": "layernorm_full_attention_beta",
    "linear_attn_alpha_factor": "layernorm_linear_attention_alpha",
    "linear_attn_beta_factor": "layernorm_linear_attention_beta",
    "mlp_alpha_factor": "layernorm_mlp_alpha",
    "mlp_beta_factor": "layernorm_mlp_beta",
}


def released(config: dict[str, Any]) -> dict[str, Any]:
    """The same model under the keys of its publisher."""
    found = {KEYS.get(key, key): value for key, value in config.items() if key != "layer_types"}
    kinds = [int(kind == "full_attention") for kind in config["layer_types"]]
    found |= {"attn_type_list": kinds, "postnorm": True, "shared_intermediate_size": 0}
    return {**found, "architectures": ["MiniMaxText01ForCausalLM"]}


def spec(**changes: Any) -> ModelConfig:
    config = {**released({**SHAPE, **MINIMAX, "rms_norm_eps": 1e-5}), **changes}
    return ModelConfig.from_hf(config, "model")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint("minimax", tmp_path_factory.mktemp("minimax"))


def test_the_keys_of_the_publisher_say_the_same_model(checkpoint: Checkpoint) -> None:
    expected = ModelConfig.from_folder(checkpoint.folder)
    path: Path = checkpoint.folder / "config.json"
    theirs = ModelConfig.from_hf(released(json.loads(path.read_text())), "model")
    assert theirs.decoder == expected.decoder


def test_common_factors_of_a_residual_stream_are_left_to_the_eps_of_norms() -> None:
    layers = spec().decoder.layers
    first, second = layers[:2]
    assert (first.mix_eps, first.residual_scale, first.feed_eps) == (0, 0.5, 1e-5 / 4)
    assert second.mix_eps == spec().decoder.last_eps == pytest.approx(1e-5 / 3.5**2)
    assert (second.residual_scale, second.feed_scale) == (0.8 / 1.5, 1.2 / 3.5)


def test_the_last_layers_and_heads_forget_slowest() -> None:
    states = [layer.state for layer in spec().decoder.layers if layer.state is not None]
    assert all(isinstance(state, LightningSpec) for state in states)
    decays = [state.decays for state in states if isinstance(state, LightningSpec)]
    assert decays[0] == pytest.approx([0.778797, 0.939412, 0.984496, 0.996101], abs=1e-4)
    assert decays[0] == sorted(decays[0])
    assert decays[0] < decays[1] < decays[2]
    assert decays[2][0] > 0.9999


def test_a_part_of_a_head_rotates_if_the_file_says_so() -> None:
    rotation = {"rope_parameters": None, "rope_theta": 100.0}
    rope = spec(**rotation, rotary_dim=16).decoder.layers[1].attention.rope
    assert rope is not None
    assert rope.share == 0.5
    rope = spec(**rotation).decoder.layers[1].attention.rope
    assert rope is not None
    assert rope.share == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"postnorm": False}, "postnorm is false; only true is supported"),
        ({"shared_intermediate_size": 64}, "shared_intermediate_size is 64; only 0"),
        ({"attn_type_list": [0, 1, 2, 0]}, "attn_type_list has 2; 0 and 1 are supported"),
        ({"head_dim": 24}, "head_dim is 24; multiples of 16 are supported"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        spec(**changes)


def test_a_long_prompt_gives_what_it_gives_in_blocks(checkpoint: Checkpoint) -> None:
    """transformers computes it in blocks of eight tokens, weft token by token."""
    tokens = [(7 * index) % 500 for index in range(120)]
    driver = make_driver(ModelConfig.from_folder(checkpoint.folder), checkpoint.folder)
    found = driver.run(Turn(0, tokens))[0]
    driver.runner.close()
    expected = checkpoint.logits(tokens)[-1].log_softmax(-1)
    assert float((found - expected).abs().max()) < 2e-4
