"""Engines that serve tiny models with pictures, and prompts with pictures in them."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.pictures import IMAGE_TOKEN
from tests.models.windowed import Served
from weft.arrays import FloatArray
from weft.config.model import ModelConfig
from weft.config.vision.pictures import PictureSpec
from weft.messages.media import MediaItem
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams

NUM_NEW = 12


def drawn(seed: int, side: int) -> FloatArray:
    """Pixels [3, side, side] as processors leave them."""
    return np.random.default_rng(seed).standard_normal((3, side, side)).astype(np.float32)


def item_of(pixels: FloatArray, start: int, length: int) -> MediaItem:
    return MediaItem(
        kind="image",
        digest=hashlib.sha256(pixels.tobytes()).digest(),
        start=start,
        length=length,
        shape=pixels.shape,
        values=pixels.tobytes(),
    )


class Prompt:
    """Text with pictures in it, by their seeds: text(20), picture(3), text(5)... of one
    checkpoint."""

    def __init__(self, folder: Path, seed: int, *parts: int) -> None:
        """Parts from 100 on are pictures, others so many random tokens."""
        spec = ModelConfig.from_folder(folder).vision
        assert isinstance(spec, PictureSpec)
        side = spec.encoder.image_size
        draw = random.Random(seed)
        self.ids: list[int] = []
        self.pixels: list[FloatArray] = []
        media: list[MediaItem] = []
        for part in parts:
            if part < 100:
                self.ids += [draw.randrange(3, IMAGE_TOKEN - 10) for _ in range(part)]
                continue
            pixels = drawn(part, side)
            media.append(item_of(pixels, len(self.ids), spec.num_tokens))
            self.pixels.append(pixels)
            self.ids += [IMAGE_TOKEN] * spec.num_tokens
        self.media = tuple(media)


class SeeingServed(Served):
    """Tells the log probabilities of its tokens, too."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, **settings)
        self.errors: dict[int, str] = {}

    def see(self, prompt: Prompt, *, max_new: int = NUM_NEW, id: int | None = None) -> int:
        id = len(self.outputs) if id is None else id
        self.outputs[id] = []
        sampling = SamplingParams(max_new_tokens=max_new, temperature=0.0, ignore_eos=True)
        ids = np.array(prompt.ids, dtype=np.int32).tobytes()
        message = GenerateRequest(
            id=id, rid=str(id), input_ids=ids, media=prompt.media, sampling=sampling
        )
        self.engine.submit(message)
        return id

    def serve(self, *prompts: Prompt) -> list[list[int]]:
        ids = [self.see(prompt) for prompt in prompts]
        self.finish()
        return [self.outputs[id] for id in ids]

    def finish(self) -> None:
        while self.engine.has_work:
            self.step()

    @property
    def num_runs(self) -> int:
        """Of the encoder."""
        return self.engine.services.stats().total_encoder_runs
