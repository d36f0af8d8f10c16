"""Models whose layers have memory of their own, or scores that depend on distances, served: windows
that keep no more than they see, states, and the tokens of transformers whatever the cache and the
scheduler do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.models.many import VOCAB, Checkpoint, make_checkpoint
from tests.models.windowed import CONTEXT, FAMILIES, WINDOW, Served, assert_greedy, make_windowed
from tests.seeds import every_second

Serve = Callable[..., Served]
# Some of each kind of memory; the others take one step after the other.
OVERLAPPED = ("gemma", "llama4", "lfm2", "nemotron-h", "mamba2", "bloom")


class Kind(NamedTuple):
    """A kind of memory, in tests of the same form."""

    make: Callable[[str, Path], Checkpoint]
    context_length: int
    lengths: list[int]  # of prompts
    chunk_lens: tuple[int, int]
    memory: Mapping[str, float]  # enough for all of them
    scarce: Mapping[str, float]  # too little for the requests of one moment
    again_len: int  # tokens of a request that repeats a prompt
    long_len: int  # tokens of a request that others wait for
    least_cached: int  # of a request that continues an earlier one
    has_groups: bool = True  # what is cached is shared in whole pages


WINDOWS = Kind(
    make=make_windowed,
    context_length=CONTEXT,
    lengths=[WINDOW // 2, WINDOW, 2 * WINDOW, 8 * WINDOW],
    chunk_lens=(32, 160),
    memory={"kv_tokens": 1_024, "swa_full_tokens_ratio": 0.5},
    scarce={"kv_tokens": 512, "swa_full_tokens_ratio": 0.16},
    again_len=12,
    long_len=60,
    least_cached=8 * WINDOW,
)
STATES = Kind(
    make=make_checkpoint,
    context_length=128,  # as the tiny checkpoints have it
    lengths=[5, 64, 66, 90],
    chunk_lens=(48, 512),
    memory={"kv_tokens": 2_048, "max_mamba_cache_size": 24},
    scarce={"kv_tokens": 256, "max_mamba_cache_size": 9},
    again_len=4,
    long_len=90,
    least_cached=64,
)
# Scores that depend on distances, or keys that are chosen, wherever chunks and what is cached
# begin.
DISTANCES = Kind(
    make=make_checkpoint,
    context_length=128,
    lengths=[5, 64, 66, 90],
    chunk_lens=(48, 512),
    memory={"kv_tokens": 2_048},
    scarce={"kv_tokens": 256},
    again_len=4,
    long_len=90,
    least_cached=64,
    has_groups=False,
)
MODELS = [(family, WINDOWS) for family in FAMILIES] + [
    (family, STATES)
    for family in ("lfm2", "qwen3.5", "nemotron-h", "falcon-h1", "mamba2", "minimax")
]
MODELS += [(family, DISTANCES) for family in ("bloom", "mpt", "deepseek-v3.2")]


class Tried(NamedTuple):
    checkpoint: Checkpoint
    kind: Kind


@pytest.fixture(scope="module", params=MODELS, ids=[family for family, _ in MODELS])
def tried(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tried:
    family, kind = request.param
    return Tried(kind.make(family, tmp_path_factory.mktemp(family)), kind)


@pytest.fixture
def serve(tried: Tried) -> Iterator[Serve]:
    served: list[Served] = []

    def start(**settings: object) -> Served:
        context_length = tried.kind.context_length
        served.append(Served(tried.checkpoint.folder, context_length=context_length, **settings))
        return served[-1]

    yield start
    for one in served:
        one.runner.close()


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


@pytest.mark.pairs
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunks", [0, 1])
def test_tokens_are_those_of_transformers(
    tried: Tried, serve: Serve, chunks: int, page_size: int, kernels: str
) -> None:
    checkpoint, kind = tried
    served = serve(
        kernels=kernels,
        page_size=page_size,
        chunked_prefill_size=kind.chunk_lens[chunks],
        **kind.memory,
    )
    prompts = [prompt(length, length) for length in kind.lengths]
    for id, one in zip(served.run(*prompts, max_new=18), prompts, strict=True):
        assert_greedy(checkpoint, one, served.outputs[id])
    # The same ones again, and their continuations, begin behind what is cached.
    again = [[*one, *served.outputs[id], *prompt(7, 9)] for id, one in enumerate(prompts)]
    hits = served.run(*prompts, *again, max_new=kind.again_len)
    for place, id in enumerate(hits[: len(prompts)]):
        assert served.outputs[id] == served.outputs[place][: kind.again_len]
    for id, one in zip(hits[len(prompts) :], again, strict=True):
        assert_greedy(checkpoint, one, served.outputs[id])
    # All but the last token, in whole pages.
    repeated = hits[len(prompts) - 1]
    shared = page_size if kind.has_groups else 1
    assert served.cached[repeated] == (kind.lengths[-1] - 1) // shared * shared
    assert served.cached[hits[-1]] >= kind.least_cached


@pytest.mark.parametrize(
    "tried", every_second(MODELS), ids=[family for family, _ in MODELS], indirect=True
)
def test_retracted_requests_go_on_with_the_same_tokens(tried: Tried, serve: Serve) -> None:
    checkpoint, kind = tried
    served = serve(
        page_size=1,
        chunked_prefill_size=32,
        max_running_requests=16,
        schedule_conservativeness=0.0,
        overlap=tried.checkpoint.folder.name.startswith(OVERLAPPED),
        # When memory runs short must not follow from how long steps took.
        max_slowdown=-1.0,
        speculative="off",
        **kind.scarce,
    )
    prompts = [prompt(100 + i, 5) for i in range(12)]
    # Where one ends, others come in that are not expected to grow.
    for i, one in enumerate(prompts):
        served.send(one, 2 if i % 3 == 0 else kind.long_len)
    served.run()
    for id, one in enumerate(prompts):
        assert_greedy(checkpoint, one, served.outputs[id])
    assert served.engine.scheduler.stats().total_retractions > 0
