"""A decoder and an encoder of pictures in two GGUF files are the model of their safetensors."""

from __future__ import annotations

import json
import re
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import softplus

from tests.caches import set_own_cache
from tests.executor.encoder_files import (
    DEVIATION,
    HALVES,
    MEAN,
    Seeing,
    halves_of,
    write_both,
)
from tests.executor.gguf_files import plain, write_gguf
from tests.executor.gguf_models import described
from tests.models.pictures import (
    GEMMA4_AUDIO,
    LLAMA4_TEXT,
    make_gemma4,
    make_llama4,
    make_pixtral,
    make_with_pictures,
)
from tests.models.qwen_seeing import make_qwen
from tests.models.seeing import Prompt, SeeingServed
from tests.seeds import every_second
from weft.arrays import FloatArray
from weft.assemble.checkpoint import check_files
from weft.config.model import BadCheckpoint, ModelConfig, ModelError
from weft.config.options import SettingsError
from weft.config.vision.mmproj import projector_of
from weft.models.vision.tower import TowerInput, at_once
from weft.text.media.families import make_processor
from weft.weights.gguf.encoder import EncoderContent
from weft.weights.gguf.files import encoder_beside, first_of_each

VIT = {
    "embedding_length": 48,
    "feed_forward_length": 80,
    "block_count": 3,
    "attention__head_count": 4,
    "attention__layer_norm_epsilon": 1e-6,
    "image_size": 32,
    "patch_size": 8,
    "image_mean": HALVES,
    "image_std": HALVES,
}
CLIP = {**VIT, "attention__layer_norm_epsilon": 1e-5, "image_mean": MEAN, "image_std": DEVIATION}
PIXTRAL = {**CLIP, "feed_forward_length": 72, "attention__head_count": 3}
PIXTRAL |= {"image_size": 64, "patch_size": 4}
QWEN = {
    **CLIP,
    "feed_forward_length": 72,
    "block_count": 4,
    "attention__head_count": 3,
    "image_size": 560,
    "patch_size": 4,
}
OF_3 = {
    **QWEN,
    "image_mean": HALVES,
    "image_std": HALVES,
    "spatial_merge_size": 2,
    "is_deepstack_layers": np.array([True, False, True, False]),
}
SQUARE = {"height": 32, "width": 32}
QWEN_KEYS = {
    "context_length": 1_024,
    "block_count": 4,
    "rope__freq_base": 1_000.0,
    "attention__layer_norm_rms_epsilon": 1e-6,
    "rope__dimension_sections": np.array([2, 3, 3, 0], dtype=np.int32),
}
QWEN_SETTINGS = {"min_pixels": 3_136, "max_pixels": 12_845_056}
TEXT_KEYS = {"rope__freq_base": 10_000.0, "attention__layer_norm_rms_epsilon": 1e-6}
GEMMA_KEYS = {
    "rope__freq_base": 1_000_000.0,
    "attention__layer_norm_rms_epsilon": 1e-6,
    "attention__sliding_window": 4_096,
}
# As files of Llama 4 always mean it.
OF_LLAMA4 = {**LLAMA4_TEXT, "attention_chunk_size": 8_192, "floor_scale": 8_192}
GEMMA4_KEYS = {
    "block_count": 4,
    "attention__key_length": 32,
    "attention__value_length": 32,
    "attention__key_length_swa": 16,
    "attention__value_length_swa": 16,
    "attention__layer_norm_rms_epsilon": 1e-6,
    "attention__sliding_window": 10,
    "attention__sliding_window_pattern": np.array([True, False] * 2),
    "rope__dimension_count": 32,
    "rope__dimension_count_swa": 16,
    "rope__freq_base": 1_000_000.0,
}
GEMMA4 = Seeing(
    partial(make_gemma4, "small"),
    "gemma4",
    {
        **{**GEMMA4_KEYS, "attention__head_count_kv": 2, "attention__shared_kv_layers": 2},
        "embedding_length_per_layer_input": 8,
    },
    "gemma4v",
    {
        **{**VIT, "block_count": 2, "attention__head_count": 3, "patch_size": 4},
        **{"image_mean": 0 * HALVES, "image_std": 2 * HALVES, "projector__scale_factor": 2},
    },
    {},
    {},
    (
        ("patch_embedder.position_embedding_table", "position_embd.weight"),
        ("patch_embedder.input_proj", "patch_embd"),
        ("post_feedforward_layernorm", "ffn_post_norm"),
        ("pre_feedforward_layernorm", "ln2"),
        ("post_attention_layernorm", "attn_post_norm"),
        ("input_layernorm", "ln1"),
        ("q_norm", "attn_q_norm"),
        ("k_norm", "attn_k_norm"),
        ("embed_vision.embedding_projection", "mm.input_projection"),
    ),
    text_tensors=(("rope_freqs.weight", torch.tensor([1.0] * 4 + [1e30] * 12)),),
)
# As far as vectors attend in all files.
OF_GEMMA4 = {**GEMMA4_AUDIO, "attention_chunk_size": 12, "attention_context_left": 13}
GEMMA4_SOUNDS = (
    ("audio_tower.subsample_conv_projection.layer", "a.conv1d."),
    (".conv.weight", ".weight"),
    ("audio_tower.subsample_conv_projection.input_proj_linear", "a.input_projection"),
    ("audio_tower.output_proj", "a.pre_encode.out"),
    ("embed_audio.embedding_projection", "mm.a.input_projection"),
    ("audio_tower.layers.", "a.blk."),
    ("feed_forward1.ffw_layer_1", "ffn_up"),
    ("feed_forward1.ffw_layer_2", "ffn_down"),
    ("feed_forward2.ffw_layer_1", "ffn_up_1"),
    ("feed_forward2.ffw_layer_2", "ffn_down_1"),
    ("feed_forward1.pre_layer_norm", "ffn_norm"),
    ("feed_forward1.post_layer_norm", "ffn_post_norm"),
    ("feed_forward2.pre_layer_norm", "ffn_norm_1"),
    ("feed_forward2.post_layer_norm", "ffn_post_norm_1"),
    ("norm_pre_attn", "attn_pre_norm"),
    ("norm_post_attn", "attn_post_norm"),
    ("self_attn.relative_k_proj", "attn_k_rel"),
    ("self_attn.per_dim_scale", "per_dim_scale.weight"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.post", "attn_out"),
    ("lconv1d.conv_norm", "norm_conv"),
    ("lconv1d.pre_layer_norm", "conv_norm"),
    ("lconv1d.depthwise_conv1d", "conv_dw"),
    ("lconv1d.linear_start", "conv_pw1"),
    ("lconv1d.linear_end", "conv_pw2"),
    ("norm_out", "ln2"),
)
KINDS = {
    "gemma4": GEMMA4,
    "gemma4-hearing": GEMMA4._replace(
        make=partial(make_gemma4, "small", audio=OF_GEMMA4),
        settings={"feature_size": 16},
        sound_names=GEMMA4_SOUNDS,
        other_keys={
            "clip.has_audio_encoder": True,
            "clip.audio.projector_type": "gemma4a",
            "clip.audio.block_count": 2,
            "clip.audio.attention.head_count": 3,
        },
    ),
    "gemma4-large": GEMMA4._replace(
        make=partial(make_gemma4, "large"),
        text_keys={
            **GEMMA4_KEYS,
            "attention__head_count_kv": np.array([2, 1, 2, 1], dtype=np.int32),
        },
    ),
    "gemma3": Seeing(
        partial(make_with_pictures, "gemma3"),
        "gemma3",
        GEMMA_KEYS,
        "gemma3",
        {**VIT, "projector__scale_factor": 2},
        {"use_gelu": True},
        {"size": SQUARE},
    ),
    "idefics3": Seeing(
        partial(make_with_pictures, "smolvlm"),
        "llama",
        TEXT_KEYS,
        "idefics3",
        {**VIT, "projector__scale_factor": 2, "preproc_image_size": 64},
        {"use_gelu": True},
        {"max_image_size": {"longest_edge": 32}, "size": {"longest_edge": 64}},
    ),
    "llama4": Seeing(
        partial(make_llama4, text=OF_LLAMA4),
        "llama4",
        {
            **{"block_count": 4, "rope__freq_base": 500_000.0, "expert_count": 4},
            **{"expert_used_count": 1, "interleave_moe_layer_step": 2},
            **{"feed_forward_length": 80, "expert_feed_forward_length": 96},
        },
        "llama4",
        {
            **{**CLIP, "image_mean": HALVES, "image_std": HALVES, "projector__scale_factor": 2},
            **{"block_count": 2, "feed_forward_length": 192, "attention__head_count": 3},
        },
        {"use_gelu": True},
        {"size": SQUARE},
        (
            ("multi_modal_projector.linear_1", "mm.model.fc"),
            ("vision_model.vision_adapter.mlp.fc", "mm.model.adapter."),
            ("vision_model.positional_embedding_vlm", "v.position_embd.weight"),
            ("vision_model.patch_embedding.linear", "v.patch_embd"),
            ("vision_model.class_embedding", "v.class_embd"),
            ("vision_model.model.layers.", "v.blk."),
            ("layernorm_pre", "pre_ln"),
            ("layernorm_post", "post_ln"),
            ("input_layernorm", "ln1"),
            ("post_attention_layernorm", "ln2"),
        ),
    ),
    "llava": Seeing(
        partial(make_with_pictures, "llava"),
        "llama",
        TEXT_KEYS,
        "mlp",
        # The layer that is not looked at is not in the file.
        {**CLIP, "block_count": 2, "projection_dim": 768},
        {"has_llava_projector": True, "use_gelu": False},
        {"do_center_crop": True, "crop_size": SQUARE, "size": {"shortest_edge": 32}},
        (
            ("multi_modal_projector.linear_1", "mm.0"),
            ("multi_modal_projector.linear_2", "mm.2"),
        ),
        swaps=True,
    ),
    "pixtral": Seeing(
        partial(make_pixtral, "llava"),
        "llama",
        TEXT_KEYS,
        "pixtral",
        {**PIXTRAL, "block_count": 2},
        {"use_silu": True, "rope.freq_base": 1_000.0},
        {"size": {"longest_edge": 64}},
        (("multi_modal_projector.linear_", "mm."),),
    ),
    "mistral3": Seeing(
        partial(make_pixtral, "mistral3"),
        "mistral3",
        TEXT_KEYS,
        "pixtral",
        {**PIXTRAL, "spatial_merge_size": 2},
        {"use_gelu": True, "rope.freq_base": 1_000.0},
        {"size": {"longest_edge": 64}},
        (("multi_modal_projector.linear_", "mm."),),
    ),
    "qwen2-vl": Seeing(
        partial(make_qwen, "qwen2-vl"),
        "qwen2vl",
        QWEN_KEYS,
        "qwen2vl_merger",
        {**QWEN, "feed_forward_length": 96},
        {},
        QWEN_SETTINGS,
    ),
    "qwen2.5-vl": Seeing(
        partial(make_qwen, "qwen2.5-vl"),
        "qwen2vl",
        QWEN_KEYS,
        "qwen2.5vl_merger",
        {**QWEN, "n_wa_pattern": 2, "window_size": 24},
        {"use_silu": True},
        QWEN_SETTINGS,
    ),
    "qwen3-vl": Seeing(
        partial(make_qwen, "qwen3-vl"),
        "qwen3vl",
        QWEN_KEYS,
        "qwen3vl_merger",
        OF_3,
        {"use_gelu": True},
        {"min_pixels": 65_536, "max_pixels": 16_777_216},
    ),
    "qwen3.5": Seeing(
        partial(make_qwen, "qwen3.5", linear_num_value_heads=4),
        "qwen35",
        {
            **QWEN_KEYS,
            **{"rope__dimension_count": 8, "attention__key_length": 16, "ssm__conv_kernel": 4},
            **{"ssm__state_size": 16, "ssm__group_count": 2, "ssm__time_step_rank": 4},
            "ssm__inner_size": 64,
            "rope__dimension_sections": np.array([2, 1, 1, 0], dtype=np.int32),
        },
        "qwen3vl_merger",
        {**OF_3, "is_deepstack_layers": np.zeros(4, dtype=bool)},
        {"use_gelu": True},
        {"min_pixels": 65_536, "max_pixels": 16_777_216},
    ),
    "qwen3-vl-moe": Seeing(
        partial(make_qwen, "qwen3-vl-moe", mlp_only_layers=[]),
        "qwen3vlmoe",
        {
            **QWEN_KEYS,
            "expert_count": 6,
            "expert_used_count": 2,
            "expert_feed_forward_length": 24,
        },
        "qwen3vl_merger",
        OF_3,
        {"use_gelu": True},
        {"min_pixels": 65_536, "max_pixels": 16_777_216},
    ),
}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_own_cache(tmp_path / "cache", monkeypatch)


@pytest.mark.parametrize("kind", every_second(KINDS))
def test_two_files_are_the_model_of_their_safetensors(tmp_path: Path, kind: str) -> None:
    seeing = KINDS[kind]
    checkpoint = seeing.make(tmp_path / "checkpoint")
    decoder, _ = write_both(seeing, checkpoint, tmp_path / "files")
    folder = described(decoder)
    ours = halves_of(folder)
    theirs = halves_of(checkpoint.folder)
    for layer in range(theirs.config.num_layers):
        ropes = [one.config.decoder.layer(layer).attention.rope for one in (ours, theirs)]
        # A file has the factors of rotations that are in proportion.
        assert ropes[0] == ropes[1] or seeing.text_tensors
    pairs = [(ours.encoder, theirs.encoder)]
    if kind != "qwen3.5":  # files have other numbers for its states
        pairs.append((ours.decoder, theirs.decoder))
    for found, expected in pairs:
        assert found.keys() == expected.keys()
        for name, weights in found.items():
            # The norms of Gemma have their 1 in a file.
            has_one = "norm.weight" in name and "vision_tower" not in name
            added = float(kind == "gemma3" and has_one)
            if name.endswith("per_dim_scale"):  # a file has what is multiplied with
                expected[name] = softplus(expected[name])
            torch.testing.assert_close(weights - added, expected[name], rtol=0, atol=1e-6)
    assert_sees_the_same(folder, checkpoint.folder)


@pytest.mark.parametrize("kind", ["gemma3", "idefics3", "llava"])
def test_what_is_seen_decides_the_same_tokens(tmp_path: Path, kind: str) -> None:
    """Served, with the kernels."""
    seeing = KINDS[kind]
    checkpoint = seeing.make(tmp_path / "checkpoint")
    decoder, _ = write_both(seeing, checkpoint, tmp_path / "files")
    folder = described(decoder)
    check_files(folder)
    found = []
    for one in (folder, checkpoint.folder):
        served = SeeingServed(one)
        prompts = [Prompt(one, seed, 9, 100 + seed, 4) for seed in range(3)]
        found.append(served.serve(*prompts))
        assert not served.errors
        served.runner.close()
    assert found[0] == found[1]
    assert len({str(tokens) for tokens in found[0]}) == 3


def test_an_encoder_is_for_gguf_files_alone(tmp_path: Path) -> None:
    checkpoint = KINDS["llava"].make(tmp_path / "checkpoint")
    with pytest.raises(SettingsError, match="--mmproj is for GGUF files"):
        described(checkpoint.folder, mmproj="mmproj.gguf")


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Of a decoder and its encoder."""
    seeing = KINDS["qwen2.5-vl"]
    return write_both(seeing, seeing.make(tmp_path / "checkpoint"), tmp_path / "files")


def sees(folder: Path) -> bool:
    return ModelConfig.from_folder(folder).vision is not None


def test_an_encoder_is_found_by_its_name_or_named(files: tuple[Path, Path]) -> None:
    decoder, encoder = files
    assert sees(described(decoder))
    other = encoder.rename(encoder.with_name("other.gguf"))
    assert not sees(described(decoder))
    assert sees(described(decoder, mmproj=str(other)))
    with pytest.raises(SettingsError, match=r"--mmproj: there is no file .*none.gguf"):
        described(decoder, mmproj=str(encoder.with_name("none.gguf")))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["mmproj-F16.gguf", "mmproj-BF16.gguf", "a.gguf"], "mmproj-BF16.gguf"),
        (["mmproj-model-f16.gguf"], "mmproj-model-f16.gguf"),
        (["mmproj-Seer-3B-Q8_0.gguf", "mmproj-Seer-3B-f16.gguf"], "mmproj-Seer-3B-f16.gguf"),
        (["Seer-3B-it.mmproj-Q8_0.gguf", "mmproj-F32.gguf"], "Seer-3B-it.mmproj-Q8_0.gguf"),
        (["mmproj-Seer-7B-f16.gguf", "mmproj-Other-f16.gguf"], ""),
        (["imatrix-Seer-3B.gguf", "mmproj-F16.txt"], ""),
    ],
)
def test_names_of_encoders(names: list[str], expected: str) -> None:
    found = encoder_beside(Path("Seer-3B-it-Q4_K_M.gguf"), map(Path, names))
    assert found == (Path(expected) if expected else None)


def test_files_beside_models_are_no_models() -> None:
    names = ("a-imatrix-Q4_K.gguf", "a.mmproj-f16.gguf", "imatrix.gguf", "mmproj-F16.gguf")
    assert first_of_each(map(Path, names)) == [Path("a-imatrix-Q4_K.gguf")]


def changed(encoder: Path, **changes: Any) -> Path:
    """The file of an encoder without tensors, with other keys."""
    keys = {"general.architecture": "clip", "clip.projector_type": "qwen2.5vl_merger"}
    keys |= {f"clip.{key.replace('__', '.')}": value for key, value in changes.items()}
    return write_gguf(encoder, keys, {"v.post_ln.weight": plain(torch.ones(4))})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"projector_type": "ldp"}, "projector_type is 'ldp', which is not supported"),
    "another decoder": (
        {"projector_type": "gemma3"},
        "is for a decoder of gemma3; this one is qwe",
    ),
    "another size": ({"vision__projection_dim": 72}, "of 72 numbers; the decoder's have 64"),
    "no layers": ({"vision__n_wa_pattern": 2}, "has no clip.vision.block_count in its metadata"),
    "many layers": (
        {"vision__n_wa_pattern": 2, "vision__block_count": 1_000_000},
        "block_count is 1,000,000, but it has 1 tensors",
    ),
    "pieces of pictures": (
        {"vision__image_grid_pinpoints": np.array([336, 672], dtype=np.int32)},
        "has clip.vision.image_grid_pinpoints, which is not supported",
    ),
    "another type": (
        {"vision__n_wa_pattern": "2"},
        "n_wa_pattern is '2'; it must be given as int",
    ),
}


CLAIMS = {
    "embedding_length": (9_600, "v.blk.0.ln1.weight is [48]; its metadata says [9600]"),
    "feed_forward_length": (10**9, "v.blk.0.ffn_up.weight is [80, 48]; its metadata says [100000"),
    "image_size": (80_000, "v.position_embd.weight is [16, 48]; its metadata says [100000000, 48]"),
    "patch_size": (4, "v.patch_embd.weight is [48, 3, 8, 8]; its metadata says [48, 3, 4, 4]"),
    "block_count": (4, "has no tensor v.blk.3.ln1.weight, which its metadata implies"),
}


@pytest.mark.parametrize("key", CLAIMS)
def test_sizes_that_the_tensors_do_not_have_are_refused(tmp_path: Path, key: str) -> None:
    value, message = CLAIMS[key]
    seeing = KINDS["gemma3"]
    claimed = seeing._replace(keys={**seeing.keys, key: value})
    checkpoint = seeing.make(tmp_path / "checkpoint")
    decoder, encoder = write_both(claimed, checkpoint, tmp_path / "files")
    with pytest.raises(BadCheckpoint, match=re.escape(message)):
        described(decoder, mmproj=str(encoder))


SOUNDS_REFUSED = {
    "clip.audio.projector_type": ("gemma4ua", "'gemma4ua', which is not supported; supported be"),
    "clip.audio.block_count": (1_000_000, "block_count is 1,000,000, but it has"),
    "clip.audio.attention.head_count": (None, "has no clip.audio.attention.head_count"),
}


@pytest.mark.parametrize("key", SOUNDS_REFUSED)
def test_an_encoder_of_sounds_that_does_not_fit_is_refused(tmp_path: Path, key: str) -> None:
    value, message = SOUNDS_REFUSED[key]
    seeing = KINDS["gemma4-hearing"]
    keys = {**seeing.other_keys, key: value}
    said = {name: one for name, one in keys.items() if one is not None}
    checkpoint = seeing.make(tmp_path / "checkpoint")
    decoder, encoder = write_both(seeing._replace(other_keys=said), checkpoint, tmp_path / "files")
    with pytest.raises(ModelError, match=re.escape(message)):
        described(decoder, mmproj=str(encoder))


@pytest.mark.parametrize("what", REFUSED)
def test_an_encoder_that_does_not_fit_is_refused(files: tuple[Path, Path], what: str) -> None:
    decoder, encoder = files
    changes, message = REFUSED[what]
    changed(encoder, **{"vision__projection_dim": 64, **changes})
    with pytest.raises(ModelError, match=re.escape(message)):
        described(decoder, mmproj=str(encoder))


@pytest.mark.parametrize("key", ["clip.projector_type", "clip.audio.projector_type"])
def test_a_kind_of_sounds_alone_is_refused(key: str) -> None:
    with pytest.raises(ModelError, match="projector_type is 'ultravox', which is not supported"):
        projector_of("a.gguf", {key: "ultravox"})


def test_an_encoder_of_another_model_beside_a_file_is_left_out(files: tuple[Path, Path]) -> None:
    decoder, encoder = files
    changed(encoder, projector_type="ldp")
    assert not sees(described(decoder))


def test_tensors_that_cannot_be_joined_are_named(files: tuple[Path, Path]) -> None:
    _, encoder = files
    keys: dict[str, Any] = {
        "general.architecture": "clip",
        "clip.projector_type": "qwen2.5vl_merger",
    }
    keys["clip.vision.attention.head_count"] = 2
    tensors = {f"v.blk.0.attn_{part}.weight": plain(torch.ones(8, 8)) for part in "qk"}
    for more in ({}, {"v.blk.0.attn_v.weight": plain(torch.ones(8, 8).half())}):
        write_gguf(encoder, keys, {**tensors, **more})
        with pytest.raises(BadCheckpoint, match=r"attn_q.weight has no attn_v of its type"):
            EncoderContent(encoder)
    frames = {"v.patch_embd.weight": plain(torch.ones(8, 3, 4, 4))}
    frames["v.patch_embd.weight.1"] = plain(torch.ones(8, 3, 4, 2))
    write_gguf(encoder, keys, frames)
    with pytest.raises(BadCheckpoint, match="those of later frames are not alike"):
        EncoderContent(encoder)


def draw_sound() -> FloatArray:
    samples = np.random.default_rng(6).standard_normal(9_000)
    return (0.1 * samples).astype(np.float32)


def assert_sees_the_same(folder: Path, expected: Path) -> None:
    """A picture has the same text, values and vectors; a sound, too, if the model hears."""
    draw = np.random.default_rng(5)
    image = Image.fromarray(draw.integers(0, 256, (75, 90, 3), dtype=np.uint8))
    found = []
    for one in (folder, expected):
        config = json.loads((one / "config.json").read_text())
        processor = make_processor(one, config)
        assert processor is not None
        parts = [processor.image(image)]
        if processor.audio_rate:
            parts.append(processor.audio(draw_sound()))
        tower = halves_of(one).tower
        vectors = []
        for part in chain.from_iterable(prepared.parts for prepared in parts):
            length = part.length if part.grid is None else int(np.prod(part.grid))
            values = TowerInput(part.kind, length, part.grid, torch.from_numpy(part.values))
            with torch.inference_mode():
                vectors.append(at_once(tower.encode(values)).clone())
        found.append(([prepared.text for prepared in parts], torch.cat(vectors)))
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=1e-4)
