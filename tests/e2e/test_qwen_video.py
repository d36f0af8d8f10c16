"""A video in a prompt of `weft.LLM`, from its file to its tokens, with tiny models of Qwen: as
transformers computes it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.e2e.media_models import FIRST, TEXT, qwen25_vl, saved, tokenizer, without_videos
from weft import LLM
from weft.messages.sampling import SamplingParams
from weft.text.media.families import make_processor

COUNT = 10
MARK = "<|vision_start|><|video_pad|><|vision_end|>"


def qwen3_vl(folder: Path) -> Any:
    tokens = tokenizer(
        "<|vision_start|><|image_pad|><|vision_end|>",
        *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    )
    sizes = {"size": {"shortest_edge": 32 * 32 * 4, "longest_edge": 32 * 32 * 48}}
    halves = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    images = Qwen2VLImageProcessorPil(patch_size=16, **sizes, **halves)
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
    config = transformers.Qwen3VLConfig(
        text_config={**TEXT, "rope_parameters": rope},
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 4,
            "out_hidden_size": TEXT["hidden_size"],
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        vision_start_token_id=FIRST,
        vision_end_token_id=FIRST + 1,
        image_token_id=FIRST + 2,
        video_token_id=FIRST + 3,
    )
    model = transformers.Qwen3VLForConditionalGeneration(config)
    processor = without_videos(transformers.Qwen3VLProcessor)(images, tokens, None)
    return saved(folder, "image", model, processor)


def frames() -> list[Image.Image]:
    random = np.random.default_rng(5)
    noise = random.integers(0, 256, (4, 6, 6, 3), dtype=np.uint8)
    return [Image.fromarray(one).resize((90, 70), Image.Resampling.NEAREST) for one in noise]


def as_gif(pictures: list[Image.Image]) -> bytes:
    file = io.BytesIO()
    first, *others = pictures
    first.save(file, "GIF", save_all=True, append_images=others, duration=250, loop=0)
    return file.getvalue()


def decoded(data: bytes) -> list[Image.Image]:
    found = []
    with Image.open(io.BytesIO(data)) as animation:
        for index in range(4):
            animation.seek(index)
            found.append(animation.convert("RGB"))
    return found


@pytest.mark.parametrize("make", [qwen25_vl, qwen3_vl])
def test_a_video_is_read_as_transformers_reads_it(make: Any, tmp_path: Path) -> None:
    made = make(tmp_path)
    data = as_gif(frames())
    processor = make_processor(tmp_path, json.loads((tmp_path / "config.json").read_text()))
    assert processor is not None
    prepared = processor.video(decoded(data), 4.0)
    text = f"what is in {MARK}?"
    tokens = made.processor.tokenizer(text.replace("<|video_pad|>", prepared.text))["input_ids"]
    ids = torch.tensor([tokens])
    parts = prepared.parts
    grid = parts[0].grid
    assert grid is not None
    num_times = len(parts) * grid[0]
    types = 2 * (ids == FIRST + 3).int()
    more: dict[str, Any] = {}
    if make is qwen25_vl:
        more["second_per_grid_ts"] = [0.5]
    found = made.model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=types,
        pixel_values_videos=torch.from_numpy(np.concatenate([part.values for part in parts])),
        video_grid_thw=torch.tensor([[num_times, 2 * grid[1], 2 * grid[2]]]),
        max_new_tokens=COUNT,
        min_new_tokens=COUNT,
        do_sample=False,
        **more,
    )
    llm = LLM(str(tmp_path), dtype="float32", threads=1)
    (output,) = llm.generate(
        [{"prompt": text, "videos": [data]}],
        SamplingParams(max_new_tokens=COUNT, temperature=0.0, ignore_eos=True),
    )
    assert output.token_ids == found[0, len(tokens) :].tolist()
