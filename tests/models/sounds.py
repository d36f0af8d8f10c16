"""A tiny random Qwen2-Audio, as transformers writes it."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from tests.models.many import Checkpoint, saved
from tests.models.pictures import IMAGE_TOKEN, TEXT
from weft.arrays import FloatArray
from weft.messages.media import MediaItem

AUDIO = {
    "num_mel_bins": 16,
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "max_source_positions": 50,
}


def make_qwen2_audio(folder: Path) -> Checkpoint:
    config = transformers.Qwen2AudioConfig(
        text_config={**TEXT, "model_type": "qwen2", "pad_token_id": 0},
        audio_config=AUDIO,
        audio_token_index=IMAGE_TOKEN,
        attn_implementation="eager",
    )
    return saved(transformers.Qwen2AudioForConditionalGeneration(config), folder)


VOXTRAL_TEXT = {**TEXT, "model_type": "llama", "head_dim": 16, "rms_norm_eps": 1e-5}
VOXTRAL_AUDIO: dict[str, Any] = {
    "num_mel_bins": 16,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_source_positions": 50,
}
VOXTRAL_TOKENS = 25  # of a window


def make_voxtral(folder: Path) -> Checkpoint:
    config = transformers.VoxtralConfig(
        text_config=VOXTRAL_TEXT,
        audio_config=VOXTRAL_AUDIO,
        audio_token_id=IMAGE_TOKEN,
        attn_implementation="eager",
    )
    return saved(transformers.VoxtralForConditionalGeneration(config), folder)


BANDS = VOXTRAL_AUDIO["num_mel_bins"]
NUM_FRAMES = 2 * VOXTRAL_AUDIO["max_source_positions"]


def window(seed: int) -> FloatArray:
    draw = np.random.default_rng(seed)
    return draw.standard_normal((BANDS, NUM_FRAMES)).astype(np.float32)


class VoxtralPrompt:
    """Numbers from 100 on are windows of sounds by their seeds, others so many tokens of text."""

    def __init__(self, seed: int, *parts: int) -> None:
        draw = random.Random(seed)
        self.ids: list[int] = []
        self.windows: list[FloatArray] = []
        media: list[MediaItem] = []
        for part in parts:
            if part < 100:
                self.ids += [draw.randrange(3, IMAGE_TOKEN - 10) for _ in range(part)]
                continue
            values = window(part)
            self.windows.append(values)
            media.append(
                MediaItem(
                    kind="audio",
                    digest=hashlib.sha256(values.tobytes()).digest(),
                    start=len(self.ids),
                    length=VOXTRAL_TOKENS,
                    shape=values.shape,
                    values=values.tobytes(),
                )
            )
            self.ids += [IMAGE_TOKEN] * VOXTRAL_TOKENS
        self.media = tuple(media)
