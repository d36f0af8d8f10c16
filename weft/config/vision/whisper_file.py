"""Whisper's encoder in a GGUF file (`mmproj.py`), as Qwen2-Audio and Voxtral have it: one of
sounds, without one of pictures. All sizes are those of its tensors."""

from __future__ import annotations

from weft.config.model_errors import BadCheckpoint, UnsupportedModel
from weft.config.vision.clip import HEARS, ClipKeys, LayerGroup, Projector, ReadConfig
from weft.json_types import JsonMapping, JsonObject

_TOWER = "audio_tower"
_POSITIONS_PER_S = 50
_PARTS = {
    "ln1": "self_attn_layer_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ln2": "final_layer_norm",
    "ffn_up": "fc1",
    "ffn_down": "fc2",
}


def _qwen2_audio(keys: ClipKeys, found: JsonMapping) -> JsonObject:
    num_positions, hidden = keys.shape("a.position_embd.weight", 2)
    inner, _ = keys.shape("a.blk.0.ffn_up.weight", 2)
    audio = {
        "num_mel_bins": _num_bands(keys),
        "d_model": hidden,
        "encoder_ffn_dim": inner,
        "encoder_layers": keys.num_sound_layers,
        "encoder_attention_heads": keys.value("clip.audio.attention.head_count", int),
        "max_source_positions": num_positions,
    }
    return {"audio_config": audio}


def _voxtral(keys: ClipKeys, found: JsonMapping) -> JsonObject:
    num_positions, hidden = keys.shape("a.position_embd.weight", 2)
    inner, _ = keys.shape("a.blk.0.ffn_up.weight", 2)
    stack = keys.value("clip.audio.projector.stack_factor", int, inner // max(hidden, 1))
    product, _ = keys.shape("mm.a.mlp.2.weight", 2)
    first = keys.shape("mm.a.mlp.1.weight", 2)
    implied = (product, stack * hidden)
    if first != implied or stack * hidden != inner:
        raise BadCheckpoint(
            f"{keys.label}: mm.a.mlp.1.weight is {list(first)}; a token of {stack:,} vectors of "
            f"{hidden:,} implies {list(implied)}, and layers with as many numbers inside"
        )
    audio = {
        "num_mel_bins": _num_bands(keys),
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": keys.num_sound_layers,
        "num_attention_heads": keys.value("clip.audio.attention.head_count", int),
        "max_source_positions": num_positions,
    }
    return {"audio_config": audio}


def _num_bands(keys: ClipKeys) -> int:
    _, num_bands, _ = keys.shape("a.conv1d.1.weight", 3)
    return num_bands


def _settings(keys: ClipKeys) -> JsonObject:
    num_positions, _ = keys.shape("a.position_embd.weight", 2)
    seconds, rest = divmod(num_positions, _POSITIONS_PER_S)
    if rest:
        raise UnsupportedModel(
            f"{keys.label} has {num_positions:,} positions of sounds; a multiple of "
            f"{_POSITIONS_PER_S}, of seconds, is supported"
        )
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": _num_bands(keys),
        "chunk_length": seconds,
    }


def _projector(model: str, text: str, config: ReadConfig, names: dict[str, str]) -> Projector:
    """`names` of the projection: the file's → the tower's."""
    return Projector(
        models={text: model},
        config=config,
        settings=_settings,
        layers="",
        parts={},
        outside={
            "a.conv1d.1": f"{_TOWER}.conv1",
            "a.conv1d.2": f"{_TOWER}.conv2",
            "a.position_embd": f"{_TOWER}.embed_positions",
            "a.post_ln": f"{_TOWER}.layer_norm",
            **names,
        },
        reads=(HEARS,),
        further={"a": LayerGroup(f"{_TOWER}.layers", _PARTS)},
        vectors=("a.conv1d.1.bias", "a.conv1d.2.bias"),
        has_vit=False,
    )


QWEN2_AUDIO = _projector(
    "Qwen2AudioForConditionalGeneration",
    "qwen2",
    _qwen2_audio,
    {"mm.a.fc": "multi_modal_projector.linear"},
)
VOXTRAL = _projector(
    "VoxtralForConditionalGeneration",
    "llama",
    _voxtral,
    {
        "mm.a.mlp.1": "multi_modal_projector.linear_1",
        "mm.a.mlp.2": "multi_modal_projector.linear_2",
    },
)
