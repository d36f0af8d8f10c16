"""Translates the metadata of an encoder's GGUF file (mmproj, general.architecture "clip") into the
keys that a model with that encoder has in its `config.json` and `preprocessor_config.json`, and
names its tensors as the towers do.

Such a file stands beside the GGUF file of a decoder. `clip.projector_type` says which kind it is:
each kind is a row of PROJECTORS. Source: the keys and names of gguf's constants.
"""

from __future__ import annotations

from typing import Any

from weft.config.model_errors import BadCheckpoint, UnsupportedModel
from weft.config.numbers import shown
from weft.config.vision import (
    gemma3n_file,
    gemma4_file,
    gemma4_unified_file,
    whisper_file,
)
from weft.config.vision.clip import HEARS, VISION, ClipKeys, Projector, ReadSettings
from weft.json_types import JsonMapping, JsonObject

ARCHITECTURE = "clip"
# Names of a layer's parts in SigLIP and CLIP.
_VIT_PARTS = {
    "ln1": "layer_norm1",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ln2": "layer_norm2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_QWEN_PARTS = {
    "ln1": "norm1",
    "attn_qkv": "attn.qkv",
    "attn_out": "attn.proj",
    "ln2": "norm2",
    "ffn_gate": "mlp.gate_proj",
}
_PIXTRAL_PARTS = {
    "ln1": "attention_norm",
    "attn_q": "attention.q_proj",
    "attn_k": "attention.k_proj",
    "attn_v": "attention.v_proj",
    "attn_out": "attention.o_proj",
    "ln2": "ffn_norm",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}


def _vit_outside(tower: str) -> dict[str, str]:
    embeddings = f"{tower}.embeddings"
    return {
        "v.patch_embd": f"{embeddings}.patch_embedding",
        "v.position_embd": f"{embeddings}.position_embedding",
        "v.class_embd": f"{embeddings}.class_embedding",
        "v.pre_ln": f"{tower}.pre_layrnorm",
        "v.post_ln": f"{tower}.post_layernorm",
    }


def _vit(keys: ClipKeys, gelu: str) -> JsonObject:
    """The `vision_config` of SigLIP or CLIP."""
    return {
        "hidden_size": keys.size("embedding_length"),
        "intermediate_size": keys.size("feed_forward_length"),
        "num_hidden_layers": keys.num_layers,
        "num_attention_heads": keys.size("attention.head_count"),
        "image_size": keys.image_size,
        "patch_size": keys.size("patch_size"),
        "layer_norm_eps": keys.eps(),
        "hidden_act": keys.activation(gelu),
    }


def _side(keys: ClipKeys) -> int:
    """Patches per side."""
    return keys.image_size // keys.size("patch_size")


def _gemma3(keys: ClipKeys, found: JsonMapping) -> JsonObject:
    pool = keys.size("projector.scale_factor", 4)
    return {
        "vision_config": {**_vit(keys, "gelu_pytorch_tanh"), "norm_weights_are_whole": True},
        "mm_tokens_per_image": (_side(keys) // pool) ** 2,
    }


def _square_settings(keys: ClipKeys) -> JsonObject:
    side = keys.image_size
    return {**keys.looks, "size": {"height": side, "width": side}}


def _idefics3(keys: ClipKeys, found: JsonMapping) -> JsonObject:
    return {
        "vision_config": _vit(keys, "gelu_pytorch_tanh"),
        "scale_factor": keys.size("projector.scale_factor", 2),
    }


def _idefics3_settings(keys: ClipKeys) -> JsonObject:
    longest = keys.size("preproc_image_size", 4 * keys.image_size)
    return {
        **keys.looks,
        "max_image_size": {"longest_edge": keys.image_size},
        "size": {"longest_edge": longest},
    }


def _llama4(keys: ClipKeys, found: JsonMapping) -> JsonObject:
    [adapter_size, *_] = keys.shapes.get("mm.model.mlp.2.weight", (0,))
    shuffle = keys.size("projector.scale_factor", 2)
    vision = {
        **_vit(keys, "gelu"),
        "pixel_shuffle_ratio": 1 / shuffle,
        "projector_input_dim": adapter_size,
        "projector_output_dim": adapter_size,
        "vision_output_dim": adapter_size,
    }
    return {"vision_config": vision}


def _is_clip(keys: ClipKeys) -> bool:
    return "v.class_embd" in keys.shapes


def _llava(keys: ClipKeys, found: JsonMapping) -> JsonObject:
    # Converters leave out the layers after the one whose output is used.
    kind = "clip_vision_model" if _is_clip(keys) else "siglip_vision_model"
    gelu = "gelu" if _is_clip(keys) else "gelu_pytorch_tanh"
    texts = {"Qwen2ForCausalLM": "qwen2", "MistralForCausalLM": "mistral"}
    [text] = found["architectures"]
    return {
        "vision_config": {**_vit(keys, gelu), "model_type": kind},
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default" if _is_clip(keys) else "full",
        "multimodal_projector_bias": "mm.0.bias" in keys.shapes,
        "text_config": {"model_type": texts.get(text, "llama")},
    }


def _llava_settings(keys: ClipKeys) -> JsonObject:
    side = keys.image_size
    square = {"height": side, "width": side}
    if not _is_clip(keys):
        return {**keys.looks, "size": square, "image_processor_type": "SiglipImageProcessor"}
    return {
        **keys.looks,
        "do_center_crop": True,
        "crop_size": square,
        "size": {"shortest_edge": side},
    }


def _pixtral(keys: ClipKeys, found: JsonMapping) -> JsonObject:
    vision = {
        "model_type": "pixtral",
        "hidden_size": keys.size("embedding_length"),
        "intermediate_size": keys.size("feed_forward_length"),
        "num_hidden_layers": keys.num_layers,
        "num_attention_heads": keys.size("attention.head_count"),
        "image_size": keys.image_size,
        "patch_size": keys.size("patch_size"),
        "hidden_act": keys.activation("gelu"),
        "rope_theta": keys.value("clip.rope.freq_base", float, 10_000.0),
    }
    kinds = {"Ministral3ForCausalLM": "ministral3"}
    [text] = found["architectures"]
    added: JsonObject = {
        "vision_config": vision,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "multimodal_projector_bias": "mm.1.bias" in keys.shapes,
        "text_config": {"model_type": kinds.get(text, "mistral")},
    }
    if "mm.patch_merger.weight" not in keys.shapes:
        return {**added, "architectures": ["LlavaForConditionalGeneration"]}
    merge = keys.size("spatial_merge_size", 2)
    return {
        **added,
        "architectures": ["Mistral3ForConditionalGeneration"],
        "spatial_merge_size": merge,
    }


def _pixtral_settings(keys: ClipKeys) -> JsonObject:
    return {**keys.looks, "size": {"longest_edge": keys.image_size}}


def _qwen(keys: ClipKeys) -> JsonObject:
    """What the encoders of all Qwen models have in their `vision_config`."""
    return {
        "depth": keys.num_layers,
        "num_heads": keys.size("attention.head_count"),
        "patch_size": keys.size("patch_size"),
        "spatial_merge_size": keys.size("spatial_merge_size", 2),
        "temporal_patch_size": sum(name.startswith("v.patch_embd.weight") for name in keys.shapes),
    }


def _qwen2_vl(keys: ClipKeys, found: JsonMapping) -> JsonObject:
    size = keys.size("embedding_length")
    inner = keys.size("feed_forward_length")
    vision = {
        **_qwen(keys),
        "embed_dim": size,
        "hidden_size": keys.size("projection_dim"),
        "mlp_ratio": inner / max(size, 1),
        "hidden_act": keys.activation("gelu"),
    }
    return {"vision_config": vision}


def _qwen2_5_vl(keys: ClipKeys, found: JsonMapping) -> JsonObject:
    period = keys.get("n_wa_pattern", int)
    if period < 1:
        raise BadCheckpoint(f"{keys.label}: {VISION}n_wa_pattern is {period}")
    vision = {
        **_qwen(keys),
        "hidden_size": keys.size("embedding_length"),
        "intermediate_size": keys.size("feed_forward_length"),
        "out_hidden_size": keys.size("projection_dim"),
        "window_size": keys.size("window_size", 112),
        "fullatt_block_indexes": list(range(period - 1, keys.num_layers, period)),
        "hidden_act": keys.activation("gelu"),
    }
    return {"vision_config": vision}


def _qwen3_vl(keys: ClipKeys, found: JsonMapping) -> JsonObject:
    positions = keys.shapes.get("v.position_embd.weight", (0,))
    deep = [layer for layer, is_deep in enumerate(keys.numbers("is_deepstack_layers")) if is_deep]
    vision = {
        **_qwen(keys),
        "hidden_size": keys.size("embedding_length"),
        "intermediate_size": keys.size("feed_forward_length"),
        "out_hidden_size": keys.size("projection_dim"),
        "num_position_embeddings": positions[0],
        "deepstack_visual_indexes": deep,
        "hidden_act": keys.activation("gelu_pytorch_tanh"),
    }
    return {"vision_config": vision, "experts_have_outputs_first": True}


def _qwen_settings(least: int, most: int) -> ReadSettings:
    """`least`, `most`: pixels of a picture in the models' own files."""

    def read(keys: ClipKeys) -> JsonObject:
        return {
            **keys.looks,
            "min_pixels": keys.get("image_min_pixels", int, least),
            "max_pixels": keys.get("image_max_pixels", int, most),
        }

    return read


_QWEN2_OUTSIDE = {
    "v.patch_embd": "visual.patch_embed.proj",
    "v.post_ln": "visual.merger.ln_q",
    "mm.0": "visual.merger.mlp.0",
    "mm.2": "visual.merger.mlp.2",
}
_QWEN2_SETTINGS = _qwen_settings(56 * 56, 28 * 28 * 16_384)
PROJECTORS = {
    "gemma3": Projector(
        models={"gemma3": "Gemma3ForConditionalGeneration"},
        config=_gemma3,
        settings=_square_settings,
        layers="vision_tower.encoder.layers",
        parts=_VIT_PARTS,
        outside={
            **_vit_outside("vision_tower"),
            "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
            "mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight",
        },
    ),
    "gemma3nv": gemma3n_file.PROJECTOR,
    "gemma4uv": gemma4_unified_file.PROJECTOR,
    "gemma4v": gemma4_file.PROJECTOR,
    "idefics3": Projector(
        models={"llama": "Idefics3ForConditionalGeneration"},
        config=_idefics3,
        settings=_idefics3_settings,
        layers="vision_model.encoder.layers",
        parts=_VIT_PARTS,
        outside={
            **_vit_outside("vision_model"),
            "mm.model.fc": "connector.modality_projection.proj",
        },
    ),
    "llama4": Projector(
        models={"llama4": "Llama4ForConditionalGeneration"},
        config=_llama4,
        settings=_square_settings,
        layers="vision_model.model.layers",
        parts={
            **_VIT_PARTS,
            "ln1": "input_layernorm",
            "attn_out": "self_attn.o_proj",
            "ln2": "post_attention_layernorm",
        },
        outside={
            "v.class_embd": "vision_model.class_embedding",
            "v.patch_embd": "vision_model.patch_embedding.linear",
            "v.position_embd.weight": "vision_model.positional_embedding_vlm",
            "v.pre_ln": "vision_model.layernorm_pre",
            "v.post_ln": "vision_model.layernorm_post",
            "mm.model.mlp.1": "vision_model.vision_adapter.mlp.fc1",
            "mm.model.mlp.2": "vision_model.vision_adapter.mlp.fc2",
            "mm.model.fc": "multi_modal_projector.linear_1",
        },
    ),
    "mlp": Projector(
        models=dict.fromkeys(("llama", "qwen2"), "LlavaForConditionalGeneration"),
        config=_llava,
        settings=_llava_settings,
        layers="vision_tower.encoder.layers",
        parts=_VIT_PARTS,
        outside={
            **_vit_outside("vision_tower"),
            "mm.0": "multi_modal_projector.linear_1",
            "mm.2": "multi_modal_projector.linear_2",
        },
    ),
    "pixtral": Projector(
        models=dict.fromkeys(("llama", "mistral3"), ""),  # `_pixtral` says which
        config=_pixtral,
        settings=_pixtral_settings,
        layers="vision_tower.transformer.layers",
        parts=_PIXTRAL_PARTS,
        outside={
            "v.patch_embd": "vision_tower.patch_conv",
            "v.pre_ln": "vision_tower.ln_pre",
            "mm.input_norm": "multi_modal_projector.norm",
            "mm.patch_merger": "multi_modal_projector.patch_merger.merging_layer",
            "mm.1": "multi_modal_projector.linear_1",
            "mm.2": "multi_modal_projector.linear_2",
        },
        has_pairs=True,
    ),
    "qwen2a": whisper_file.QWEN2_AUDIO,
    "qwen2vl_merger": Projector(
        models={"qwen2vl": "Qwen2VLForConditionalGeneration"},
        config=_qwen2_vl,
        settings=_QWEN2_SETTINGS,
        layers="visual.blocks",
        parts={**_QWEN_PARTS, "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        outside=_QWEN2_OUTSIDE,
        merges_qkv=True,
    ),
    "qwen2.5vl_merger": Projector(
        models={"qwen2vl": "Qwen2_5_VLForConditionalGeneration"},
        config=_qwen2_5_vl,
        settings=_QWEN2_SETTINGS,
        layers="visual.blocks",
        parts={**_QWEN_PARTS, "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
        outside=_QWEN2_OUTSIDE,
        merges_qkv=True,
    ),
    "qwen3vl_merger": Projector(
        models={
            "qwen3vl": "Qwen3VLForConditionalGeneration",
            "qwen3vlmoe": "Qwen3VLMoeForConditionalGeneration",
            "qwen35": "Qwen3_5ForConditionalGeneration",
            "qwen35moe": "Qwen3_5MoeForConditionalGeneration",
        },
        config=_qwen3_vl,
        settings=_qwen_settings(65_536, 16_777_216),
        layers="visual.blocks",
        parts={**_QWEN_PARTS, "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
        outside={
            "v.patch_embd": "visual.patch_embed.proj",
            "v.position_embd": "visual.pos_embed",
            "v.post_ln": "visual.merger.norm",
            "mm.0": "visual.merger.linear_fc1",
            "mm.2": "visual.merger.linear_fc2",
        },
        deep={"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"},
    ),
    "voxtral": whisper_file.VOXTRAL,
}
# Ignored tensors: the embedding of a token that the decoder has, too.
IGNORED = ("v.token_embd.img_break",)


def projector_of(label: str, metadata: JsonMapping) -> Projector:
    """The kind of an encoder's file. Raises UnsupportedModel."""
    names = (
        "clip.projector_type",
        "clip.vision.projector_type",
        "clip.audio.projector_type",
    )
    found = next((metadata[name] for name in names if metadata.get(name) is not None), None)
    if found is None and metadata.get(HEARS) in (None, False):
        found = "mlp"  # the first of such files say no kind
    if not isinstance(found, str) or found not in PROJECTORS:
        raise UnsupportedModel(
            f"{label}: {names[0]} is {shown(found)}, which is not supported; supported are "
            f"{', '.join(PROJECTORS)}"
        )
    return PROJECTORS[found]


def _require_sizes(keys: ClipKeys, config: JsonMapping) -> None:
    """Raise BadCheckpoint if the tensors do not have the sizes in the metadata: weft must not
    allocate memory by sizes that a file only claims."""
    size = keys.size("embedding_length")
    inner = keys.size("feed_forward_length")
    for layer in {0, keys.num_layers - 1}:
        _require(keys, f"v.blk.{layer}.ln1.weight", (size,))
        # Older converters have the names of the two products the other way round.
        _require(keys, f"v.blk.{layer}.ffn_up.weight", (inner, size), (size, inner))
    patch = keys.size("patch_size")
    _require(keys, "v.patch_embd.weight", (size, 3, patch, patch), (size, 3 * patch**2))
    vision = config["vision_config"]
    if "image_size" in vision and "v.position_embd.weight" in keys.shapes:
        num = _side(keys) ** 2 + _is_clip(keys)
        _require(keys, "v.position_embd.weight", (num, size))
    last = "mm.input_projection.weight" if "scale_factor" not in config else "mm.model.fc.weight"
    for name in ("mm.2.weight", last):
        if name in keys.shapes:
            out = config["hidden_size"]
            shape = keys.shapes[name]
            _require(keys, name, (out, shape[-1]), (shape[0], out))


def _require(keys: ClipKeys, name: str, *expected: tuple[int, ...]) -> None:
    shape = keys.shapes.get(name)
    if shape is None:
        raise BadCheckpoint(f"{keys.label} has no tensor {name}, which its metadata implies")
    if shape not in expected:
        raise BadCheckpoint(
            f"{keys.label}: {name} is {list(shape)}; its metadata says {list(expected[0])}"
        )


def require_fits(label: str, encoder: JsonMapping, decoder: JsonMapping) -> str:
    """The class of a model with this encoder and decoder, by the metadata of their files. Raises
    UnsupportedModel if they do not belong together."""
    projector = projector_of(label, encoder)
    text = str(decoder.get("general.architecture"))[:64]
    if text not in projector.models:
        raise UnsupportedModel(
            f"{label} is for a decoder of {' or '.join(projector.models)}; this one is {text}"
        )
    made = encoder.get(f"{VISION}projection_dim", encoder.get("clip.audio.projection_dim"))
    read = decoder.get(f"{text}.embedding_length")
    # Files of LLaVA have a size of CLIP's own there.
    has_other = type(made) is not int or made != read
    if has_other and made is not None and projector is not PROJECTORS["mlp"]:
        raise UnsupportedModel(
            f"{label} makes vectors of {shown(made)} numbers; the decoder's have {shown(read)}"
        )
    return projector.models[text]


def with_encoder(
    keys: ClipKeys, encoder: JsonMapping, decoder: JsonMapping, found: JsonMapping
) -> JsonObject:
    """The `config.json` of a decoder with the encoder of a file, by the metadata of both. `found`:
    that of the decoder alone. Raises UnsupportedModel and BadCheckpoint."""
    model = require_fits(keys.label, encoder, decoder)
    projector = projector_of(keys.label, encoder)
    keys.require_usual(projector.reads)
    config = {**found, "architectures": [model]}
    sections: Any = decoder.get(f"{decoder['general.architecture']}.rope.dimension_sections")
    if hasattr(sections, "tolist"):
        rope = {**found.get("rope_parameters", {}), "mrope_section": sections.tolist()[:3]}
        config["rope_parameters"] = rope
    config |= projector.config(keys, found)
    if projector.has_vit:
        _require_sizes(keys, config)
    return config
