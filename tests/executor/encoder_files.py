"""Writes tiny models with an encoder of pictures as two GGUF files: the decoder, and the encoder as
llama.cpp's converter names its tensors and keys."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from tests.executor.gguf_files import Stored, paired, plain, write_gguf
from tests.executor.gguf_models import metadata, stored
from tests.models.many import Checkpoint
from weft.config.model import ModelConfig
from weft.executor.plain.tower import TorchTowerBackend
from weft.models.registry import make_model
from weft.models.vision.tower import Tower
from weft.models.vision.towers import make_tower
from weft.ops.plain import PlainOps
from weft.weights.load import load_weights, unread_of

CPU = torch.device("cpu")
MEAN = np.array([0.48145466, 0.4578275, 0.40821073], dtype=np.float32)
DEVIATION = np.array([0.26862954, 0.26130258, 0.27577711], dtype=np.float32)
HALVES = np.array([0.5, 0.5, 0.5], dtype=np.float32)
# What a name has in a checkpoint → in a file, one after the other.
NAMES = (
    ("multi_modal_projector.mm_input_projection_weight", "mm.input_projection.weight"),
    ("multi_modal_projector.mm_soft_emb_norm", "mm.soft_emb_norm"),
    ("multi_modal_projector.patch_merger.merging_layer", "mm.patch_merger"),
    ("multi_modal_projector.norm", "mm.input_norm"),
    ("connector.modality_projection.proj", "mm.model.fc"),
    ("visual.merger.ln_q", "v.post_ln"),
    ("visual.merger.norm", "v.post_ln"),
    ("visual.merger.mlp.", "mm."),
    ("visual.merger.linear_fc1", "mm.0"),
    ("visual.merger.linear_fc2", "mm.2"),
    ("visual.patch_embed.proj", "v.patch_embd"),
    ("visual.pos_embed", "v.position_embd"),
    ("visual.blocks.", "v.blk."),
    ("vision_tower.", "v."),
    ("vision_model.", "v."),
    ("embeddings.patch_embedding", "patch_embd"),
    ("patch_conv", "patch_embd"),
    ("embeddings.position_embedding", "position_embd"),
    ("embeddings.class_embedding", "class_embd"),
    ("pre_layrnorm", "pre_ln"),
    ("ln_pre", "pre_ln"),
    ("post_layernorm", "post_ln"),
    ("encoder.layers.", "blk."),
    ("transformer.layers.", "blk."),
    ("layer_norm", "ln"),
    ("attention_norm", "ln1"),
    ("ffn_norm", "ln2"),
    (".norm", ".ln"),
    ("feed_forward.", ""),
    (".attention.", "."),
    ("self_attn.", ""),
    ("q_proj", "attn_q"),
    ("k_proj", "attn_k"),
    ("v_proj", "attn_v"),
    ("out_proj", "attn_out"),
    ("o_proj", "attn_out"),
    ("attn.qkv", "attn_qkv"),
    ("attn.proj", "attn_out"),
    ("mlp.", ""),
    ("linear_fc1", "ffn_up"),
    ("linear_fc2", "ffn_down"),
    ("fc1", "ffn_up"),
    ("fc2", "ffn_down"),
    ("gate_proj", "ffn_gate"),
    ("up_proj", "ffn_up"),
    ("down_proj", "ffn_down"),
    ("mm.model.adapter.", "mm.model.mlp."),
)


class Seeing(NamedTuple):
    """A kind of model with an encoder."""

    make: Callable[[Path], Checkpoint]
    text: str  # architecture of the decoder's file
    text_keys: dict[str, Any]
    projector: str
    keys: dict[str, Any]  # below clip.vision.
    flags: dict[str, Any]  # below clip.
    settings: dict[str, Any]  # of the checkpoint's preprocessor_config.json
    projector_names: tuple[tuple[str, str], ...] = ()
    swaps: bool = False  # older converters' names of the feed-forward part
    sound_names: tuple[tuple[str, str], ...] = ()
    other_keys: Mapping[str, Any] = MappingProxyType({})
    text_tensors: tuple[tuple[str, Tensor], ...] = ()  # what the decoder's file has besides


class Halves(NamedTuple):
    """A model, as a decoder and its encoder."""

    config: ModelConfig
    decoder: dict[str, Tensor]
    tower: Tower

    @property
    def encoder(self) -> dict[str, Tensor]:
        return {weight.name: weight.get() for weight in self.tower.weights()}


def halves_of(folder: Path) -> Halves:
    config = ModelConfig.from_folder(folder)
    assert config.vision is not None
    tower = make_tower(config.vision, TorchTowerBackend(torch.float32, CPU))
    decoder = make_model(config, PlainOps(torch.float32, CPU))
    load_weights(chain(decoder.weights(), tower.weights()), folder, unread_of(config))
    weights = {one.name: one.get() for one in decoder.weights()}
    return Halves(config, _with_gates_and_ups(weights), tower)


def _with_gates_and_ups(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """With two tensors in place of one with the gates of an expert before its ups."""
    found = {}
    for name, tensor in weights.items():
        base, _, part = name.rpartition(".")
        if part == "gate_up_proj":
            gate, up = tensor.chunk(2)
            found[f"{base}.gate_proj.weight"] = gate
            found[f"{base}.up_proj.weight"] = up
        else:
            found[f"{name}.weight" if part == "down_proj" else name] = tensor
    return found


def write_both(seeing: Seeing, checkpoint: Checkpoint, folder: Path) -> tuple[Path, Path]:
    """The files of the decoder and of the encoder."""
    folder.mkdir()
    settings = {"image_mean": [float(one) for one in seeing.keys["image_mean"]]}
    settings["image_std"] = [float(one) for one in seeing.keys["image_std"]]
    text = json.dumps({**settings, **seeing.settings})
    (checkpoint.folder / "preprocessor_config.json").write_text(text)
    halves = halves_of(checkpoint.folder)
    values = metadata(seeing.text, **{"context_length": 512, **seeing.text_keys})
    tensors = stored(halves.decoder, seeing.text)
    tensors |= {name: plain(tensor) for name, tensor in seeing.text_tensors}
    decoder = write_gguf(folder / "tiny-Q4_K_M.gguf", values, tensors)
    said: dict[str, Any] = {
        "general.architecture": "clip",
        "general.type": "mmproj",
        "clip.has_vision_encoder": True,
        "clip.projector_type": seeing.projector,
        "clip.vision.projection_dim": 64,
    }
    said |= {f"clip.vision.{key.replace('__', '.')}": value for key, value in seeing.keys.items()}
    said |= seeing.other_keys
    said |= {f"clip.{key}": value for key, value in seeing.flags.items()}
    encoder = write_gguf(folder / "mmproj-tiny-F16.gguf", said, tensors_of(seeing, halves))
    return decoder, encoder


def tensors_of(seeing: Seeing, halves: Halves) -> dict[str, Stored]:
    found: dict[str, Tensor] = {}
    num_heads = seeing.keys["attention__head_count"]
    for name, tensor in halves.encoder.items():
        theirs = name
        if "deepstack_merger_list." in name:
            _, _, index, part = name.split(".", 3)
            part = part.replace("linear_", "")
            layers = np.flatnonzero(seeing.keys["is_deepstack_layers"])
            found[f"v.deepstack.{layers[int(index)]}.{part}"] = tensor
            continue
        names = seeing.sound_names
        if not name.startswith(("audio_tower.", "embed_audio.")):
            names = (*seeing.projector_names, *NAMES)
        for ours, other in names:
            theirs = theirs.replace(ours, other)
        if seeing.swaps and ".ffn_" in theirs:
            there = {"up": "down", "down": "up"}
            kind = theirs.split(".ffn_")[1].split(".")[0]
            theirs = theirs.replace(f".ffn_{kind}", f".ffn_{there[kind]}")
        if "soft_emb_norm" in theirs:
            tensor = tensor + 1
        if seeing.projector == "pixtral" and (".attn_q." in theirs or ".attn_k." in theirs):
            tensor = paired(tensor, num_heads)
        if seeing.projector == "gemma4v":
            theirs = theirs.replace(".linear.", ".")
            tensor = _of_gemma4(theirs, tensor)
        if theirs == "v.patch_embd.weight" and tensor.dim() == 5:
            for frame in range(tensor.shape[2]):
                ending = f".{frame}" if frame else ""
                found[theirs + ending] = tensor[:, :, frame]
            continue
        if ".attn_qkv." in theirs and seeing.projector.startswith("qwen2"):
            for letter, third in zip("qkv", tensor.chunk(3), strict=True):
                found[theirs.replace("attn_qkv", f"attn_{letter}")] = third
            continue
        found[theirs] = tensor
    return {name: plain(tensor.contiguous()) for name, tensor in found.items()}


def _of_gemma4(name: str, tensor: Tensor) -> Tensor:
    if name == "v.patch_embd.weight":
        return tensor.view(-1, 4, 4, 3).permute(0, 3, 1, 2)
    if name.endswith("per_dim_scale.weight"):
        return softplus(tensor)
    if name.endswith("conv_dw.weight"):
        return tensor[:, 0]
    return tensor[None] if tensor.dim() == 0 else tensor
