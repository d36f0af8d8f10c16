"""The encoder of Gemma 4 in a GGUF file (`mmproj.py`)."""

from __future__ import annotations

from weft.config.model_errors import BadCheckpoint
from weft.config.vision.clip import ClipKeys, Projector
from weft.config.vision.gemma4 import GELU, LIMITS, TOWER
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


def _config(keys: ClipKeys, found: JsonMapping) -> JsonObject:
    num_heads = keys.get("attention.head_count", int)
    _, num_places, _ = _shape(keys, "v.position_embd.weight", 3)
    num_queries, _ = _shape(keys, "v.blk.0.attn_q.weight", 2)
    vision = {
        "hidden_size": keys.get("embedding_length", int),
        "intermediate_size": keys.get("feed_forward_length", int),
        "num_hidden_layers": keys.num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_dim": num_queries // max(num_heads, 1),
        "patch_size": keys.get("patch_size", int),
        "pooling_kernel_size": keys.get("projector.scale_factor", int, 3),
        "position_embedding_size": num_places,
        "hidden_activation": GELU,
        "rms_norm_eps": keys.eps(),
        "use_clipped_linears": "v.blk.0.attn_q.input_max" in keys.shapes,
        "standardize": "v.std_bias" in keys.shapes,
    }
    # In the models without inputs for each layer, tokens of a picture see each other.
    is_large = not found.get("hidden_size_per_layer_input")
    text = {"use_bidirectional_attention": "vision"} if is_large else {}
    return {"vision_config": vision, "text_config": text}


def _shape(keys: ClipKeys, name: str, num_dims: int) -> tuple[int, ...]:
    """The shape of a tensor. Raises BadCheckpoint."""
    shape = keys.shapes.get(name, ())
    if len(shape) != num_dims:
        raise BadCheckpoint(f"{keys.label} has no tensor {name} of {num_dims} dimensions")
    return shape


def _settings(keys: ClipKeys) -> JsonObject:
    return {**keys.looks, "do_convert_rgb": True, "do_normalize": False}


PROJECTOR = Projector(
    models={"gemma4": "Gemma4ForConditionalGeneration"},
    config=_config,
    settings=_settings,
    layers=f"{TOWER}.encoder.layers",
    parts={
        **_PRODUCTS,
        **{f"{name}.weight": f"{ours}.linear.weight" for name, ours in _PRODUCTS.items()},
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
    },
    patches_by_pixel=True,
    reads=("clip.has_audio_encoder",),
    unread=("a.", "mm.a."),  # the encoder of sounds
    numbers=LIMITS,
)
