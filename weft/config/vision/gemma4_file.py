"""The encoders of Gemma 4 in a GGUF file (`mmproj.py`): of pictures, and in small models of
sounds."""

from __future__ import annotations

from collections.abc import Mapping

from weft.config.vision.clip import HEARS, ClipKeys, LayerGroup, Projector
from weft.config.vision.gemma4 import GELU, LIMITS, TOWER
from weft.config.vision.gemma4_sound import FIRST
from weft.config.vision.gemma4_sound import TOWER as SOUNDS
from weft.json_types import JsonMapping, JsonObject

_PRODUCTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


_SOUND_PRODUCTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.post",
    "ffn_up": "feed_forward1.ffw_layer_1",
    "ffn_down": "feed_forward1.ffw_layer_2",
    "ffn_up_1": "feed_forward2.ffw_layer_1",
    "ffn_down_1": "feed_forward2.ffw_layer_2",
    "conv_pw1": "lconv1d.linear_start",
    "conv_pw2": "lconv1d.linear_end",
}


def _products(names: Mapping[str, str]) -> dict[str, str]:
    """Products have limits beside their matrix."""
    matrices = {f"{name}.weight": f"{ours}.linear.weight" for name, ours in names.items()}
    return {**names, **matrices}


def _config(keys: ClipKeys, found: JsonMapping) -> JsonObject:
    num_heads = keys.size("attention.head_count")
    _, num_places, _ = keys.shape("v.position_embd.weight", 3)
    num_queries, _ = keys.shape("v.blk.0.attn_q.weight", 2)
    vision = {
        "hidden_size": keys.size("embedding_length"),
        "intermediate_size": keys.size("feed_forward_length"),
        "num_hidden_layers": keys.num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_dim": num_queries // max(num_heads, 1),
        "patch_size": keys.size("patch_size"),
        "pooling_kernel_size": keys.size("projector.scale_factor", 3),
        "position_embedding_size": num_places,
        "hidden_activation": GELU,
        "rms_norm_eps": keys.eps(),
        "use_clipped_linears": "v.blk.0.attn_q.input_max" in keys.shapes,
        "standardize": "v.std_bias" in keys.shapes,
    }
    # In the models without inputs for each layer, tokens of a picture see each other.
    is_large = not found.get("hidden_size_per_layer_input")
    text = {"use_bidirectional_attention": "vision"} if is_large else {}
    config: JsonObject = {"vision_config": vision, "text_config": text}
    if keys.value(HEARS, bool, False):
        config["audio_config"] = _sounds(keys)
    return config


def _sounds(keys: ClipKeys) -> JsonObject:
    """A file does not say how far a vector attends: that is the same in all models."""
    keys.require_sounds("gemma4a")
    hidden_size, _ = keys.shape("a.input_projection.weight", 2)
    last_size, _ = keys.shape("a.pre_encode.out.weight", 2)
    _, kernel = keys.shape("a.blk.0.conv_dw.weight", 2)
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": keys.num_sound_layers,
        "num_attention_heads": keys.value("clip.audio.attention.head_count", int),
        "subsampling_conv_channels": _channels(keys),
        "conv_kernel_size": kernel,
        "output_proj_dims": last_size,
        "use_clipped_linears": "a.blk.0.attn_q.input_max" in keys.shapes,
        "scales_are_final": True,
    }


def _channels(keys: ClipKeys) -> list[int]:
    shapes = [keys.shape(f"a.conv1d.{index}.weight", 4) for index in range(2)]
    return [shape[0] for shape in shapes]


def _settings(keys: ClipKeys) -> JsonObject:
    settings = {**keys.looks, "do_convert_rgb": True, "do_normalize": False}
    if keys.value(HEARS, bool, False):
        settings["feature_size"] = _channels(keys)[0]
    return settings


PROJECTOR = Projector(
    models={"gemma4": "Gemma4ForConditionalGeneration"},
    config=_config,
    settings=_settings,
    layers=f"{TOWER}.encoder.layers",
    parts={
        **_products(_PRODUCTS),
        "ln1": "input_layernorm",
        "attn_post_norm": "post_attention_layernorm",
        "ln2": "pre_feedforward_layernorm",
        "ffn_post_norm": "post_feedforward_layernorm",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
    },
    outside={
        "v.patch_embd": f"{TOWER}.patch_embedder.input_proj",
        "v.position_embd.weight": f"{TOWER}.patch_embedder.position_embedding_table",
        "v.std_bias": f"{TOWER}.std_bias",
        "v.std_scale": f"{TOWER}.std_scale",
        "mm.input_projection": "embed_vision.embedding_projection",
        "a.conv1d.0": f"{FIRST}.layer0.conv",
        "a.conv1d.0.norm": f"{FIRST}.layer0.norm",
        "a.conv1d.1": f"{FIRST}.layer1.conv",
        "a.conv1d.1.norm": f"{FIRST}.layer1.norm",
        "a.input_projection": f"{FIRST}.input_proj_linear",
        "a.pre_encode.out": f"{SOUNDS}.output_proj",
        "mm.a.input_projection": "embed_audio.embedding_projection",
    },
    patches_by_pixel=True,
    reads=(HEARS,),
    further={
        "a": LayerGroup(
            f"{SOUNDS}.layers",
            {
                **_products(_SOUND_PRODUCTS),
                "ffn_norm": "feed_forward1.pre_layer_norm",
                "ffn_post_norm": "feed_forward1.post_layer_norm",
                "ffn_norm_1": "feed_forward2.pre_layer_norm",
                "ffn_post_norm_1": "feed_forward2.post_layer_norm",
                "attn_pre_norm": "norm_pre_attn",
                "attn_post_norm": "norm_post_attn",
                "attn_k_rel": "self_attn.relative_k_proj",
                "per_dim_scale.weight": "self_attn.per_dim_scale",
                # Files have the names of these two norms the other way round.
                "conv_norm": "lconv1d.pre_layer_norm",
                "norm_conv": "lconv1d.conv_norm",
                "conv_dw": "lconv1d.depthwise_conv1d",
                "ln2": "norm_out",
            },
        )
    },
    convs=("conv_dw.weight",),
    numbers=LIMITS,
)
