"""Fills a model with weights: from safetensors files, or with random ones."""

from __future__ import annotations

import zlib
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from weft.config.model import BadCheckpoint
from weft.executor.weights.fetch import weight_files
from weft.models.layers.weight import Weights

IGNORED = ("rotary_emb.inv_freq",)  # endings of tensors that old checkpoints hold and nobody needs
TIED_HEAD = "lm_head.weight"


@torch.inference_mode()
def load_weights(weights: Weights, folder: Path) -> None:
    """Copy the tensors of a checkpoint where the model wants them, converted to its dtype.

    Raises `BadCheckpoint`, naming the tensors, if any is missing, unexpected or of another shape.
    """
    wanted = {weight.name: weight.target for weight in weights}
    ignored = (*IGNORED,) if TIED_HEAD in wanted else (*IGNORED, TIED_HEAD)
    unexpected, misshapen = [], []
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (it is not a dict)
                    target = wanted.pop(name, None)
                    if target is None:
                        if not name.endswith(ignored):
                            unexpected.append(name)
                    elif (shape := tuple(file.get_slice(name).get_shape())) != tuple(target.shape):
                        misshapen.append(f"{name} {list(shape)} instead of {list(target.shape)}")
                    else:
                        target.copy_(file.get_tensor(name))
        except (SafetensorError, OSError) as exc:
            raise BadCheckpoint(f"{path} is damaged, or not downloaded to its end: {exc}") from exc
    problems = {"missing": list(wanted), "unexpected": unexpected, "of another shape": misshapen}
    if any(problems.values()):
        found = "; ".join(f"{len(names)} {kind}: {_some(names)}" for kind, names in problems.items() if names)
        raise BadCheckpoint(f"the weights in {folder} do not fit its config.json ({found})")


@torch.inference_mode()
def randomize(weights: Weights) -> None:
    """Weights that are random, but the same each time: norms 1, all else normal with deviation 0.02."""
    for name, target in weights:
        if "norm" in name:
            target.fill_(1.0)
        else:
            target.normal_(0.0, 0.02, generator=torch.Generator(target.device).manual_seed(zlib.crc32(name.encode())))


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
