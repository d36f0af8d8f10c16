"""Tiny models of Gemma 4 with pictures and sounds: their inputs, prompts, and what transformers
computes of them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models.many import Checkpoint
from tests.models.pictures import AUDIO_TOKEN, GEMMA4_AUDIO, IMAGE_TOKEN
from tests.models.windowed import Served
from weft.arrays import FloatArray
from weft.config.model import ModelConfig
from weft.messages.media import MediaItem, MediaKind
from weft.messages.replies import StepOutput
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.models.registry import make_model
from weft.models.vision.tower import Tower, TowerBackend
from weft.models.vision.towers import make_tower
from weft.ops.plain import PlainOps
from weft.weights.load import load_weights, unread_of

CPU = torch.device("cpu")
TOLERANCE = 2e-4  # of log probabilities, float32
NUM_NEW = 8
PATCH = 4
POOL = 2
SIDE = PATCH * POOL  # pixels of a token
NUM_BANDS = GEMMA4_AUDIO["subsampling_conv_channels"][0]


def loaded(checkpoint: Checkpoint, backend: TowerBackend) -> Tower:
    config = ModelConfig.from_folder(checkpoint.folder)
    assert config.vision is not None
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


def frames(num: int, seed: int = 0) -> FloatArray:
    """[num, bands]"""
    draw = np.random.default_rng((seed, num))
    return draw.standard_normal((num, NUM_BANDS)).astype(np.float32)


def heard_inputs_of(sounds: list[FloatArray]) -> dict[str, Tensor]:
    """As transformers' processor pads them, with some frames more."""
    most = max(map(len, sounds)) + 7
    padded = [np.pad(one, ((0, most - len(one)), (0, 0))) for one in sounds]
    is_there = [np.arange(most) < len(one) for one in sounds]
    return {
        "input_features": torch.from_numpy(np.stack(padded)),
        "input_features_mask": torch.from_numpy(np.stack(is_there)),
    }


class Seen(NamedTuple):
    seed: int
    rows: int
    columns: int


class Heard(NamedTuple):
    seed: int
    num_frames: int


class Prompt:
    """Numbers are so many tokens of text."""

    def __init__(self, seed: int, *parts: int | Seen | Heard) -> None:
        draw = random.Random(seed)
        self.ids: list[int] = []
        self.pixels: list[FloatArray] = []
        self.frames: list[FloatArray] = []
        media: list[MediaItem] = []
        for part in parts:
            if isinstance(part, int):
                self.ids += [draw.randrange(3, IMAGE_TOKEN - 10) for _ in range(part)]
                continue
            item = self._seen(part) if isinstance(part, Seen) else self._heard(part)
            media.append(item)
            token = IMAGE_TOKEN if item.kind == "image" else AUDIO_TOKEN
            self.ids += [token] * item.length
        self.media = tuple(media)

    @property
    def inputs(self) -> dict[str, Tensor]:
        """What transformers computes with."""
        found = inputs_of(self.pixels) if self.pixels else {}
        if self.frames:
            found |= heard_inputs_of(self.frames)
        return found

    def _seen(self, part: Seen) -> MediaItem:
        grid = (1, part.rows, part.columns)
        values = pixels(grid, part.seed)
        self.pixels.append(values)
        return self._item("image", values, part.rows * part.columns, grid)

    def _heard(self, part: Heard) -> MediaItem:
        values = frames(part.num_frames, part.seed)
        self.frames.append(values)
        return self._item("audio", values, -(-part.num_frames // 4), None)

    def _item(
        self,
        kind: MediaKind,
        values: FloatArray,
        num_tokens: int,
        grid: tuple[int, int, int] | None,
    ) -> MediaItem:
        return MediaItem(
            kind=kind,
            digest=hashlib.sha256(values.tobytes()).digest(),
            start=len(self.ids),
            length=num_tokens,
            grid=grid,
            shape=values.shape,
            values=values.tobytes(),
        )


# With the kernels, with torch, in pieces of one token, and in chunks.
IN_FOUR_WAYS = pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kernels": "torch", "page_size": 16},
        {"chunked_prefill_size": 1, "page_size": 1, "max_encoder_tokens": 1},
        {"chunked_prefill_size": 7, "page_size": 2, "overlap": False},
    ],
    ids=["kernels", "torch", "pieces", "chunks"],
)
# Requests that were retracted find nothing again.
RETRACTED: dict[str, Any] = {
    "prefix_cache": False,
    "encoder_cache_tokens": 1,
    "overlap": False,
    "speculative": "off",
}


class AnyPrompt(Protocol):
    """What a server gets of a prompt of any model."""

    ids: list[int]
    media: tuple[MediaItem, ...]


class Told(Served):
    """Tells the log probabilities of its tokens, too."""

    def tell(
        self, *prompts: AnyPrompt, between: Callable[[], None] = lambda: None
    ) -> list[tuple[list[int], list[float]]]:
        """`between` is called after each step."""
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
            between()
        return list(found.values())

    def retracting(self) -> Callable[[], None]:
        """To be called after each step: every third time two requests are retracted."""
        scheduler = self.engine.scheduler
        num_steps = 0

        def retract() -> None:
            nonlocal num_steps
            num_steps += 1
            if num_steps % 3 == 0:
                scheduler.merge_last_batch()
                for row in scheduler.running_batch.rows[:2].tolist():
                    scheduler.retract(scheduler.kv.columns.requests[row])

        return retract


def assert_likeliest(logits: Tensor, output: tuple[list[int], list[float]]) -> None:
    """The tokens of an output are the likeliest ones by `logits` [tokens, vocabulary], with
    their log probabilities."""
    tokens, told = output
    logprobs = logits.log_softmax(-1)
    assert logprobs.argmax(-1).tolist() == tokens
    wanted = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(told), wanted, rtol=0, atol=TOLERANCE)


def assert_told(
    checkpoint: Checkpoint, prompt: Prompt, output: tuple[list[int], list[float]]
) -> None:
    """The tokens are the likeliest ones of transformers, with its log probabilities."""
    tokens, _ = output
    ids = torch.tensor([prompt.ids + tokens])
    types = (ids == IMAGE_TOKEN).long()
    model = checkpoint.model
    # As `generate` makes them: those of the unified form differ from what `forward` makes itself.
    masks = model.create_masks_for_generate(
        config=model.config,
        inputs_embeds=torch.zeros(1, ids.shape[1], 1),
        attention_mask=None,
        cache=None,
        position_ids=torch.arange(ids.shape[1])[None],
        mm_token_type_ids=types,
    )
    with torch.inference_mode():
        found = model(input_ids=ids, attention_mask=masks, mm_token_type_ids=types, **prompt.inputs)
    assert_likeliest(found.logits[0, len(prompt.ids) - 1 : -1], output)
