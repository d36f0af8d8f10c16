"""Pixtral's encoder, inside LLaVA and inside Mistral 3, compared with transformers on tiny random
checkpoints; and pictures whose lines have tokens of text between them, served."""

from __future__ import annotations

import hashlib
import json
import random
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from tests.models.many import Checkpoint
from tests.models.pictures import IMAGE_TOKEN, make_pixtral
from tests.models.seeing import NUM_NEW, SeeingServed
from weft.arrays import FloatArray
from weft.config.model import ModelConfig
from weft.config.vision.pixtral import PixtralSpec
from weft.executor.cpu.tower import CppTowerBackend
from weft.executor.plain.tower import TorchTowerBackend
from weft.messages.media import MediaItem
from weft.models.registry import make_model
from weft.models.vision.tower import Tower, TowerBackend, TowerInput, at_once
from weft.models.vision.towers import make_tower
from weft.ops.cpp.abi import WeightFormat
from weft.ops.cpp.library import Library, Unavailable, load
from weft.ops.plain import PlainOps
from weft.weights.load import load_weights, unread_of

CPU = torch.device("cpu")
BREAK = 301
END = 302
SIDES = {"llava": 4, "mistral3": 8}  # pixels of a token
GRIDS = [(1, 4, 5), (1, 1, 2), (1, 2, 9), (1, 6, 1)]


@pytest.fixture(scope="module", params=SIDES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def seeing(name: str, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_pixtral(name, tmp_path_factory.mktemp("pixtral"))


@pytest.fixture(scope="module")
def kernels() -> Library:
    try:
        return load()
    except Unavailable as problem:
        pytest.skip(str(problem))


def loaded(checkpoint: Checkpoint, backend: TowerBackend) -> Tower:
    config = ModelConfig.from_folder(checkpoint.folder)
    assert isinstance(config.vision, PixtralSpec)
    tower = make_tower(config.vision, backend)
    decoder = make_model(config, PlainOps(torch.float32, CPU))
    load_weights(chain(decoder.weights(), tower.weights()), checkpoint.folder, unread_of(config))
    return tower


def pixels(name: str, grid: tuple[int, int, int], seed: int = 0) -> FloatArray:
    shape = (3, SIDES[name] * grid[1], SIDES[name] * grid[2])
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def features(checkpoint: Checkpoint, values: Tensor) -> Tensor:
    model = checkpoint.model
    sizes = torch.tensor([values.shape[1:]])
    chosen = {"vision_feature_layer": model.config.vision_feature_layer}
    if "Llava" in type(model).__name__:
        chosen["vision_feature_select_strategy"] = "full"
    with torch.inference_mode():
        found = model.model.get_image_features(values[None], image_sizes=sizes, **chosen)
    (vectors,) = found.pooler_output
    return vectors  # type: ignore[no-any-return]


def test_vectors_are_those_of_transformers(seeing: Checkpoint, name: str, kernels: Library) -> None:
    backends: list[TowerBackend] = [
        TorchTowerBackend(torch.float32, CPU),
        CppTowerBackend(kernels, WeightFormat.F32),
    ]
    for backend in backends:
        tower = loaded(seeing, backend)
        for grid in GRIDS:
            values = torch.from_numpy(pixels(name, grid))
            wanted = features(seeing, values)
            assert wanted.abs().max() > 0.02
            given = TowerInput("image", grid[1] * grid[2], grid, values)
            with torch.inference_mode():
                found = at_once(tower.encode(given)).float()
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        wrong = TowerInput("image", 4, (1, 2, 2), torch.zeros(3, 4, 4))
        with pytest.raises(ValueError, match="picture of 2 x 2 tokens has the shape"):
            at_once(tower.encode(wrong))


def test_weights_are_given_back_as_they_came(seeing: Checkpoint, kernels: Library) -> None:
    stored = load_file(seeing.folder / "model.safetensors")
    idle = ("transformer.layers.2.",) if seeing.model.config.model_type == "llava" else ()
    tower = loaded(seeing, CppTowerBackend(kernels, WeightFormat.F32))
    ours = {weight.name: weight for weight in tower.weights()}
    of_tower = [one for one in stored if "vision_tower" in one or "multi_modal" in one]
    for whole in of_tower:
        if not any(part in whole for part in idle):
            short = whole.removeprefix("model.")
            torch.testing.assert_close(ours.pop(short).get(), stored[whole])
    assert not ours


class Seen(NamedTuple):
    seed: int
    rows: int
    columns: int


class LinedPrompt:
    """Numbers are so many tokens of text."""

    def __init__(self, name: str, seed: int, *parts: int | Seen) -> None:
        draw = random.Random(seed)
        self.ids: list[int] = []
        self.pixels: list[FloatArray] = []
        media: list[MediaItem] = []
        for part in parts:
            if isinstance(part, int):
                self.ids += [draw.randrange(3, IMAGE_TOKEN - 10) for _ in range(part)]
                continue
            grid = (1, part.rows, part.columns)
            values = pixels(name, grid, part.seed)
            self.pixels.append(values)
            media.append(
                MediaItem(
                    kind="image",
                    digest=hashlib.sha256(values.tobytes()).digest(),
                    start=len(self.ids),
                    length=part.rows * (part.columns + 1) - 1,
                    line_len=part.columns,
                    grid=grid,
                    shape=values.shape,
                    values=values.tobytes(),
                )
            )
            line = [IMAGE_TOKEN] * part.columns
            for _ in range(part.rows):
                self.ids += [*line, BREAK]
            self.ids[-1] = END
        self.media = tuple(media)


def expected(checkpoint: Checkpoint, prompt: LinedPrompt) -> list[int]:
    sizes = [one.shape[1:] for one in prompt.pixels]
    height, width = (max(side) for side in zip(*sizes, strict=True))
    padded = torch.zeros(len(sizes), 3, height, width)
    for place, one in zip(padded, prompt.pixels, strict=True):
        place[:, : one.shape[1], : one.shape[2]] = torch.from_numpy(one)
    ids = list(prompt.ids)
    for _ in range(NUM_NEW):
        with torch.inference_mode():
            found = checkpoint.model(
                input_ids=torch.tensor([ids]),
                pixel_values=padded,
                image_sizes=torch.tensor(sizes),
            )
        ids.append(int(found.logits[0, -1].argmax()))
    return ids[len(prompt.ids) :]


ONE = Seen(1, 3, 4)
WIDE = Seen(2, 2, 7)
TALL = Seen(3, 5, 1)


def prompts_of(name: str) -> list[LinedPrompt]:
    return [
        LinedPrompt(name, 1, 5, ONE, 9),
        LinedPrompt(name, 2, ONE, 7, WIDE, 4),
        LinedPrompt(name, 3, 3, TALL, WIDE, ONE, 1),
    ]


def test_tokens_are_those_of_transformers(seeing: Checkpoint, name: str) -> None:
    prompts = prompts_of(name)
    outputs = [expected(seeing, prompt) for prompt in prompts]
    for settings in (
        {},
        {"kernels": "torch"},
        {"chunked_prefill_size": 1, "page_size": 1, "max_encoder_tokens": 1},
        {"chunked_prefill_size": 7, "page_size": 2, "overlap": False},
    ):
        served = SeeingServed(seeing.folder, **settings)
        assert served.serve(*prompts) == outputs  # type: ignore[arg-type]
        assert served.num_runs == 3


def test_another_token_between_lines_is_another_prompt(seeing: Checkpoint, name: str) -> None:
    served = SeeingServed(seeing.folder, page_size=1)
    first = LinedPrompt(name, 1, 2, ONE, 3)
    second = LinedPrompt(name, 1, 2, ONE, 3)
    second.ids[2 + 4] = 17
    served.serve(first, second, first)  # type: ignore[arg-type]
    assert served.outputs[1] == expected(seeing, second)
    assert served.num_runs == 1
    again = served.see(first)  # type: ignore[arg-type]
    changed = served.see(second)  # type: ignore[arg-type]
    third = LinedPrompt(name, 1, 2, ONE, 3)
    third.ids[2 + 4] = 18
    other = served.see(third)  # type: ignore[arg-type]
    served.finish()
    assert served.cached[again] == served.cached[changed] == len(first.ids) - 1
    assert served.cached[other] == 2 + 4


def test_a_head_is_tied_where_the_text_alone_says_so(tmp_path: Path) -> None:
    checkpoint = make_pixtral("llava", tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    assert not ModelConfig.from_folder(checkpoint.folder).tie_embeddings
    config["text_config"]["tie_word_embeddings"] = True
    file.write_text(json.dumps(config))
    assert config["tie_word_embeddings"] is False
    assert ModelConfig.from_folder(checkpoint.folder).tie_embeddings
    assert transformers.LlavaConfig.from_pretrained(tmp_path).tie_word_embeddings
