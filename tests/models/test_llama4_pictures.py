"""Llama 4's encoder compared with transformers on a tiny random checkpoint; and log probabilities
of tokens behind tiles, served whole and in chunks."""

from __future__ import annotations

import hashlib
import random
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.models.many import Checkpoint
from tests.models.pictures import IMAGE_TOKEN, SIDE, make_llama4
from tests.models.windowed import Served
from weft.arrays import FloatArray
from weft.config.model import ModelConfig
from weft.config.model_errors import ModelError
from weft.executor.cpu.tower import CppTowerBackend
from weft.executor.plain.tower import TorchTowerBackend
from weft.messages.media import MediaItem
from weft.messages.replies import StepOutput
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.models.registry import make_model
from weft.models.vision.tower import Tower, TowerBackend, TowerInput, at_once
from weft.models.vision.towers import make_tower
from weft.ops.cpp.abi import WeightFormat
from weft.ops.cpp.library import Library, Unavailable, load
from weft.ops.plain import PlainOps
from weft.weights.load import load_weights, unread_of

CPU = torch.device("cpu")
NUM_TOKENS = 4  # of a tile
NUM_NEW = 6


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_llama4(tmp_path_factory.mktemp("llama4"))


@pytest.fixture(scope="module")
def kernels() -> Library:
    try:
        return load()
    except Unavailable as problem:
        pytest.skip(str(problem))


def loaded(checkpoint: Checkpoint, backend: TowerBackend) -> Tower:
    config = ModelConfig.from_folder(checkpoint.folder)
    assert config.vision is not None
    tower = make_tower(config.vision, backend)
    decoder = make_model(config, PlainOps(torch.float32, CPU))
    load_weights(chain(decoder.weights(), tower.weights()), checkpoint.folder, unread_of(config))
    return tower


def tile(seed: int) -> FloatArray:
    return np.random.default_rng(seed).standard_normal((3, SIDE, SIDE)).astype(np.float32)


@torch.inference_mode()
def test_vectors_are_those_of_transformers(seeing: Checkpoint, kernels: Library) -> None:
    backends: list[TowerBackend] = [
        TorchTowerBackend(torch.float32, CPU),
        CppTowerBackend(kernels, WeightFormat.F32),
    ]
    pixels = torch.from_numpy(tile(1))
    features = seeing.model.get_image_features(pixels[None], return_dict=True).last_hidden_state
    expected = seeing.model.multi_modal_projector(features[0])
    assert expected.abs().max() > 0.1
    for backend in backends:
        tower = loaded(seeing, backend)
        found = at_once(tower.encode(TowerInput("image", NUM_TOKENS, None, pixels))).float()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        wrong = TowerInput("image", NUM_TOKENS, None, torch.zeros(3, 8, 8))
        with pytest.raises(ValueError, match=r"a tile has the shape \[3, 8, 8\]; this encoder"):
            at_once(tower.encode(wrong))


def test_weights_are_given_back_and_counted(seeing: Checkpoint, kernels: Library) -> None:
    stored = load_file(seeing.folder / "model.safetensors")
    tower = loaded(seeing, CppTowerBackend(kernels, WeightFormat.F32))
    ours = {weight.name: weight for weight in tower.weights()}
    spec = ModelConfig.from_folder(seeing.folder).vision
    assert spec is not None
    matrices = [weight for weight in ours.values() if len(weight.shape) > 1]
    assert spec.num_parameters == sum(weight.get().numel() for weight in matrices)
    for whole in [name for name in stored if "language_model" not in name]:
        assert torch.equal(ours.pop(whole.removeprefix("model.")).get(), stored[whole])
    assert not ours


@pytest.mark.parametrize(
    ("vision", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act is relu; only 'gelu'"),
        ({"pixel_shuffle_ratio": 0.4}, "pixel_shuffle_ratio is 0.4; a tile has 4 x 4 patches"),
        ({"intermediate_size": 96}, "intermediate_size is 96; the patches of a square have 192"),
        ({"vision_output_dim": 32}, "vision_output_dim is 32"),
    ],
)
def test_encoders_of_other_kinds_are_refused(
    tmp_path: Path, vision: dict[str, Any], message: str
) -> None:
    checkpoint = make_llama4(tmp_path, **vision)
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_folder(checkpoint.folder)


def told(served: Served, ids: list[int], media: tuple[MediaItem, ...]) -> list[tuple[int, float]]:
    """The tokens of an answer and their log probabilities."""
    sampling = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, ignore_eos=True, logprobs=0)
    id = len(served.outputs)
    served.outputs[id] = []
    given = np.array(ids, dtype=np.int32).tobytes()
    served.engine.submit(
        GenerateRequest(id=id, rid=str(id), input_ids=given, media=media, sampling=sampling)
    )
    found: list[tuple[int, float]] = []
    while served.engine.has_work:
        for output in served.engine.step():
            if not isinstance(output, StepOutput):
                continue
            tokens = np.frombuffer(output.tokens, np.int32).tolist()
            for token, said in zip(tokens, output.logprobs, strict=True):
                assert said is not None
                found.append((token, said.logprob))
            for finish in output.finished:
                served.cached[finish.id] = finish.cached_tokens
    return found


@pytest.mark.parametrize(
    "settings",
    [{"page_size": 4}, {"kernels": "torch", "chunked_prefill_size": 7, "page_size": 1}],
    ids=["kernels", "torch in chunks"],
)
def test_log_probabilities_are_those_of_transformers(
    seeing: Checkpoint, settings: dict[str, Any]
) -> None:
    draw = random.Random(2)
    ids = [draw.randrange(3, IMAGE_TOKEN - 10) for _ in range(30)]
    media = []
    tiles = [tile(1), tile(2)]
    for values in tiles:
        digest = hashlib.sha256(values.tobytes()).digest()
        item = MediaItem(
            kind="image",
            digest=digest,
            start=len(ids),
            length=NUM_TOKENS,
            grid=None,
            shape=values.shape,
            values=values.tobytes(),
        )
        media.append(item)
        ids += [IMAGE_TOKEN] * NUM_TOKENS + [7, 8]
    served = Served(seeing.folder, **settings)
    first = told(served, ids, tuple(media))
    again = told(served, ids, tuple(media))
    assert [token for token, _ in again] == [token for token, _ in first]
    assert served.cached[1] >= len(ids) - 4
    served.runner.close()
    tokens = [token for token, _ in first]
    model = seeing.model
    with torch.inference_mode():
        pixels = torch.from_numpy(np.stack(tiles))
        features = model.get_image_features(pixels, return_dict=True).last_hidden_state
        whole = torch.tensor([ids + tokens])
        embeddings = model.get_input_embeddings()(whole)
        vectors = model.multi_modal_projector(features.flatten(0, 1))
        embeddings[whole == IMAGE_TOKEN] = vectors
        logits = model.language_model(inputs_embeds=embeddings).logits[0]
    expected = logits[len(ids) - 1 : -1].log_softmax(-1)
    assert expected.argmax(-1).tolist() == tokens
    wanted = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    found = torch.tensor([logprob for _, logprob in first])
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-4)
