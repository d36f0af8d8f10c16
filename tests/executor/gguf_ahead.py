"""GGUF files of tiny models with a layer that predicts a token ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.executor.gguf_files import write_gguf
from tests.executor.gguf_models import (
    CLASSES,
    CONFIG,
    EXPERT_VARIANTS,
    STATE_VARIANTS,
    hf_weights,
    metadata,
    stored,
)
from weft.config.heads import MTP_NAMES
from weft.config.model import ModelConfig
from weft.models.decoder import Decoder
from weft.models.heads.mtp import Mtp
from weft.models.registry import make_model
from weft.ops.plain import PlainOps
from weft.weights.load import randomize

VARIANTS = {name: EXPERT_VARIANTS[name] for name in ("glm4moe", "deepseek2")}
VARIANTS |= {name: STATE_VARIANTS[name] for name in ("qwen35", "qwen3next")}
CPU = torch.device("cpu")


def layer_of(config: ModelConfig, names: list[str]) -> Mtp:
    """The layer of a model, without weights."""
    ops = PlainOps(torch.float32, CPU)
    own = config.mtp(names)
    assert own is not None
    model = make_model(config, ops)
    assert isinstance(model, Decoder)
    return Mtp(own, ops, model)


def ahead_weights(architecture: str, config: dict[str, Any]) -> dict[str, Tensor]:
    """Random weights of such a layer, with the names of DeepSeek V3."""
    values = {**CONFIG, "architectures": [CLASSES[architecture]], **config}
    model = ModelConfig.from_hf(values, "tiny")
    names = MTP_NAMES[0].of(model.num_layers)
    layer = layer_of(model, [names.mark, *names.norms])
    randomize(layer.weights())
    return {weight.name: weight.get() * 8 for weight in layer.weights()}


def written(folder: Path, architecture: str, ahead: dict[str, Tensor]) -> Path:
    """The file of a model."""
    config, keys = VARIANTS[architecture]
    weights = hf_weights(architecture, **config) | ahead
    num_layers = ModelConfig.from_hf(
        {**CONFIG, "architectures": [CLASSES[architecture]], **config}, "tiny"
    ).num_layers
    values = metadata(
        architecture, **{**keys, "block_count": num_layers + 1, "nextn_predict_layers": 1}
    )
    return write_gguf(folder / "tiny.gguf", values, stored(weights, architecture))
