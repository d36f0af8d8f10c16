"""Whisper: a decoder whose layers also attend to the vectors of an encoder of sounds. All names of
sizes in its `config.json` are its own."""

from __future__ import annotations

from weft.config.config_json import require, size
from weft.config.decoder import (
    AttentionSpec,
    CrossSpec,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    NormKind,
    TensorNames,
)
from weft.config.families.family import Config, Family
from weft.config.vision import sound

_NAMES = TensorNames(
    out="out_proj",
    mlp="",
    gate_up=("fc1",),
    down="fc2",
    attention_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    norm="model.decoder.layer_norm",
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    layers="model.decoder.layers",
)


def _whisper(config: Config) -> DecoderSpec:
    require(config, "activation_function", "gelu")
    layer = LayerSpec(
        attention=AttentionSpec(rope=None, qkv_bias=True, key_bias=False, out_bias=True),
        mlp=MlpSpec(activation="gelu", is_gated=False, bias=True),
    )
    return DecoderSpec(
        layers=(layer,),
        norm=NormKind.LAYER_BIAS,
        names=_NAMES,
        cross=CrossSpec(num_positions=size(config, "max_source_positions", 1_500)),
        num_positions=size(config, "max_target_positions", 448),
    )


ARCHITECTURES = {
    "WhisperForConditionalGeneration": Family(
        read=_whisper,
        # The defaults of transformers, and an epsilon that no file has.
        defaults={
            "vocab_size": 51_865,
            "hidden_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "intermediate_size": 1_536,
            "max_position_embeddings": 448,
            "layer_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
        aliases={
            "hidden_size": "d_model",
            "num_hidden_layers": "decoder_layers",
            "num_attention_heads": "decoder_attention_heads",
            "intermediate_size": "decoder_ffn_dim",
            "max_position_embeddings": "max_target_positions",
        },
        norm_eps_key="layer_norm_eps",
        tower=sound.whisper,
    )
}
