"""The encoder of sounds, compared with transformers on tiny random checkpoints."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from tests.models.many import Checkpoint, saved
from weft.arrays import FloatArray
from weft.config.model import ModelConfig, ModelError
from weft.config.vision.sound import WhisperSpec, qwen2_audio
from weft.executor.cpu.tower import CppTowerBackend
from weft.executor.plain.tower import TorchTowerBackend
from weft.messages.media import MediaKind
from weft.models.registry import make_model
from weft.models.vision.tower import Tower, TowerBackend, TowerInput, at_once
from weft.models.vision.towers import make_tower
from weft.ops.cpp.abi import WeightFormat
from weft.ops.cpp.library import load
from weft.ops.plain import PlainOps
from weft.text.media.qwen2_audio import Qwen2Audio
from weft.weights.load import load_weights

CPU = torch.device("cpu")
RATE = 16_000
AUDIO_TOKEN = 300
EXTRACTOR = {"feature_size": 16, "chunk_length": 1}
TEXT = {
    "model_type": "qwen2",
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
AUDIO = {
    "num_mel_bins": 16,
    "d_model": 48,
    "encoder_layers": 3,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 80,
    "max_source_positions": 50,
}
# Lengths of sounds whose frames are odd and even, few, and the most.
LENGTHS = [321, 641, 961, 8_000, 8_161, 15_839, 15_999, 16_000]


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    config = transformers.Qwen2AudioConfig(
        text_config=TEXT,
        audio_config=AUDIO,
        audio_token_index=AUDIO_TOKEN,
        attn_implementation="eager",
    )
    model = transformers.Qwen2AudioForConditionalGeneration(config)
    return saved(model, tmp_path_factory.mktemp("hearing"))


def loaded(checkpoint: Checkpoint, backend: TowerBackend) -> Tower:
    config = ModelConfig.from_folder(checkpoint.folder)
    assert config.vision is not None
    tower = make_tower(config.vision, backend)
    decoder = make_model(config, PlainOps(torch.float32, CPU))
    load_weights(chain(decoder.weights(), tower.weights()), checkpoint.folder)
    return tower


def sound(length: int) -> FloatArray:
    samples = 0.1 * np.random.default_rng(length).standard_normal(length)
    return samples.astype(np.float32)


def expected(model: Any, samples: FloatArray) -> Tensor:
    """What transformers' encoder makes of a sound: [tokens, hidden]"""
    extractor = transformers.WhisperFeatureExtractor(**EXTRACTOR)
    inputs = extractor(
        [samples], sampling_rate=RATE, return_attention_mask=True, return_tensors="pt"
    )
    length = (int(inputs["attention_mask"].sum()) + 1) // 4
    ids = torch.tensor([[1, *[AUDIO_TOKEN] * length]])
    seen: list[Tensor] = []
    hook = model.model.language_model.register_forward_pre_hook(
        lambda _, __, named: seen.append(named["inputs_embeds"]), with_kwargs=True
    )
    with torch.inference_mode():
        model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            input_features=inputs["input_features"],
            feature_attention_mask=inputs["attention_mask"],
        )
    hook.remove()
    return seen[0][0, 1:]


@torch.inference_mode()
def encoded(tower: Tower, samples: FloatArray) -> Tensor:
    (part,) = Qwen2Audio({"audio_config": AUDIO}, EXTRACTOR).audio(samples).parts
    kind: MediaKind = part.kind
    values = torch.from_numpy(part.values)
    return at_once(tower.encode(TowerInput(kind, part.length, part.grid, values))).float().clone()


def backends() -> list[TowerBackend]:
    return [
        TorchTowerBackend(torch.float32, CPU),
        CppTowerBackend(load(""), WeightFormat.F32),
    ]


def test_vectors_are_those_of_transformers(hearing: Checkpoint) -> None:
    for backend in backends():
        tower = loaded(hearing, backend)
        for length in [*LENGTHS, *LENGTHS[::-1]]:
            wanted = expected(hearing.model, sound(length))
            assert wanted.abs().max() > 0.1
            found = encoded(tower, sound(length))
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_values_of_another_shape_are_refused(hearing: Checkpoint) -> None:
    tower = loaded(hearing, TorchTowerBackend(torch.float32, CPU))
    for bands, frames, length in ((15, 41, 10), (16, 41, 11), (16, 102, 25), (16, 1, 0)):
        with pytest.raises(ValueError, match=rf"the shape \[{bands}, {frames}\]"):
            at_once(tower.encode(TowerInput("audio", length, None, torch.zeros(bands, frames))))


def test_keys_have_no_bias(hearing: Checkpoint) -> None:
    for backend in backends():
        names = [weight.name for weight in loaded(hearing, backend).weights()]
        assert not [name for name in names if name.endswith("k_proj.bias")]
        assert len(set(names)) == len(names)


def test_files_that_leave_out_what_is_usual_are_those_of_7b(tmp_path: Path) -> None:
    config = ModelConfig.from_hf(
        {
            "architectures": ["Qwen2AudioForConditionalGeneration"],
            "audio_config": {"model_type": "qwen2_audio_encoder"},
            "text_config": {"intermediate_size": 11_008, "vocab_size": 156_032},
            "torch_dtype": "bfloat16",
        },
        "Qwen2-Audio-7B",
    )
    assert config.num_layers == 32
    assert config.num_kv_heads == 32
    assert config.head_dim == 128
    tower = config.vision
    assert isinstance(tower, WhisperSpec)
    assert tower.num_layers == 32
    assert tower.head_dim == 64
    assert tower.num_positions == 1_500
    assert tower.kinds == ("audio",)
    assert tower.shown_name == "Whisper of 32 layers for sounds of up to 30 s"
    # Those of transformers, but for biases and norms.
    assert 0.64e9 < tower.num_parameters < 0.65e9


def test_encoders_that_are_not_computed_are_refused() -> None:
    for audio, told in (
        ({"scale_embedding": True}, "scale_embedding"),
        ({"activation_function": "relu"}, "activation_function"),
        ({"d_model": 30, "encoder_attention_heads": 4}, "30 numbers for 4 heads"),
    ):
        with pytest.raises(ModelError, match=told):
            qwen2_audio({"audio_config": audio}, 64)
