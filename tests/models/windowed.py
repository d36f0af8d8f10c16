"""Tiny random models with sliding windows, made by transformers, and engines that serve them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.models.many import GEMMA4, GEMMA4_SMALL, LLAMA4, SHAPE, Checkpoint, saved
from tests.scheduler.accounts import audit
from tests.scheduler.groups import windows_of
from weft.assemble.build import build_engine
from weft.assemble.checkpoint import read_headers
from weft.config.engine import EngineConfig
from weft.config.machine import probe
from weft.config.model import ModelConfig
from weft.config.resolve import resolve
from weft.engine.engine import Engine
from weft.memory.window.group import WindowGroup
from weft.messages.replies import StepOutput
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.scheduler.kv import KvMemory

WINDOW = 16
CONTEXT = 512
ALTERNATING = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
GEMMA3 = {
    "sliding_window": WINDOW,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"],
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "gemma2": ("Gemma2", {"head_dim": 16, **ALTERNATING}),
    "gemma3": ("Gemma3Text", {"head_dim": 16, **GEMMA3}),
    "gemma4": ("Gemma4Text", GEMMA4),
    "gemma4-small": ("Gemma4Text", GEMMA4_SMALL),
    "llama4": ("Llama4Text", {**LLAMA4, "attention_chunk_size": WINDOW}),
    "qwen2": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
}


def make_windowed(name: str, folder: Path, **more: Any) -> Checkpoint:
    """`more`: what its config has besides."""
    kind, changes = FAMILIES[name]
    shape = {**SHAPE, "max_position_embeddings": CONTEXT, **changes, **more}
    config = getattr(transformers, f"{kind}Config")(**shape, attn_implementation="eager")
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)
    return saved(model, folder)


class Served:
    """An engine with a model in it. Settings are those of `weft serve`."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        model = ModelConfig.from_folder(folder)
        given = {"context_length": CONTEXT, "threads": 1, "dtype": "float32", **settings}
        config = EngineConfig(model=str(folder), **given)
        draft = None
        if config.speculative == "mtp":
            draft = model.mtp(read_headers(folder))
            config = replace(config, draft_model=str(folder))
        elif config.draft_model:
            draft = ModelConfig.from_folder(Path(config.draft_model))
        built = build_engine(resolve(config, model, probe(), draft).config, folder)
        assert isinstance(built.engine, Engine)
        self.engine = built.engine
        self.runner = built.runner
        self.outputs: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}

    @property
    def kv(self) -> KvMemory:
        return self.engine.scheduler.kv

    @property
    def windows(self) -> WindowGroup:
        """The memory of layers with windows, which have pages of their own."""
        return windows_of(self.kv)

    def send(self, prompt: Sequence[int], max_new: int) -> int:
        id = len(self.outputs)
        self.outputs[id] = []
        sampling = SamplingParams(max_new_tokens=max_new, temperature=0.0)
        ids = np.array(prompt, dtype=np.int32).tobytes()
        self.engine.submit(GenerateRequest(id=id, rid=str(id), input_ids=ids, sampling=sampling))
        return id

    def step(self) -> None:
        for output in self.engine.step():
            if not isinstance(output, StepOutput):
                continue
            ids = np.frombuffer(output.ids, dtype=np.int64).tolist()
            tokens = np.frombuffer(output.tokens, dtype=np.int32).tolist()
            for id, token in zip(ids, tokens, strict=True):
                self.outputs[id].append(token)
            for finish in output.finished:
                assert finish.reason in ("stop", "length", "abort"), finish
                self.cached[finish.id] = finish.cached_tokens
        audit(self.engine.scheduler)

    def run(self, *prompts: Sequence[int], max_new: int = 24) -> list[int]:
        """Serve prompts side by side. Returns the numbers of their requests."""
        ids = [self.send(prompt, max_new) for prompt in prompts]
        while self.engine.has_work:
            self.step()
        return ids


def assert_greedy(checkpoint: Checkpoint, prompt: Sequence[int], output: Sequence[int]) -> None:
    """Each token is the likeliest one behind those before it, by transformers."""
    logits = checkpoint.logits([*prompt, *output])
    likeliest = logits.argmax(-1).tolist()[len(prompt) - 1 : -1]
    if likeliest != list(output):
        at = next(i for i, token in enumerate(output) if token != likeliest[i])
        top = torch.topk(logits[len(prompt) - 1 + at], 2).values
        raise AssertionError(f"token {at} of {len(output)} differs; {top.tolist()} are likeliest")
