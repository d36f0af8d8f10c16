"""Voxtral, Mistral's model that hears: Llama, and Whisper's encoder, four of whose vectors are a
token."""

from __future__ import annotations

from weft.config.families import meta
from weft.config.families.family import Family
from weft.config.vision.stacked import voxtral

# Those of transformers: the files omit usual values.
_DEFAULTS = {
    "vocab_size": 131_072,
    "hidden_size": 3_072,
    "intermediate_size": 8_192,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000_000.0,
}
ARCHITECTURES = {
    "VoxtralForConditionalGeneration": Family(
        read=meta.FAMILIES["Llama"].read, defaults=_DEFAULTS, tower=voxtral
    )
}
