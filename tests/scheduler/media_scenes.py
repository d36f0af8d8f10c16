"""Requests with pictures in small scenes."""

from __future__ import annotations

from typing import Any

from tests.scheduler.media_oracle import PLACEHOLDER
from tests.scheduler.random_worlds import picture
from tests.scheduler.recorded import RecordedWorld
from tests.scheduler.world import VOCAB
from weft.config.media import MediaRules
from weft.messages.media import MediaItem
from weft.scheduler.settings import SchedulerSettings


def settings(**changes: Any) -> SchedulerSettings:
    values: dict[str, Any] = {
        "num_pages": 400,
        "page_size": 1,
        "max_running_requests": 8,
        "context_length": 160,
        "vocab_size": VOCAB,
        "media": MediaRules(),
        "max_slowdown": -1.0,
        "chunked_prefill_size": 64,
        "aging_s": 0.0,
    }
    return SchedulerSettings(**{**values, **changes})


def seeing(*parts: int) -> dict[str, Any]:
    """A prompt for `World.send`: parts from 1,000 on are pictures (1,000 + number), others
    tokens."""
    prompt: list[int] = []
    media: list[MediaItem] = []
    for part in parts:
        if part < 1_000:
            prompt.append(part)
            continue
        item = picture(part - 1_000, len(prompt))
        media.append(item)
        prompt += [PLACEHOLDER] * item.length
    return {"prompt": prompt, "media": tuple(media), "ignore_eos": True}


def run(world: RecordedWorld, *parts: int, **more: Any) -> int:
    """Serve one prompt. Returns how many tokens were found in the cache."""
    id = world.send(**{**seeing(*parts), "max_new_tokens": 3, **more})
    world.run_dry()
    return world.finished[id].cached_tokens
