"""Tiny models of Gemma 3n with pictures and sounds: their prompts, and what transformers computes
of them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers.models.gemma3n import modeling_gemma3n

from tests.models.gemma4_media import assert_likeliest
from tests.models.many import Checkpoint, saved
from tests.models.mobilenet import MODEL_ARGS, OUT_SIDE, VisionTower
from weft.arrays import FloatArray
from weft.messages.media import MediaItem, MediaKind

NUM_TEXT = 320  # tokens with vectors of their own for each layer
NUM_OF_EACH = 12  # tokens for pictures, and for sounds
FIRST_IMAGE = NUM_TEXT
FIRST_AUDIO = NUM_TEXT + NUM_OF_EACH
VOCAB = FIRST_AUDIO + NUM_OF_EACH
IMAGE_TOKEN = FIRST_IMAGE + 1
AUDIO_TOKEN = FIRST_AUDIO + 1
NUM_BANDS = 16
NUM_SOUND_TOKENS = 6
NUM_PICTURE_TOKENS = OUT_SIDE**2
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": NUM_TEXT,
    "hidden_size": 64,
    "hidden_size_per_layer_input": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": [96, 64, 96, 96],
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 10,
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.3],
    "altup_num_inputs": 3,
    "laurel_rank": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
AUDIO: dict[str, Any] = {
    "vocab_size": NUM_OF_EACH,
    "vocab_offset": FIRST_AUDIO,
    "input_feat_size": NUM_BANDS,
    "hidden_size": 48,
    "conf_attention_chunk_size": 5,
    "conf_attention_context_left": 6,
    "conf_num_attention_heads": 3,
    "conf_num_hidden_layers": 2,
    "conf_conv_kernel_size": 3,
    "sscp_conv_channel_size": [8, 6],
}
VISION: dict[str, Any] = {
    "vocab_size": NUM_OF_EACH,
    "vocab_offset": FIRST_IMAGE,
    "model_args": MODEL_ARGS,
}
OUTER: dict[str, Any] = {
    "audio_soft_tokens_per_image": NUM_SOUND_TOKENS,
    "vision_soft_tokens_per_image": NUM_PICTURE_TOKENS,
    "image_token_id": IMAGE_TOKEN,
    "eoi_token_id": FIRST_IMAGE,
    "boi_token_id": 290,
    "audio_token_id": AUDIO_TOKEN,
    "eoa_token_id": FIRST_AUDIO,
    "boa_token_id": 291,
}


class WithoutTimm(modeling_gemma3n.AutoModel):
    """Makes the encoder of pictures without timm."""

    @classmethod
    def from_config(cls, config: Any, **others: Any) -> Any:
        if config.model_type == "gemma3n_vision":
            return VisionTower(config)
        return super().from_config(config, **others)


def without_timm(config: Any) -> Any:
    """The model of a config."""
    known = modeling_gemma3n.AutoModel
    modeling_gemma3n.AutoModel = WithoutTimm
    try:
        return transformers.Gemma3nForConditionalGeneration(config)
    finally:
        modeling_gemma3n.AutoModel = known


def make_gemma3n(
    folder: Path,
    audio: Mapping[str, Any] = MappingProxyType({}),
    text: Mapping[str, Any] = MappingProxyType({}),
    **outer: Any,
) -> Checkpoint:
    """What its `audio_config`, its `text_config` and its config have besides."""
    config = transformers.Gemma3nConfig(
        text_config={**TEXT, **text},
        vision_config=VISION,
        audio_config={**AUDIO, **audio},
        attn_implementation="eager",
        **{**OUTER, **outer},
    )
    model = without_timm(config)
    saved(model, folder)
    # The encoder of pictures has other weights, of which its norms and bends are seen.
    draw = torch.Generator().manual_seed(5)
    for tensor in model.model.vision_tower.parameters():
        if tensor.dim() > 1:
            tensor.data.copy_(torch.randn(tensor.shape, generator=draw) * tensor[0].numel() ** -0.5)
        else:
            tensor.data.copy_(0.5 + torch.rand(tensor.shape, generator=draw))
    model.save_pretrained(folder)
    return Checkpoint(folder, model)


def pixels(side: int, seed: int = 0) -> FloatArray:
    return np.random.default_rng((seed, side)).random((3, side, side)).astype(np.float32)


def frames(num: int, seed: int = 0) -> FloatArray:
    """[num, bands]"""
    draw = np.random.default_rng((seed, num))
    return draw.standard_normal((num, NUM_BANDS)).astype(np.float32)


def heard_inputs_of(sound: FloatArray) -> dict[str, Tensor]:
    return {
        "input_features": torch.from_numpy(sound)[None],
        "input_features_mask": torch.ones(1, len(sound), dtype=torch.bool),
    }


class Seen(NamedTuple):
    seed: int
    side: int


class Heard(NamedTuple):
    seed: int
    num_frames: int


# The token of vectors, and the token that ends them.
ENDS: dict[str, tuple[int, int]] = {
    "image": (IMAGE_TOKEN, FIRST_IMAGE),
    "audio": (AUDIO_TOKEN, FIRST_AUDIO),
}


class Prompt:
    """Numbers are so many tokens of text."""

    def __init__(
        self, seed: int, *parts: int | Seen | Heard, num_sound_tokens: int = NUM_SOUND_TOKENS
    ) -> None:
        draw = random.Random(seed)
        self._num_sound_tokens = num_sound_tokens
        self.ids: list[int] = []
        self.their_ids: list[int] = []  # transformers', with the tokens that end media
        self.inputs: dict[str, Tensor] = {}  # transformers'
        media: list[MediaItem] = []
        for part in parts:
            if isinstance(part, int):
                text = [draw.randrange(3, 280) for _ in range(part)]
                self.ids += text
                self.their_ids += text
                continue
            item = self._seen(part) if isinstance(part, Seen) else self._heard(part)
            media.append(item)
            token, end = ENDS[item.kind]
            self.ids += [token] * item.length
            self.their_ids += [token] * (item.length - 1) + [end]
        self.media = tuple(media)

    def _seen(self, part: Seen) -> MediaItem:
        values = pixels(part.side, part.seed)
        self._add("pixel_values", torch.from_numpy(values)[None])
        return self._item("image", values, NUM_PICTURE_TOKENS + 1)

    def _heard(self, part: Heard) -> MediaItem:
        values = frames(part.num_frames, part.seed)
        for name, tensor in heard_inputs_of(values).items():
            self._add(name, tensor)
        return self._item("audio", values, self._num_sound_tokens + 1)

    def _add(self, name: str, tensor: Tensor) -> None:
        known = self.inputs.get(name)
        self.inputs[name] = tensor if known is None else torch.cat((known, tensor))

    def _item(self, kind: MediaKind, values: FloatArray, length: int) -> MediaItem:
        return MediaItem(
            kind=kind,
            digest=hashlib.sha256(values.tobytes()).digest(),
            start=len(self.ids),
            length=length,
            grid=None,
            shape=values.shape,
            values=values.tobytes(),
        )


def assert_told(
    checkpoint: Checkpoint, prompt: Prompt, output: tuple[list[int], list[float]]
) -> None:
    """The tokens are the likeliest ones of transformers, with its log probabilities."""
    tokens, _ = output
    ids = torch.tensor([prompt.their_ids + tokens])
    with torch.inference_mode():
        found = checkpoint.model(input_ids=ids, **prompt.inputs)
    assert_likeliest(found.logits[0, len(prompt.ids) - 1 : -1], output)
