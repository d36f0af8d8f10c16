"""Loads a model three times: without a weights cache, with an empty one, and from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.executor.driver import CONTEXT, KV_TOKENS, MAX_ROWS, NUM_STATES
from weft.config.engine import EngineConfig
from weft.config.model import ModelConfig
from weft.config.resolve import kept_as
from weft.executor.build import load_runner
from weft.executor.runner import TorchRunner
from weft.executor.weights.store import WeightStore
from weft.weights.cache.folder import cache_at

ALL_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def runner_of(folder: Path, weights_cache: str, **settings: Any) -> TorchRunner:
    settings = {"device": "cpu", "kernels": "auto", "threads": 1, **settings}
    config = EngineConfig(weights_cache=weights_cache, **settings)
    model = kept_as(config, ModelConfig.from_folder(folder))
    return load_runner(
        config,
        replace(model, context_length=CONTEXT),
        folder=folder,
        kv_tokens=KV_TOKENS,
        num_state_slots=NUM_STATES if model.state_bytes else 0,
        page_size=1,
        max_rows=MAX_ROWS,
        context_length=CONTEXT,
    )


def content_of(runner: TorchRunner) -> list[torch.Tensor]:
    """The bits of all tensors that store weights, those of a head's copy, too."""
    store = runner.store
    assert isinstance(store, WeightStore)
    tensors = [*store._memory.weights]
    return [tensor.contiguous().view(ALL_BITS[tensor.element_size()]) for tensor in tensors]


def values_of(runner: TorchRunner) -> dict[str, torch.Tensor]:
    store = runner.store
    assert isinstance(store, WeightStore)
    return {name: weight.get() for name, weight in store._weights.items()}


def assert_mapped_as_loaded(folder: Path, cache: Path, **settings: Any) -> None:
    """Weights from the cache have the bits of loaded ones, in each tensor, and by each name."""
    loaded = runner_of(folder, "off", **settings)
    expected = [tensor.clone() for tensor in content_of(loaded)]
    values = values_of(loaded)
    loaded.close()
    for num_files in (0, 1):
        assert len(cache_at(str(cache), 1.0).files()) == num_files
        mapped = runner_of(folder, str(cache), **settings)
        found = content_of(mapped)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
        for name, value in values_of(mapped).items():
            assert torch.equal(value.nan_to_num(nan=7.0), values[name].nan_to_num(nan=7.0)), name
        [file] = cache_at(str(cache), 1.0).files()
        assert file.is_used
        mapped.close()
