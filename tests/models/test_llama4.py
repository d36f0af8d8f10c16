"""The contexts of Llama 4, models without experts, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from weft.config.decoder import MlpSpec
from weft.config.families.llama4 import FAMILY
from weft.config.model_errors import UnsupportedModel

CONFIG: dict[str, Any] = {**FAMILY.defaults, "num_hidden_layers": 4}


def context(**changes: Any) -> int:
    assert FAMILY.implied is not None
    return int(FAMILY.implied({**CONFIG, **changes})["max_position_embeddings"])


def test_a_context_ends_where_chunks_or_growing_queries_would_begin() -> None:
    assert context() == 8_191
    assert context(floor_scale=4_096) == 4_095
    assert context(attn_temperature_tuning=False) == 8_192
    assert context(attention_chunk_size=1_024) == 1_024
    assert context(max_position_embeddings=512) == 512
    seen = {"layer_types": ["full_attention"] * 4, "attn_temperature_tuning": False}
    assert context(**seen) == 131_072


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
