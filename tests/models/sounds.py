"""A tiny random Qwen2-Audio, as transformers writes it."""

from __future__ import annotations

from pathlib import Path

import transformers

from tests.models.many import Checkpoint, saved
from tests.models.pictures import IMAGE_TOKEN, TEXT

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
