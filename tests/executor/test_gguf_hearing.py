"""Encoders of sounds in GGUF files, alone and beside one of pictures: Qwen2-Audio, Voxtral, Gemma
3n and the unified Gemma 4. Tensors have the names that llama.cpp's converter takes from the package
gguf; those of the unified Gemma 4 are not in every release of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.caches import set_own_cache
from tests.executor.encoder_files import Halves, halves_of
from tests.executor.gguf_files import Stored, plain, write_gguf
from tests.executor.gguf_models import described, metadata, stored
from tests.models import gemma3n_media, mobilenet
from tests.models.gemma3n_media import make_gemma3n
from tests.models.gemma4_media import Told
from tests.models.many import Checkpoint
from tests.models.pictures import UNIFIED_SAMPLES, make_gemma4_unified
from tests.models.sounds import VoxtralPrompt, make_qwen2_audio, make_voxtral
from weft.config.model_errors import ModelError
from weft.models.vision.tower import TowerInput, at_once
from weft.text.media.families import make_processor

NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8)
ENDINGS = (".weight", ".bias")
# As far as vectors attend in all files, whose gates are not cut off in models of few layers.
OF_FILES = {"conf_attention_chunk_size": 12, "conf_attention_context_left": 13}
UNCUT = {"activation_sparsity_pattern": [0.0] * 4}
GEMMA3N_KEYS: dict[str, Any] = {
    "block_count": 4,
    "attention__key_length": 16,
    "attention__value_length": 16,
    "attention__layer_norm_rms_epsilon": 1e-6,
    "attention__sliding_window": 10,
    "attention__sliding_window_pattern": np.array([True, False] * 2),
    "attention__shared_kv_layers": 2,
    "feed_forward_length": np.array([96, 64, 96, 96], dtype=np.int32),
    "embedding_length_per_layer_input": 8,
    "altup__num_inputs": 3,
    "altup__active_idx": 0,
    "rope__freq_base": 1_000_000.0,
    "context_length": 512,
}
GEMMA3N: dict[str, Any] = {
    "clip.has_vision_encoder": True,
    "clip.has_audio_encoder": True,
    "clip.vision.projector_type": "gemma3nv",
    "clip.vision.projection_dim": 64,
    "clip.vision.image_size": mobilenet.SIDE,
    "clip.vision.patch_size": mobilenet.SIDE // mobilenet.OUT_SIDE**2,
    "clip.vision.embedding_length": 2_048,
    "clip.vision.feed_forward_length": 8_192,
    "clip.vision.block_count": 128,
    "clip.vision.attention.head_count": 8,
    "clip.vision.attention.layer_norm_epsilon": 1e-6,
    "clip.vision.image_mean": np.zeros(3, dtype=np.float32),
    "clip.vision.image_std": np.ones(3, dtype=np.float32),
    "clip.audio.projector_type": "gemma3na",
    "clip.audio.projection_dim": 64,
    "clip.audio.block_count": 2,
    "clip.audio.attention.head_count": 3,
    "clip.audio.num_mel_bins": 16,
}
UNIFIED: dict[str, Any] = {
    "clip.has_vision_encoder": True,
    "clip.has_audio_encoder": True,
    "clip.vision.projector_type": "gemma4uv",
    "clip.vision.projection_dim": 64,
    "clip.vision.image_size": 224,
    "clip.vision.patch_size": 4,
    "clip.vision.embedding_length": 48,
    "clip.vision.feed_forward_length": 0,
    "clip.vision.block_count": 0,
    "clip.vision.attention.head_count": 0,
    "clip.vision.attention.layer_norm_epsilon": 1e-6,
    "clip.vision.image_mean": np.zeros(3, dtype=np.float32),
    "clip.vision.image_std": np.ones(3, dtype=np.float32),
    "clip.audio.projector_type": "gemma4ua",
    "clip.audio.projection_dim": 64,
    "clip.audio.block_count": 0,
    "clip.audio.attention.head_count": 0,
    "clip.audio.num_mel_bins": 128,
}
UNIFIED_KEYS: dict[str, Any] = {
    "block_count": 4,
    "attention__key_length": 32,
    "attention__value_length": 32,
    "attention__key_length_swa": 16,
    "attention__value_length_swa": 16,
    "attention__head_count_kv": np.array([2, 1, 2, 1], dtype=np.int32),
    "attention__layer_norm_rms_epsilon": 1e-6,
    "attention__sliding_window": 10,
    "attention__sliding_window_pattern": np.array([True, False] * 2),
    "attention__shared_kv_layers": 0,
    "embedding_length_per_layer_input": 0,
    "rope__dimension_count": 32,
    "rope__dimension_count_swa": 16,
    "rope__freq_base": 1_000_000.0,
    "context_length": 512,
}
UNIFIED_NAMES = {
    "vision_embedder.patch_dense": "v.patch_embd",
    "vision_embedder.patch_ln1": "v.patch_norm.1",
    "vision_embedder.patch_ln2": "v.patch_norm.2",
    "vision_embedder.pos_norm": "v.patch_norm.3",
    "vision_embedder.pos_embedding": "v.position_embd.weight",
    "embed_vision.embedding_projection": "mm.input_projection",
    "embed_audio.embedding_projection": "mm.a.input_projection",
}
# The part of the pairs of a head that turns, in layers that see all tokens.
ROPE_FACTORS = torch.tensor([1.0] * 4 + [1e30] * 12)
QWEN2_AUDIO: dict[str, Any] = {
    "clip.has_audio_encoder": True,
    "clip.projector_type": "qwen2a",
    "clip.audio.projection_dim": 64,
    "clip.audio.embedding_length": 32,
    "clip.audio.feed_forward_length": 48,
    "clip.audio.block_count": 2,
    "clip.audio.attention.head_count": 4,
    "clip.audio.attention.layer_norm_epsilon": 1e-5,
    "clip.audio.num_mel_bins": 16,
}
VOXTRAL: dict[str, Any] = {
    **QWEN2_AUDIO,
    "clip.projector_type": "voxtral",
    "clip.audio.feed_forward_length": 64,
    "clip.audio.projector.stack_factor": 2,
}
QWEN2_KEYS: dict[str, Any] = {
    "attention__layer_norm_rms_epsilon": 1e-6,
    "rope__freq_base": 10_000.0,
    "context_length": 512,
}
VOXTRAL_KEYS: dict[str, Any] = {
    "attention__layer_norm_rms_epsilon": 1e-5,
    "rope__freq_base": 100_000_000.0,
    "context_length": 512,
}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_own_cache(tmp_path / "cache", monkeypatch)


def mapped(name: str) -> str:
    found = NAMES.get_name(name, ENDINGS)
    assert found is not None, name
    return found


def of_gemma3n(name: str) -> str:
    """As the converter's class for Gemma 3n names a tensor."""
    if name.startswith("vision_tower.timm_model.blocks."):
        return name.replace("vision_tower.timm_model.blocks.", "v.blk.")
    if ".subsample_conv_projection.conv_" in name and name.endswith("norm.weight"):
        return f"a.conv1d.{name.split('conv_')[2][0]}.norm.weight"
    return mapped(f"model.{name}".replace("model.audio_tower.conformer.", "conformer.layers."))


def of_whisper(name: str) -> str:
    return mapped(name.replace("multi_modal_projector", "audio.multi_modal_projector"))


def of_unified(name: str) -> str:
    for ours, theirs in UNIFIED_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def by_colour(pixels: Tensor) -> Tensor:
    """[.., side * side * 3] -> the same, colour by colour"""
    side = round((pixels.shape[-1] / 3) ** 0.5)
    return pixels.unflatten(-1, (side * side, 3)).transpose(-1, -2).flatten(-2)


def shaped(theirs: str, tensor: Tensor) -> Tensor:
    if theirs.startswith("v.patch_norm.1.") or theirs == "v.patch_embd.weight":
        return by_colour(tensor)
    if theirs == "v.position_embd.weight":
        return tensor.transpose(0, 1)
    if theirs == "v.conv_stem.conv.bias":
        return tensor[None, :, None, None]
    if theirs.startswith("a.conv1d.") and theirs.endswith(".bias"):
        return tensor[:, None]
    return tensor


def encoder_tensors(halves: Halves, kind: str) -> dict[str, Stored]:
    rename = {"gemma3n": of_gemma3n, "gemma4": of_unified}.get(kind, of_whisper)
    found = {}
    for name, tensor in halves.encoder.items():
        theirs = rename(name)
        found[theirs] = plain(shaped(theirs, tensor).contiguous())
    return found


def decoder_tensors(halves: Halves, kind: str) -> dict[str, Stored]:
    weights = dict(halves.decoder)
    if kind == "gemma3n":
        for name in ("altup_projections", "altup_unembed_projections"):
            parts = [weights.pop(f"model.{name}.{part}.weight") for part in range(2)]
            weights[f"model.{name}.weight"] = torch.stack(parts)
        # Tokens for pictures and sounds have vectors of zeros for each layer.
        table = weights["model.embed_tokens_per_layer.weight"]
        padding = torch.zeros(gemma3n_media.VOCAB - len(table), table.shape[1])
        weights["model.embed_tokens_per_layer.weight"] = torch.cat((table, padding))
    found = stored(weights, kind)
    if kind == "gemma4":
        found["rope_freqs.weight"] = plain(ROPE_FACTORS)
    return found


KINDS = {
    "gemma3n": (GEMMA3N, GEMMA3N_KEYS),
    "gemma4": (UNIFIED, UNIFIED_KEYS),
    "qwen2": (QWEN2_AUDIO, QWEN2_KEYS),
    "llama": (VOXTRAL, VOXTRAL_KEYS),
}


def made(kind: str, folder: Path) -> Checkpoint:
    settings: dict[str, Any] = {"feature_size": 16}
    if kind == "gemma3n":
        checkpoint = make_gemma3n(folder, OF_FILES, UNCUT, audio_soft_tokens_per_image=188)
        side = {"height": mobilenet.SIDE, "width": mobilenet.SIDE}
        settings |= {"do_normalize": False, "resample": 2, "size": side}
    elif kind == "gemma4":
        checkpoint = make_gemma4_unified(folder, pool=3)
        sizes = {"patch_size": 4, "pooling_kernel_size": 3}
        settings = {**sizes, "do_normalize": False, "audio_samples_per_token": UNIFIED_SAMPLES}
    else:
        checkpoint = (make_voxtral if kind == "llama" else make_qwen2_audio)(folder)
        kind_of_extractor = {"feature_extractor_type": "WhisperFeatureExtractor"}
        settings |= {**kind_of_extractor, "chunk_length": 1}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return checkpoint


def write_both(
    kind: str,
    checkpoint: Checkpoint,
    folder: Path,
    tensors: dict[str, Stored] | None = None,
    **changes: Any,
) -> Path:
    """The file of the decoder, and beside it that of the encoder."""
    folder.mkdir()
    halves = halves_of(checkpoint.folder)
    of_encoder, of_decoder = KINDS[kind]
    values = metadata(kind, **of_decoder)
    said = {"general.architecture": "clip", "general.type": "mmproj", **of_encoder}
    said |= {key.replace("__", "."): value for key, value in changes.items()}
    said = {key: value for key, value in said.items() if value is not None}
    found = tensors or encoder_tensors(halves, kind)
    write_gguf(folder / "mmproj-tiny-F16.gguf", said, found)
    return write_gguf(folder / "tiny.gguf", values, decoder_tensors(halves, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_two_files_are_the_model_of_their_safetensors(tmp_path: Path, kind: str) -> None:
    checkpoint = made(kind, tmp_path / "checkpoint")
    folder = described(write_both(kind, checkpoint, tmp_path / "files"))
    ours = halves_of(folder)
    theirs = halves_of(checkpoint.folder)
    assert ours.encoder.keys() == theirs.encoder.keys()
    for name, weights in ours.encoder.items():
        if kind == "gemma4":  # in the file's order
            assert weights.numel() == theirs.encoder[name].numel()
            continue
        torch.testing.assert_close(weights, theirs.encoder[name], rtol=0, atol=1e-6)
    random = np.random.default_rng(5)
    picture = Image.fromarray(random.integers(0, 256, (75, 90, 3), dtype=np.uint8))
    samples = (0.1 * random.standard_normal(9_000)).astype(np.float32)
    found = []
    for one in (folder, checkpoint.folder):
        config = json.loads((one / "config.json").read_text())
        processor = make_processor(one, config)
        assert processor is not None
        parts = [processor.audio(samples)]
        if "image" in processor.marks:
            parts.append(processor.image(picture))
        tower = halves_of(one).tower
        vectors = []
        for prepared in parts:
            (part,) = prepared.parts
            given = TowerInput(part.kind, part.length, part.grid, torch.from_numpy(part.values))
            with torch.inference_mode():
                vectors.append(at_once(tower.encode(given)).clone())
        found.append(([prepared.text for prepared in parts], torch.cat(vectors)))
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=5e-6)


SEEN = gemma3n_media.Seen(1, 64)
HEARD = gemma3n_media.Heard(2, 90)


@pytest.mark.parametrize(
    ("kind", "prompt"),
    [
        ("gemma3n", gemma3n_media.Prompt(1, 5, SEEN, 3, HEARD, 4, num_sound_tokens=188)),
        ("llama", VoxtralPrompt(1, 5, 101, 102, 3, 103, 4)),
    ],
    ids=["gemma3n", "voxtral"],
)
def test_what_is_seen_and_heard_decides_the_same_tokens(
    tmp_path: Path, kind: str, prompt: Any
) -> None:
    """Served, with the kernels."""
    checkpoint = made(kind, tmp_path / "checkpoint")
    folder = described(write_both(kind, checkpoint, tmp_path / "files"))
    told = [Told(one).tell(prompt)[0] for one in (folder, checkpoint.folder)]
    (ours, our_logprobs), (theirs, their_logprobs) = told
    assert ours == theirs
    for found, expected in zip(our_logprobs, their_logprobs, strict=True):
        assert found == pytest.approx(expected, abs=1e-4)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "another kind of sounds": (
        "gemma3n",
        {"clip__audio__projector_type": "gemma4a"},
        "is 'gemma4a', which is not supported; supported beside its pictures is gemma3na",
    ),
    "many layers": (
        "gemma3n",
        {"clip__audio__block_count": 1_000_000},
        "clip.audio.block_count is 1,000,000, but it has",
    ),
    "another number of vectors": (
        "gemma3n",
        {"clip__vision__image_size": 80},
        "vision_soft_tokens_per_image is 20; the encoder makes 4 x 4 vectors",
    ),
    "a patch of no pixels": (
        "gemma3n",
        {"clip__vision__patch_size": 0},
        "clip.vision.patch_size is 0; 1 to 2,147,483,647 are expected",
    ),
    "a size for each layer": (
        "qwen2",
        {"clip__audio__projection_dim": np.array([64, 64], dtype=np.int32)},
        "of [64 64] numbers; the decoder's have 64",
    ),
    "no kind": (
        "llama",
        {"clip__projector_type": None},
        "clip.projector_type is None, which is not supported; supported are",
    ),
    "another size": ("gemma3n", {"clip__vision__projection_dim": 72}, "of 72 numbers; the decod"),
    "another size of sounds": ("qwen2", {"clip__audio__projection_dim": 72}, "of 72 numbers; the"),
    "another stack": (
        "llama",
        {"clip__audio__projector__stack_factor": 4},
        "mm.a.mlp.1.weight is [64, 64]; a token of 4 vectors of 32 implies [64, 128]",
    ),
    "no heads": (
        "qwen2",
        {"clip__audio__attention__head_count": None},
        "has no clip.audio.attention.head_count",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_encoder_that_does_not_fit_is_refused(tmp_path: Path, what: str) -> None:
    kind, changes, message = REFUSED[what]
    checkpoint = made(kind, tmp_path / "checkpoint")
    decoder = write_both(kind, checkpoint, tmp_path / "files", **changes)
    with pytest.raises(ModelError, match=re.escape(message)):
        described(decoder, mmproj=str(decoder.with_name("mmproj-tiny-F16.gguf")))


LACKING = {
    "gemma3n": {
        "v.blk.1.2.attn.query.proj.weight": "has no products in v.blk.1.2",
        "mm.embedding.weight": "has no tensor mm.embedding.weight of 2 dimensions",
        "a.pre_encode.out.weight": "has no tensor a.pre_encode.out.weight of 2 dimensions",
    },
    "gemma4": {
        "v.patch_embd.weight": "has no tensor v.patch_embd.weight of 2 dimensions",
        "mm.a.input_projection.weight": "no tensor mm.a.input_projection.weight of 2 dimensions",
    },
    "qwen2": {"a.position_embd.weight": "has no tensor a.position_embd.weight of 2 dimensions"},
    "llama": {"mm.a.mlp.2.weight": "has no tensor mm.a.mlp.2.weight of 2 dimensions"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_without_a_tensor_is_refused(tmp_path: Path, kind: str) -> None:
    checkpoint = made(kind, tmp_path / "checkpoint")
    whole = encoder_tensors(halves_of(checkpoint.folder), kind)
    for number, (name, message) in enumerate(LACKING[kind].items()):
        rest = {one: tensor for one, tensor in whole.items() if one != name}
        decoder = write_both(kind, checkpoint, tmp_path / str(number), rest)
        with pytest.raises(ModelError, match=re.escape(message)):
            described(decoder, mmproj=str(decoder.with_name("mmproj-tiny-F16.gguf")))


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_that_is_not_finite_is_refused(tmp_path: Path, kind: str) -> None:
    checkpoint = made(kind, tmp_path / "checkpoint")
    tensors = encoder_tensors(halves_of(checkpoint.folder), kind)
    name = max(tensors, key=lambda each: len(tensors[each].data))
    stored_well = tensors[name]
    # In all kinds of floats: all bits of the exponent are set.
    tensors[name] = stored_well._replace(data=stored_well.data[:-4] + b"\0\0\x80\x7f")
    folder = described(write_both(kind, checkpoint, tmp_path / "files", tensors))
    with pytest.raises(ModelError, match=r"mmproj-tiny-F16\.gguf: \S+ has values that are not fin"):
        halves_of(folder)


def test_patches_that_are_no_squares_are_refused(tmp_path: Path) -> None:
    checkpoint = made("gemma4", tmp_path / "checkpoint")
    tensors = encoder_tensors(halves_of(checkpoint.folder), "gemma4")
    tensors["v.patch_embd.weight"] = plain(torch.ones(48, 192))
    decoder = write_both("gemma4", checkpoint, tmp_path / "files", tensors)
    with pytest.raises(ModelError, match="has 192 values of a patch; three for each pixel"):
        described(decoder, mmproj=str(decoder.with_name("mmproj-tiny-F16.gguf")))


def test_sounds_of_parts_of_seconds_are_refused(tmp_path: Path) -> None:
    checkpoint = made("qwen2", tmp_path / "checkpoint")
    tensors = encoder_tensors(halves_of(checkpoint.folder), "qwen2")
    tensors["a.position_embd.weight"] = plain(torch.ones(60, 32))
    decoder = write_both("qwen2", checkpoint, tmp_path / "files", tensors)
    with pytest.raises(ModelError, match="has 60 positions of sounds; a multiple of 50"):
        described(decoder, mmproj=str(decoder.with_name("mmproj-tiny-F16.gguf")))
