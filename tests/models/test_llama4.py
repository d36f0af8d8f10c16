"""What Llama 4 does with positions, models without experts, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from weft.config.decoder import AttentionSpec, MlpSpec, RopeConfig
from weft.config.families.llama4 import FAMILY
from weft.config.model import ModelConfig
from weft.config.model_errors import UnsupportedModel
from weft.models.layers.rope import Rope

CONFIG: dict[str, Any] = {**FAMILY.defaults, "num_hidden_layers": 4}


def specs(**changes: Any) -> list[AttentionSpec]:
    assert FAMILY.read is not None
    spec = FAMILY.read({**CONFIG, **changes})
    return [spec.layer(index).attention for index in range(4)]


def test_rotated_layers_see_chunks_and_the_queries_of_others_grow() -> None:
    found = specs()
    assert [(one.window, one.chunked) for one in found] == [(8_192, True)] * 3 + [(0, False)]
    assert found[3].rope == RopeConfig(
        scaling="none", query_growth=0.1, growth_offset=1, original_max_position=8_192
    )
    assert specs(attn_temperature_tuning=False)[3].rope is None
    assert {one.window for one in specs(layer_types=["full_attention"] * 4)} == {0}
    assert {one.window for one in specs(attention_chunk_size=None)} == {0}


def test_a_query_grows_with_the_chunk_that_it_ends() -> None:
    config = ModelConfig.from_hf({**CONFIG, "architectures": ["Llama4ForCausalLM"]}, "tiny")
    rope = specs()[3].rope
    assert rope is not None
    found = Rope(rope, config).query_scale(torch.tensor([0, 8_190, 8_191, 16_382, 16_383]))
    assert found is not None
    grown = [1.0, 1.0, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(3)]
    torch.testing.assert_close(found, torch.tensor(grown))


def test_lists_of_layers_that_are_too_short_and_more_experts_per_token_are_refused() -> None:
    assert FAMILY.read is not None
    with pytest.raises(UnsupportedModel, match="no_rope_layers has 2 layers of 4"):
        FAMILY.read({**CONFIG, "no_rope_layers": [1, 0]})
    with pytest.raises(UnsupportedModel, match="num_experts_per_tok is 2; only 1"):
        FAMILY.read({**CONFIG, "num_experts_per_tok": 2})


def test_a_model_without_experts_has_the_same_feed_forward_part_in_all_layers() -> None:
    assert FAMILY.read is not None
    numbers = {"num_local_experts": 0, "num_experts_per_tok": 0, "interleave_moe_layer_step": 0}
    spec = FAMILY.read({**CONFIG, **numbers, "moe_layers": []})
    assert {spec.layer(index).mlp for index in range(4)} == {MlpSpec(size=16_384)}
