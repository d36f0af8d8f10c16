"""Adapters for weft-nano, made at random, in the files that peft writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import weft
from weft.config.model import ModelConfig
from weft.config.projections import projections

NANO = Path(weft.__file__).parent / "bundled" / "weft-nano"


def make_adapter(
    folder: Path,
    seed: int,
    *,
    rank: int = 4,
    endings: tuple[str, ...] = (),
    model: Path = NANO,
) -> Path:
    """An adapter that changes the projections of the model in a folder with these last parts, or
    all but those of experts, so much that answers differ."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, projection in projections(ModelConfig.from_folder(model)).items():
        if (
            projection.stack is not None
            or ".layers." not in name
            or (endings and name.rpartition(".")[2] not in endings)
        ):
            continue
        a = rng.standard_normal((rank, projection.in_size)) / np.sqrt(projection.in_size)
        b = rng.standard_normal((projection.out_size, rank)) / np.sqrt(rank)
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.astype(np.float32)
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
