"""Engines that serve tiny models of Qwen with pictures and videos: greedy tokens are those of
transformers, and the same whatever happens to a request on its way."""

from __future__ import annotations

import hashlib
import random
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.models.many import Checkpoint
from tests.models.qwen_seeing import (
    END_TOKEN,
    IMAGE_TOKEN,
    QWEN,
    START_TOKEN,
    VIDEO_TOKEN,
    make_qwen,
)
from tests.models.seeing import NUM_NEW, SeeingServed
from tests.seeds import slow
from weft.arrays import FloatArray
from weft.messages.media import MediaItem, MediaKind
from weft.plan.step import Plan, Step

TIME_STEP = 2.5  # positions between two frames


class Seen(NamedTuple):
    """A picture, or a video: its grid of tokens."""

    seed: int
    grid: tuple[int, int, int]

    @property
    def kind(self) -> MediaKind:
        return "image" if self.grid[0] == 1 else "video"

    @property
    def patches(self) -> FloatArray:
        num = 4 * int(np.prod(self.grid))
        frames = 1 if self.kind == "image" else 2
        shape = (num, 3 * frames * 4 * 4)
        return np.random.default_rng(self.seed).standard_normal(shape).astype(np.float32)


class QwenPrompt:
    """Numbers are so many tokens of text."""

    def __init__(self, name: str, seed: int, *parts: int | Seen) -> None:
        draw = random.Random(seed)
        self.ids: list[int] = []
        self.seen = [part for part in parts if isinstance(part, Seen)]
        self.has_times_in_text = name.startswith("qwen3")
        self.time_step = TIME_STEP if name == "qwen2.5-vl" else 1.0
        media: list[MediaItem] = []
        for part in parts:
            if isinstance(part, int):
                self.ids += [draw.randrange(3, 290) for _ in range(part)]
                continue
            frames = [part.patches]
            if self.has_times_in_text:
                frames = np.split(part.patches, part.grid[0])
            grid = (part.grid[0] // len(frames), *part.grid[1:])
            for frame in frames:
                self.ids.append(START_TOKEN)
                media.append(self._item(part, grid, frame))
                token = IMAGE_TOKEN if part.kind == "image" else VIDEO_TOKEN
                self.ids += [token] * media[-1].length
                self.ids.append(END_TOKEN)
        self.media = tuple(media)

    def _item(self, part: Seen, grid: tuple[int, int, int], values: FloatArray) -> MediaItem:
        return MediaItem(
            kind=part.kind,
            digest=hashlib.sha256(values.tobytes() + repr(grid).encode()).digest(),
            start=len(self.ids),
            length=int(np.prod(grid)),
            grid=grid,
            time_step=self.time_step,
            shape=values.shape,
            values=values.tobytes(),
        )


@lru_cache(maxsize=16)
def expected(checkpoint: Checkpoint, prompt: QwenPrompt) -> list[int]:
    """Greedily, by transformers."""
    inputs: dict[str, Any] = {}
    names = {"image": ("pixel_values", "image_grid_thw")}
    names["video"] = ("pixel_values_videos", "video_grid_thw")
    for kind, (pixels, grids) in names.items():
        seen = [one for one in prompt.seen if one.kind == kind]
        if not seen:
            continue
        values = [torch.from_numpy(one.patches) for one in seen]
        if kind == "image":
            values = [
                one.view(len(one), 3, 1, -1).expand(-1, -1, 2, -1).flatten(1) for one in values
            ]
        inputs[pixels] = torch.cat(values)
        inputs[grids] = torch.tensor([(t, 2 * rows, 2 * columns) for _, (t, rows, columns) in seen])
    if prompt.time_step != 1 and "video_grid_thw" in inputs:
        per_second = checkpoint.model.config.vision_config.tokens_per_second
        seconds = [prompt.time_step / per_second] * len(inputs["video_grid_thw"])
        inputs["second_per_grid_ts"] = seconds
    ids = torch.tensor([prompt.ids])
    types = (ids == IMAGE_TOKEN).int() + 2 * (ids == VIDEO_TOKEN).int()
    found = checkpoint.model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=types,
        max_new_tokens=NUM_NEW,
        do_sample=False,
        **inputs,
    )
    return found[0, len(prompt.ids) :].tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=QWEN)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def seeing(name: str, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_qwen(name, tmp_path_factory.mktemp("seeing"))


PICTURE = Seen(1, (1, 4, 5))
WIDE = Seen(2, (1, 2, 9))
VIDEO = Seen(3, (2, 3, 5))


@cache  # what transformers says to them is computed once
def prompts_of(name: str) -> list[QwenPrompt]:
    return [
        QwenPrompt(name, 1, 5, PICTURE, 9),
        QwenPrompt(name, 2, 3, PICTURE, 7, WIDE, 4),
        QwenPrompt(name, 3, 6, VIDEO, 4),
        QwenPrompt(name, 4, WIDE, WIDE, 11, VIDEO, 2, PICTURE, 1),
    ]


@pytest.mark.parametrize(
    "settings", [{}, {"kernels": "torch", "chunked_prefill_size": -1}], ids=["kernels", "torch"]
)
def test_tokens_are_those_of_transformers(
    seeing: Checkpoint, name: str, settings: dict[str, Any]
) -> None:
    served = SeeingServed(seeing.folder, **settings)
    prompts = prompts_of(name)
    text = served.send(prompts[0].ids[:5] * 3, NUM_NEW)
    outputs = served.serve(*prompts)
    assert outputs == [expected(seeing, prompt) for prompt in prompts]
    assert len(served.outputs[text]) == NUM_NEW


@pytest.mark.parametrize("chunk", [1, *slow([16])])
def test_pieces_are_as_good_as_whole_prompts(seeing: Checkpoint, name: str, chunk: int) -> None:
    prompts = prompts_of(name)
    settings = {"chunked_prefill_size": chunk, "page_size": 1, "max_encoder_tokens": 1}
    cut = SeeingServed(seeing.folder, **settings)
    assert cut.serve(*prompts) == [expected(seeing, prompt) for prompt in prompts]
    num_parts = len({item.digest for prompt in prompts for item in prompt.media})
    assert cut.num_runs == num_parts


def test_what_was_seen_needs_no_encoder(seeing: Checkpoint, name: str) -> None:
    served = SeeingServed(seeing.folder, page_size=1)
    first = prompts_of(name)[3]
    (once,) = served.serve(first)
    num_runs = served.num_runs
    assert served.serve(first) == [once]
    assert served.num_runs == num_runs
    assert served.cached[1] == len(first.ids) - 1
    # The same one behind another text.
    other = QwenPrompt(name, 9, 8, PICTURE, 3)
    assert served.serve(other) == [expected(seeing, other)]
    assert served.num_runs == num_runs


def test_retracted_requests_go_on_as_if_nothing_had_happened(seeing: Checkpoint, name: str) -> None:
    prompts = prompts_of(name)
    served = SeeingServed(seeing.folder, prefix_cache=False, encoder_cache_tokens=1, overlap=False)
    ids = [served.see(prompt) for prompt in prompts]  # type: ignore[arg-type]
    scheduler = served.engine.scheduler
    num_steps = 0
    while served.engine.has_work:
        served.step()
        num_steps += 1
        if num_steps % 3 == 0:
            scheduler.merge_last_batch()
            for row in scheduler.running_batch.rows[:2].tolist():
                scheduler.retract(scheduler.kv.columns.requests[row])
    assert [served.outputs[id] for id in ids] == [expected(seeing, one) for one in prompts]
    assert scheduler.counters.num_retractions > 3


def test_prefills_that_are_split_by_layers_are_as_good_as_whole_ones(
    seeing: Checkpoint, name: str
) -> None:
    """Beside a request that decodes: what is added behind the first layers (deepstack) is added in
    the pieces that have them."""
    if name == "qwen3.5":
        pytest.skip("pieces of a prefill would not share its states")
    prompts = prompts_of(name)
    served = SeeingServed(seeing.folder, split_prefill_layers=1)
    served.send(prompts[0].ids[:5], 40)
    plans: list[Plan] = []
    launch = served.runner.launch

    def noted(plan: Plan) -> Step:
        plans.append(plan)
        return launch(plan)

    served.runner.launch = noted  # type: ignore[method-assign]
    served.step()
    assert served.serve(*prompts) == [expected(seeing, prompt) for prompt in prompts]
    assert any(plan.layers is not None for plan in plans)


def test_guessed_tokens_stand_where_computed_ones_would(seeing: Checkpoint, name: str) -> None:
    prompts = prompts_of(name)
    served = SeeingServed(seeing.folder, speculative="ngram", max_draft=4, ngram_min=1)
    outputs = served.serve(*prompts)
    assert outputs == [expected(seeing, prompt) for prompt in prompts]


def test_decoders_with_experts_see_as_in_transformers(tmp_path: Path) -> None:
    """With what is added behind their first layers (deepstack)."""
    name = "qwen3-vl-moe"
    seeing = make_qwen(name, tmp_path)
    prompts = prompts_of(name)[1:3]
    outputs = [expected(seeing, prompt) for prompt in prompts]
    for settings in ({"kernels": "torch"}, {"chunked_prefill_size": 7, "page_size": 1}):
        assert SeeingServed(seeing.folder, **settings).serve(*prompts) == outputs
