"""Families that have the decoder of another family, and an encoder of pictures or sounds: LLaVA,
Idefics 3, SmolVLM, Qwen2-Audio."""

from __future__ import annotations

from weft.config.config_json import get, section
from weft.config.decoder import DecoderSpec
from weft.config.families import meta, mistral, qwen
from weft.config.families.family import Config, Family
from weft.config.model_errors import UnsupportedModel
from weft.config.vision import pictures, sound

# Model type of the text → its reader.
_TEXTS = {
    "llama": meta.FAMILIES["Llama"],
    "mistral": mistral.FAMILIES["Mistral"],
    "qwen2": qwen.FAMILIES["Qwen2"],
}
# Llama's defaults in transformers: the files of LLaVA omit usual values.
_DEFAULTS = {
    "vocab_size": 32_000,
    "hidden_size": 4_096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2_048,
    "rms_norm_eps": 1e-6,
}
# Qwen 2's defaults in transformers: the files of Qwen2-Audio omit usual values.
_QWEN2_DEFAULTS = {
    "vocab_size": 151_936,
    "hidden_size": 4_096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
}


def _text(config: Config) -> DecoderSpec:
    kind = get(section(config, "text_config"), "model_type", str, "llama")
    if kind not in _TEXTS:
        raise UnsupportedModel(
            f"the text model {kind[:64]!r} is not supported beside pictures; supported are "
            f"{', '.join(_TEXTS)}"
        )
    read = _TEXTS[kind].read
    assert read is not None
    return read(config)


_IDEFICS3 = Family(read=_text, defaults=_DEFAULTS, tower=pictures.idefics3)
ARCHITECTURES = {
    "LlavaForConditionalGeneration": Family(
        read=_text, defaults=_DEFAULTS, tower=pictures.llava, ties_by_text=True
    ),
    "Idefics3ForConditionalGeneration": _IDEFICS3,
    "SmolVLMForConditionalGeneration": _IDEFICS3,
    "Qwen2AudioForConditionalGeneration": Family(
        read=qwen.FAMILIES["Qwen2"].read, defaults=_QWEN2_DEFAULTS, tower=sound.qwen2_audio
    ),
}
