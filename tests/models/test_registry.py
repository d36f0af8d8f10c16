from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.executor.driver import MODEL
from weft.config.model import FAMILIES, UnsupportedModel
from weft.models.registry import MODELS, make_model
from weft.ops.plain import PlainOps


def test_every_readable_config_has_a_model():
    assert set(MODELS) == set(FAMILIES)


def test_unknown_architecture_is_refused_with_the_list():
    with pytest.raises(
        UnsupportedModel, match=r"'Bert' is not supported; supported are .*LlamaForCausalLM"
    ):
        make_model(
            replace(MODEL, architecture="Bert"), PlainOps(torch.float32, torch.device("cpu"))
        )


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted_right(tied):
    """The memory is shared out by these numbers before anything is loaded."""
    config = replace(MODEL, tie_embeddings=tied, dtype="bfloat16")
    weights = list(make_model(config, PlainOps(torch.bfloat16, torch.device("meta"))).weights())
    matrices = sum(math.prod(weight.shape) for weight in weights if len(weight.shape) == 2)
    assert matrices == config.num_parameters
    assert config.weights_bytes == 2 * matrices
    assert ("lm_head.weight" in [weight.name for weight in weights]) is not tied
