"""Loads weights into a model, from safetensors or GGUF files or at random, and writes random
weights to a file that other engines can load, too."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import save_file

from weft.config.model import BadCheckpoint, ModelConfig, quantization_of
from weft.models.layers.weight import Weights
from weft.models.registry import make_model
from weft.ops.plain import PlainOps
from weft.weights.base import in_base
from weft.weights.contents import labelled, open_contents
from weft.weights.fetch import weight_files
from weft.weights.gguf.content import GgufContent
from weft.weights.safetensors import Content
from weft.weights.stream import matched, put_all

CPU = torch.device("cpu")


@torch.inference_mode()
def load_weights(
    weights: Weights, folder: Path, unread: tuple[str, ...] = (), beside: Sequence[Path] = ()
) -> None:
    """Load the tensors of a checkpoint into the model. `unread`: prefixes of the names of tensors
    that the model leaves out (`matched`); `beside`: further files with weights.

    Raises `BadCheckpoint`, naming the tensors, if any is missing, unexpected or of another shape;
    then nothing has changed.
    """
    with ExitStack() as stack:
        files = open_contents(stack, labelled([*weight_files(folder), *beside]))
        found = matched(
            {weight.name: weight for weight in weights},
            files,
            _name(folder, files),
            quantization=quantization_of(folder),
            unread=unread,
        )
        for file in files:
            file.will_be_read()
        put_all(found)


def _name(folder: Path, files: Sequence[Content]) -> str:
    """The beginning of the error message for weights that do not fit."""
    if isinstance(files[0], GgufContent):
        return f"the weights in {files[0].label} do not fit its metadata"
    return f"the weights in {folder} do not fit its config.json"


@torch.inference_mode()
def randomize(weights: Weights, device: torch.device = CPU) -> None:
    """Set random weights: norms are 1, all others normal with standard deviation 0.02. `device`
    makes them; the same kind of device makes the same weights each time."""
    for weight in weights:
        if "norm" in weight.name:
            weight.put(torch.ones(weight.shape, device=device))
        else:
            generator = torch.Generator(device).manual_seed(zlib.crc32(weight.name.encode()))
            values = torch.empty(weight.shape, device=device)
            weight.put(values.normal_(0.0, 0.02, generator=generator))


def unread_of(config: ModelConfig) -> tuple[str, ...]:
    """Prefixes of the names, within the base model, of tensors in checkpoints that the model does
    not use: those that its vision encoder or its family leaves out, layers for speculation, and the
    keys and values of layers that read those of another layer."""
    found = [] if config.vision is None else [*config.vision.unread]
    found += _unread_head(config)
    names = config.decoder.names
    ahead = range(config.num_layers, config.num_layers + config.num_ahead)
    found += [f"{in_base(names.layers + '.')}{layer}." for layer in ahead]
    for layer in range(config.num_layers):
        of_layer = f"{in_base(names.layers + '.')}{layer}."
        found += [of_layer + name for name in names.unread]
        if config.kv_owner(layer) == layer:
            continue
        attention = of_layer + names.attention
        found += [f"{attention}.{name}." for name in (*names.qkv[1:], names.k_norm)]
    return tuple(found)


def files_beside(config: ModelConfig, folder: Path) -> list[Path]:
    """The files with weights of a model that are not in its own folder."""
    if config.pooling is None or not config.pooling.projection:
        return []
    path = folder / config.pooling.projection / "model.safetensors"
    if not path.is_file():
        raise BadCheckpoint(f"{config.name} has no {path.relative_to(folder)}")
    return [path]


def _unread_head(config: ModelConfig) -> list[str]:
    """What a masked language model does not use of its head."""
    encoder = config.encoder
    if encoder is None or encoder.vocabulary is None:
        return []
    if not config.architecture.endswith("ForMaskedLM"):
        return []
    head = encoder.vocabulary
    # The matrix, if it is that of the embedding, and the bias may stand twice.
    twice = [f"{head.out}.", *([head.bias] if head.bias else [])]
    if config.pooling is not None and config.pooling.kind == "sparse":
        return twice
    return [f"{head.dense}.", f"{head.norm}.", *twice]


def save_random(config: ModelConfig, path: Path) -> None:
    """Write random weights of the model's shapes and dtype to `path`, as safetensors."""
    ops = PlainOps(getattr(torch, config.dtype), CPU)
    model = make_model(config, ops)
    randomize(model.weights())
    tensors = {weight.name: weight.get() for weight in model.weights()}
    save_file(tensors, path, {"format": "pt"})
