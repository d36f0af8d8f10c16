"""Engines of models with random weights, as `weft serve` would build them, and requests for them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpu_parts.part import Setting
from weft.assemble.build import Built, build_engine
from weft.config.engine import EngineConfig
from weft.config.machine import probe
from weft.config.model import ModelConfig
from weft.config.resolve import resolve
from weft.config.sizing import Sizing
from weft.messages.replies import StepOutput
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams


class Loaded(NamedTuple):
    built: Built
    config: EngineConfig  # resolved
    sizing: Sizing
    seconds: float  # that it took


class Job(NamedTuple):
    prompt: Sequence[int]
    output_len: int
    temperature: float = 0.0


@dataclass
class Outcome:
    tokens: dict[int, list[int]] = field(default_factory=dict)  # by place of the job
    first_s: float = 0.0  # until every request had its first token
    total_s: float = 0.0
    steps: list[tuple[int, float]] = field(
        default_factory=list
    )  # tokens that came together, seconds since those before


def load(setting: Setting, shape: dict[str, Any], folder: Path, **settings: Any) -> Loaded:
    """An engine for the shape; with the weights in `folder` if there are some."""
    (folder / "config.json").write_text(json.dumps(shape))
    asked = EngineConfig(
        model=str(folder),
        device=setting.device,
        speculative="off",  # steps of one token for each request are measured
        load_format="auto" if (folder / "model.safetensors").exists() else "dummy",
        **settings,
    )
    config, sizing = resolve(asked, ModelConfig.from_folder(folder), probe())
    began = time.monotonic()
    return Loaded(build_engine(config, folder), config, sizing, time.monotonic() - began)


def play(loaded: Loaded, jobs: Sequence[Job]) -> Outcome:
    """Submit all jobs at once and run them to their ends, which no token brings about."""
    engine, outcome = loaded.built.engine, Outcome()
    for place, job in enumerate(jobs):
        sampling = SamplingParams(
            max_new_tokens=job.output_len, temperature=job.temperature, ignore_eos=True, seed=place
        )
        ids = np.asarray(job.prompt, np.int32).tobytes()
        refused = engine.submit(
            GenerateRequest(id=place, rid=f"job-{place}", input_ids=ids, sampling=sampling)
        )
        assert refused is None, refused
    began = last = time.perf_counter()
    while engine.has_work:
        for reply in engine.step():
            if not isinstance(reply, StepOutput):
                continue
            assert all(finish.reason == "length" for finish in reply.finished), reply.finished
            now = time.perf_counter()
            for place, token in tokens_of(reply):
                outcome.tokens.setdefault(place, []).append(token)
            outcome.steps.append((len(reply.tokens) // 4, now - last))
            last = now
            if not outcome.first_s and len(outcome.tokens) == len(jobs):
                outcome.first_s = now - began
    outcome.total_s = time.perf_counter() - began
    return outcome


def tokens_of(reply: StepOutput) -> Iterator[tuple[int, int]]:
    ids, tokens = np.frombuffer(reply.ids, np.int64), np.frombuffer(reply.tokens, np.int32)
    return zip(ids.tolist(), tokens.tolist(), strict=True)
