"""The contexts of models whose indexer chooses the tokens that are attended to."""

from __future__ import annotations

from typing import Any

import pytest

from tests.models.many import INDEXED, LATENT_FAMILIES, SHAPE
from weft.config.model import ModelConfig


@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm5"])
def test_a_context_ends_where_tokens_would_be_left_out(name: str) -> None:
    kind, family = LATENT_FAMILIES[name]
    config: dict[str, Any] = {**SHAPE, **family, "architectures": [f"{kind}ForCausalLM"]}
    config |= {"max_position_embeddings": 4_096, "rms_norm_eps": 1e-6}
    assert ModelConfig.from_hf(config, "model").max_position == INDEXED["index_topk"]
    assert ModelConfig.from_hf({**config, "index_topk": None}, "model").max_position == 2_048
