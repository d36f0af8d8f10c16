"""Whether the weights in a folder are of the model that runs, by its config.json."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from weft.config.decoder import first_difference
from weft.config.model import BadCheckpoint, ModelConfig, quantization_of
from weft.config.quantized import Quantization
from weft.models.transformers_backend.describe import described

MAY_DIFFER = (  # fields of the config that new weights may change
    *("name", "dtype", "kv_dtype", "quantize", "keeps_codes"),
    *("stored", "num_coded", "num_wide", "coded_bytes"),
    *("max_position", "context_length", "bos_token_id", "eos_token_ids", "pooling"),
)


def quantization_in(folder: Path, model: ModelConfig) -> Quantization:
    """The quantisation of the weights in a folder, by its config.json; without one, that of the
    model's weights."""
    if (folder / "config.json").exists():
        return quantization_of(folder)
    return model.stored


def require_same_model(folder: Path, model: ModelConfig) -> None:
    """Raise ModelError if the folder has the config.json of another model."""
    if not (folder / "config.json").exists():
        return
    config = _config_of(folder, model)
    names = [one.name for one in fields(config) if one.name not in MAY_DIFFER]
    other = [name for name in names if getattr(config, name) != getattr(model, name)]
    if other:
        theirs = getattr(config, other[0])
        ours = getattr(model, other[0])
        name = other[0]
        if name == "decoder":
            name, theirs, ours = first_difference(theirs, ours)
        raise BadCheckpoint(
            f"the config.json in {folder} is of another model: {name} is {theirs}, not {ours}"
        )


def _config_of(folder: Path, model: ModelConfig) -> ModelConfig:
    """The config of the model in a folder, read by the same code as the config of the served
    model. Raises ModelError."""
    if model.library_config:
        return described(folder, folder.name)
    config = ModelConfig.from_folder(folder)
    if model.vision is None:
        config = replace(config, vision=None)
    return config
