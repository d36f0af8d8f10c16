"""Families that have the decoder of another family, and an encoder of sounds: Qwen2-Audio."""

from __future__ import annotations

from weft.config.families import qwen
from weft.config.families.family import Family
from weft.config.vision import sound

# Qwen 2's defaults in transformers: the files of Qwen2-Audio omit usual values.
_DEFAULTS = {
    "vocab_size": 151_936,
    "hidden_size": 4_096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
}

ARCHITECTURES = {
    "Qwen2AudioForConditionalGeneration": Family(
        read=qwen.FAMILIES["Qwen2"].read, defaults=_DEFAULTS, tower=sound.qwen2_audio
    ),
}
