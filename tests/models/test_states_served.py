"""Models with layers that keep a state, in stages, and beside layers with windows;
`test_groups_served.py` has what concerns both kinds alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.many import VOCAB, Checkpoint, make_checkpoint
from tests.models.windowed import Served, assert_greedy
from tests.scheduler.groups import find_windows, states_of
from weft.config.model import ModelConfig

CONTEXT = 128  # as the tiny checkpoints have it
LENGTHS = [5, 64, 66, 90]

Serve = Callable[..., Served]


@pytest.fixture(scope="module", params=["lfm2", "qwen3.5", "granite4-mamba"])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def serve() -> Iterator[Serve]:
    served: list[Served] = []

    def start(folder: Path, **settings: object) -> Served:
        served.append(Served(folder, context_length=CONTEXT, **settings))
        return served[-1]

    yield start
    for one in served:
        one.runner.close()


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


@pytest.mark.slow
def test_stages_that_share_the_layers_give_the_same_tokens(
    checkpoint: Checkpoint, serve: Serve
) -> None:
    prompts = [prompt(seed, length) for seed, length in enumerate(LENGTHS)]
    staged = serve(checkpoint.folder, pp_size=2)
    for _ in range(2):  # first computed, then found in part
        for sent, id in zip(prompts, staged.run(*prompts), strict=True):
            assert_greedy(checkpoint, sent, staged.outputs[id])
    assert max(staged.cached.values()) == 88


@pytest.mark.parametrize("family", ["lfm2", "qwen3.5"])
def test_layers_with_windows_beside_layers_with_states_have_pages_of_their_own(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No known family has both, so attention of one that keeps states is given a window here."""
    folder = make_checkpoint(family, tmp_path).folder
    read = ModelConfig.from_folder.__func__  # type: ignore[attr-defined]

    def with_window(kind: type[ModelConfig], *place: Any) -> ModelConfig:
        model = read(kind, *place)
        layers = tuple(
            replace(layer, attention=replace(layer.attention, window=8))
            for layer in model.decoder.layers
        )
        return replace(model, decoder=replace(model.decoder, layers=layers))

    monkeypatch.setattr(ModelConfig, "from_folder", classmethod(with_window))
    prompts = [prompt(length, length) for length in LENGTHS]
    tokens = []
    for one_pool in (False, True):
        served = Served(
            folder,
            context_length=CONTEXT,
            page_size=4,
            chunked_prefill_size=16,
            kv_tokens=1_024,
            swa_full_tokens_ratio=0.25,
            max_mamba_cache_size=12,
            disable_hybrid_swa_memory=one_pool,
        )
        assert (find_windows(served.kv) is None) == one_pool
        states_of(served.kv)
        served.run(*prompts)
        # From cached prefixes, too.
        served.run(*[[*one, 7, 8, 9] for one in prompts])
        tokens.append(served.outputs)
        served.runner.close()
    assert tokens[0] == tokens[1]
