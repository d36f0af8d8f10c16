"""Gemma 4's encoder compared with transformers on tiny random checkpoints; and log probabilities of
tokens behind pictures, served whole, in chunks and from the cache."""

from __future__ import annotations

import hashlib
import random
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.models.many import Checkpoint
from tests.models.pictures import GEMMA4, IMAGE_TOKEN, make_gemma4
from tests.models.windowed import Served
from weft.arrays import FloatArray
from weft.config.model import ModelConfig
from weft.config.model_errors import ModelError
from weft.config.vision.gemma4 import Gemma4TowerSpec
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
TOLERANCE = 2e-4  # of log probabilities, float32
NUM_NEW = 8
PATCH = 4
POOL = 2
SIDE = PATCH * POOL  # pixels of a token
GRIDS = [(1, 3, 4), (1, 1, 2), (1, 2, 7), (1, 5, 1)]


@pytest.fixture(scope="module", params=GEMMA4)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_gemma4(request.param, tmp_path_factory.mktemp("gemma4"))


@pytest.fixture(scope="module")
def kernels() -> Library:
    try:
        return load()
    except Unavailable as problem:
        pytest.skip(str(problem))


def loaded(checkpoint: Checkpoint, backend: TowerBackend) -> Tower:
    config = ModelConfig.from_folder(checkpoint.folder)
    assert isinstance(config.vision, Gemma4TowerSpec)
    tower = make_tower(config.vision, backend)
    decoder = make_model(config, PlainOps(torch.float32, CPU))
    load_weights(chain(decoder.weights(), tower.weights()), checkpoint.folder, unread_of(config))
    return tower


def pixels(grid: tuple[int, int, int], seed: int = 0) -> FloatArray:
    shape = (3, SIDE * grid[1], SIDE * grid[2])
    return np.random.default_rng(seed).random(shape).astype(np.float32)


def inputs_of(pictures: list[FloatArray]) -> dict[str, Tensor]:
    """As transformers' processor pads them: patches, and their columns and rows."""
    cut = []
    for one in pictures:
        rows, columns = one.shape[1] // PATCH, one.shape[2] // PATCH
        by_patch = one.reshape(3, rows, PATCH, columns, PATCH).transpose(1, 3, 2, 4, 0)
        at = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), -1).reshape(-1, 2)
        cut.append((by_patch.reshape(rows * columns, -1), at))
    most = max(len(at) for _, at in cut)
    patches = [np.pad(one, ((0, most - len(one)), (0, 0))) for one, _ in cut]
    places = [np.pad(at, ((0, most - len(at)), (0, 0)), constant_values=-1) for _, at in cut]
    return {
        "pixel_values": torch.from_numpy(np.stack(patches)),
        "image_position_ids": torch.from_numpy(np.stack(places)),
    }


def test_vectors_are_those_of_transformers(seeing: Checkpoint, kernels: Library) -> None:
    backends: list[TowerBackend] = [
        TorchTowerBackend(torch.float32, CPU),
        CppTowerBackend(kernels, WeightFormat.F32),
    ]
    for backend in backends:
        tower = loaded(seeing, backend)
        for grid in GRIDS:
            values = pixels(grid)
            with torch.inference_mode():
                found = seeing.model.model.get_image_features(**inputs_of([values]))
                wanted = torch.cat(list(found.pooler_output))
                given = TowerInput("image", grid[1] * grid[2], grid, torch.from_numpy(values))
                vectors = at_once(tower.encode(given)).float()
            assert wanted.abs().max() > 0.1
            torch.testing.assert_close(vectors, wanted, rtol=1e-4, atol=1e-5)
        wrong = TowerInput("image", 4, (1, 2, 2), torch.zeros(3, 4, 4))
        with pytest.raises(ValueError, match="picture of 2 x 2 tokens has the shape"):
            at_once(tower.encode(wrong))
        long = TowerInput("image", 33, (1, 1, 33), torch.zeros(3, SIDE, 33 * SIDE))
        with pytest.raises(ValueError, match="66 patches of a side; at most are 64"):
            at_once(tower.encode(long))


def test_weights_are_given_back_as_they_came(seeing: Checkpoint, kernels: Library) -> None:
    stored = load_file(seeing.folder / "model.safetensors")
    tower = loaded(seeing, CppTowerBackend(kernels, WeightFormat.F32))
    ours = {weight.name: weight for weight in tower.weights()}
    for whole in [one for one in stored if "vision" in one]:
        torch.testing.assert_close(
            ours.pop(whole.removeprefix("model.")).get(), stored[whole], rtol=0, atol=0
        )
    assert not ours


def test_the_memory_of_the_tower_counts(seeing: Checkpoint) -> None:
    tower = loaded(seeing, TorchTowerBackend(torch.float32, CPU))
    matrices = sum(weight.get().numel() for weight in tower.weights() if len(weight.shape) > 1)
    spec = ModelConfig.from_folder(seeing.folder).vision
    assert spec is not None
    assert spec.num_parameters == matrices


class Seen(NamedTuple):
    seed: int
    rows: int
    columns: int


class Prompt:
    """Numbers are so many tokens of text."""

    def __init__(self, seed: int, *parts: int | Seen) -> None:
        draw = random.Random(seed)
        self.ids: list[int] = []
        self.pixels: list[FloatArray] = []
        media: list[MediaItem] = []
        for part in parts:
            if isinstance(part, int):
                self.ids += [draw.randrange(3, IMAGE_TOKEN - 10) for _ in range(part)]
                continue
            grid = (1, part.rows, part.columns)
            values = pixels(grid, part.seed)
            self.pixels.append(values)
            num = part.rows * part.columns
            media.append(
                MediaItem(
                    kind="image",
                    digest=hashlib.sha256(values.tobytes()).digest(),
                    start=len(self.ids),
                    length=num,
                    grid=grid,
                    shape=values.shape,
                    values=values.tobytes(),
                )
            )
            self.ids += [IMAGE_TOKEN] * num
        self.media = tuple(media)


class Told(Served):
    """Tells the log probabilities of its tokens, too."""

    def tell(self, *prompts: Prompt) -> list[tuple[list[int], list[float]]]:
        found: dict[int, tuple[list[int], list[float]]] = {}
        for prompt in prompts:
            id = len(self.outputs)
            self.outputs[id] = []
            found[id] = ([], [])
            sampling = SamplingParams(
                max_new_tokens=NUM_NEW, temperature=0.0, ignore_eos=True, logprobs=0
            )
            ids = np.array(prompt.ids, dtype=np.int32).tobytes()
            self.engine.submit(
                GenerateRequest(
                    id=id, rid=str(id), input_ids=ids, media=prompt.media, sampling=sampling
                )
            )
        while self.engine.has_work:
            for output in self.engine.step():
                if not isinstance(output, StepOutput):
                    continue
                ids_of = np.frombuffer(output.ids, np.int64).tolist()
                tokens = np.frombuffer(output.tokens, np.int32).tolist()
                for id, token, said in zip(ids_of, tokens, output.logprobs, strict=True):
                    assert said is not None
                    found[id][0].append(token)
                    found[id][1].append(said.logprob)
                for finish in output.finished:
                    assert finish.reason == "length", finish
                    self.cached[finish.id] = finish.cached_tokens
        return list(found.values())


def assert_told(
    checkpoint: Checkpoint, prompt: Prompt, output: tuple[list[int], list[float]]
) -> None:
    """The tokens are the likeliest ones of transformers, with its log probabilities."""
    tokens, told = output
    ids = torch.tensor([prompt.ids + tokens])
    types = (ids == IMAGE_TOKEN).long()
    with torch.inference_mode():
        found = checkpoint.model(input_ids=ids, mm_token_type_ids=types, **inputs_of(prompt.pixels))
    logprobs = found.logits[0, len(prompt.ids) - 1 : -1].log_softmax(-1)
    assert logprobs.argmax(-1).tolist() == tokens
    wanted = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(told), wanted, rtol=0, atol=TOLERANCE)


ONE = Seen(1, 3, 4)
WIDE = Seen(2, 2, 7)
TALL = Seen(3, 5, 1)
PROMPTS = [Prompt(1, 5, ONE, 9), Prompt(2, ONE, 7, WIDE, 4), Prompt(3, 3, TALL, 2, WIDE, 1, ONE, 1)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kernels": "torch"},
        {"chunked_prefill_size": 1, "page_size": 1, "max_encoder_tokens": 1},
        {"chunked_prefill_size": 7, "page_size": 2, "overlap": False},
    ],
    ids=["kernels", "torch", "pieces", "chunks"],
)
def test_log_probabilities_are_those_of_transformers(
    seeing: Checkpoint, settings: dict[str, Any]
) -> None:
    served = Told(seeing.folder, **settings)
    for prompt, output in zip(PROMPTS, served.tell(*PROMPTS), strict=True):
        assert_told(seeing, prompt, output)
    assert served.engine.services.stats().total_encoder_runs == 3


def test_a_picture_that_was_seen_is_found_in_the_cache(seeing: Checkpoint) -> None:
    served = Told(seeing.folder, page_size=1)
    first = PROMPTS[1]
    (once,) = served.tell(first)
    (again,) = served.tell(first)
    assert again == once
    assert served.cached[1] == len(first.ids) - 1
    # Behind other text, and beside another picture.
    moved = Prompt(4, 2, ONE, 3)
    changed = Prompt(2, ONE, 7, Seen(9, 2, 7), 4)
    for place, prompt in enumerate((moved, changed), 2):
        (output,) = served.tell(prompt)
        assert_told(seeing, prompt, output)
        assert served.cached[place] == (0 if prompt is moved else 12 + 7)
    assert served.engine.services.stats().total_encoder_runs == 3


@pytest.mark.parametrize(
    ("vision", "message"),
    [
        ({"num_key_value_heads": 1}, "3 heads with 1 KV heads"),
        ({"head_dim": 18}, "a head_dim of 18; a multiple of 4"),
        ({"hidden_activation": "silu"}, "hidden_activation"),
    ],
)
def test_encoders_of_other_kinds_are_refused(
    tmp_path: Path, vision: dict[str, Any], message: str
) -> None:
    checkpoint = make_gemma4("small", tmp_path, **vision)
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_folder(checkpoint.folder)
