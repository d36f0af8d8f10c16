from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.executor.driver import MODEL
from weft.config.model import FAMILIES, UnsupportedModel
from weft.models.registry import MODELS, make_model


def test_every_readable_config_has_a_model():
    assert set(MODELS) == set(FAMILIES)


def test_unknown_architecture_is_refused_with_the_list():
    with pytest.raises(UnsupportedModel, match="'Bert' is not supported; supported are LlamaForCausalLM"):
        make_model(replace(MODEL, architecture="Bert"), device=torch.device("cpu"))


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted_right(tied):
    """The memory is shared out by these numbers before anything is loaded."""
    config = replace(MODEL, tie_embeddings=tied, dtype="bfloat16")
    weights = list(make_model(config, device=torch.device("meta")).weights())
    matrices = sum(target.numel() for _, target in weights if target.ndim == 2)
    assert matrices == config.num_parameters
    assert config.weights_bytes == 2 * matrices
    assert ("lm_head.weight" in [name for name, _ in weights]) is not tied
