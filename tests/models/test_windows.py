"""Models with sliding windows give transformers' tokens though their windows keep no more than these see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.models.many import VOCAB, Checkpoint
from tests.models.windowed import FAMILIES, WINDOW, Served, assert_greedy, make_windowed

LENGTHS = [WINDOW // 2, WINDOW, 2 * WINDOW, 8 * WINDOW]
NUM_GREEDY = 24

Serve = Callable[..., Served]


@pytest.fixture(scope="module", params=list(FAMILIES))
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    return make_windowed(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def serve() -> Iterator[Serve]:
    served: list[Served] = []

    def start(folder: Path, **settings: object) -> Served:
        served.append(Served(folder, **settings))
        return served[-1]

    yield start
    for one in served:
        one.runner.close()


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunk_len", [32, 160])
def test_tokens_are_those_of_transformers(
    checkpoint: Checkpoint, serve: Serve, kernels: str, page_size: int, chunk_len: int
) -> None:
    served = serve(
        checkpoint.folder,
        kernels=kernels,
        page_size=page_size,
        chunked_prefill_size=chunk_len,
        kv_tokens=1_024,
        swa_full_tokens_ratio=0.5,
    )
    prompts = [prompt(length, length) for length in LENGTHS]
    for id, one in zip(served.run(*prompts), prompts, strict=True):
        assert_greedy(checkpoint, one, served.outputs[id])
    # The same ones again, and their continuations, begin behind what is cached.
    again = [[*one, *served.outputs[id], *prompt(7, 9)] for id, one in enumerate(prompts)]
    hits = served.run(*prompts, *again)
    for id, one in zip(hits, [*prompts, *again], strict=True):
        assert_greedy(checkpoint, one, served.outputs[id])
    whole_pages = LENGTHS[-1] // page_size * page_size
    assert served.cached[hits[-1]] >= whole_pages


@pytest.mark.parametrize("overlap", [False, True])
def test_a_retracted_request_goes_on_with_the_same_tokens(
    checkpoint: Checkpoint, serve: Serve, overlap: bool
) -> None:
    served = serve(
        checkpoint.folder,
        page_size=1,
        chunked_prefill_size=32,
        kv_tokens=512,
        swa_full_tokens_ratio=0.16,
        max_running_requests=16,
        schedule_conservativeness=0.0,
        overlap=overlap,
        # When memory runs short must not follow from how long steps took.
        max_slowdown=-1.0,
        speculative="off",
    )
    prompts = [prompt(100 + i, 5) for i in range(12)]
    # Where one ends, others come in that are not expected to grow.
    for i, one in enumerate(prompts):
        served.send(one, 2 if i % 3 == 0 else 60)
    served.run()
    for id, one in enumerate(prompts):
        assert_greedy(checkpoint, one, served.outputs[id])
    assert served.engine.scheduler.stats().total_retractions > 0
