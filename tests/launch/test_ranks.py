"""A model in two processes, as a user has it: the answers of one, with everything that requests may
ask for."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.random_heads import save_eagle3
from tests.launch.loaded import Loaded, answers, load
from tests.nano_adapters import NANO, make_adapter
from tests.seeds import slow
from weft import SamplingParams
from weft.arrays import IntArray
from weft.assemble.rank_processes import explain_end
from weft.cli.main import main
from weft.config.model import ModelConfig
from weft.engine.guard import EngineBroken
from weft.plan.device import (
    KV_CACHE,
    WEIGHTS,
    ReleaseMemory,
    ResumeMemory,
    UpdateFromDisk,
)
from weft.scheduler.speculation.guessing import Guess, Guesser
from weft.weights.load import save_random


@pytest.fixture(scope="module")
def one() -> Loaded:
    return load()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    """Over shared memory; `tests/executor/test_ranks.py` has gloo. A draft model guesses for it,
    and what it has computed is stored."""
    folder = tmp_path_factory.mktemp("two")
    loaded = load(
        tp_size=2,
        dist_backend="shm",
        journal=str(folder / "journal"),
        draft_model=str(NANO.with_name("weft-nano-draft")),
        speculative="draft",
        cache_dir=str(folder / "cache"),
        cache_write="through",
    )
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def stages() -> Iterator[Loaded]:
    loaded = load(pp_size=2)
    yield loaded
    loaded.close()


@pytest.mark.parametrize("num", [21, *slow([200])])
def test_mixed_requests_have_the_answers_of_one_rank(one: Loaded, two: Loaded, num: int) -> None:
    assert answers(two.llm, num) == answers(one.llm, num)
    # Whoever replays the journal knows nothing of other ranks.
    assert main(["replay", two.llm.config.journal, "--check"]) == 0


def test_mixed_requests_have_the_same_bits_where_layers_are_divided(
    one: Loaded, stages: Loaded, tmp_path: Path
) -> None:
    assert answers(stages.llm, 14) == answers(one.llm, 14)
    params = SamplingParams(max_new_tokens=4, temperature=0.0, logprobs=2, prompt_logprobs=1)
    for loaded in (one, stages):
        loaded.llm.load_adapter("a", make_adapter(tmp_path / "adapter", 3))
    ours, theirs = (
        loaded.llm.generate("import os\n", params, adapter="a")[0] for loaded in (stages, one)
    )
    assert ours.token_ids == theirs.token_ids
    for mine, other in zip(ours.logprobs, theirs.logprobs, strict=True):
        assert mine.top_logprobs == other.top_logprobs
    for loaded in (one, stages):
        loaded.llm.unload_adapter("a")


@pytest.mark.parametrize(
    "settings",
    [{"dist_backend": "shm"}, *slow([{"dist_backend": "tcp", "kernels": "torch"}])],
    ids=str,
)
def test_a_divided_head_guesses_what_a_whole_one_guesses(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guessed: list[list[int]] = []
    keep = Guesser.keep

    def noted(self: Guesser, guess: Guess, tokens: IntArray) -> None:
        guessed.append(tokens.tolist())
        keep(self, guess, tokens)

    monkeypatch.setattr(Guesser, "keep", noted)
    monkeypatch.setattr(Guesser, "_count", lambda *args: min(3, args[-1]))
    head = str(save_eagle3(tmp_path / "head"))
    found: list[tuple[list[list[int]], list[list[int]]]] = []
    for ranks in ({"tp_size": 1}, {"tp_size": 2, **settings}):
        guessed.clear()
        loaded = load(draft_model=head, speculative="eagle3", **ranks)
        params = SamplingParams(max_new_tokens=16, temperature=0.8, seed=3)
        prompts = ("import os\n", "def f(x):\n" * 9)
        tokens = [loaded.llm.generate(prompt, params)[0].token_ids for prompt in prompts]
        found.append((tokens, list(guessed)))
        loaded.close()
    assert found[0] == found[1]
    assert len(found[0][1]) > 16


def test_stored_pages_of_all_ranks_are_read_again(one: Loaded, two: Loaded) -> None:
    """Those of rank 1 lie in memory that rank 0 has, too."""
    prompt = "# stored\n" + "def f(x):\n" * 30
    params = SamplingParams(max_new_tokens=8, temperature=0.0)
    expected = one.llm.generate(prompt, params)[0].token_ids
    assert two.llm.generate(prompt, params)[0].token_ids == expected
    cached_tokens = 0
    deadline = time.monotonic() + 60
    while cached_tokens < 64:
        assert time.monotonic() < deadline, "nothing was read"
        time.sleep(0.01)
        assert two.built.engine.scheduler.flush_cache()
        again = two.llm.generate(prompt, params)[0]
        assert again.token_ids == expected
        cached_tokens = again.cached_tokens


def test_log_probabilities_are_those_of_one_rank(one: Loaded, two: Loaded) -> None:
    params = SamplingParams(max_new_tokens=4, temperature=0.0, logprobs=2, prompt_logprobs=1)
    ours, theirs = (loaded.llm.generate("import os\n", params)[0] for loaded in (two, one))
    for mine, other in zip(ours.logprobs, theirs.logprobs, strict=True):
        assert abs(mine.logprob - other.logprob) < 1e-3
    assert len(ours.prompt_logprobs) == len(theirs.prompt_logprobs)


def test_adapters_are_divided_with_the_weights(one: Loaded, two: Loaded, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "adapter", 3)
    params = SamplingParams(max_new_tokens=12, temperature=0.0)
    found = []
    for loaded in (one, two):
        loaded.llm.load_adapter("a", folder)
        plain, changed = (
            loaded.llm.generate("import os\n", params, adapter=name)[0].token_ids
            for name in ("", "a")
        )
        assert plain != changed
        found.append((plain, changed))
        loaded.llm.unload_adapter("a")
    assert found[0] == found[1]


def test_new_weights_and_released_memory_are_those_of_all_ranks(
    one: Loaded, two: Loaded, tmp_path: Path
) -> None:
    save_random(ModelConfig.from_folder(NANO), tmp_path / "model.safetensors")
    before = answers(one.llm, 3)
    for loaded in (one, two):
        assert loaded.ask(UpdateFromDisk(str(tmp_path))).ok
        assert loaded.built.engine.scheduler.flush_cache()
    changed = answers(one.llm, 3)
    assert answers(two.llm, 3) == changed != before
    tags = (WEIGHTS, KV_CACHE)
    released = two.ask(ReleaseMemory(tags))
    assert released.ok
    assert released.num_bytes > 0.9 * one.ask(ReleaseMemory(tags)).num_bytes
    for loaded in (one, two):
        assert loaded.ask(ResumeMemory(tags)).ok
        assert loaded.ask(UpdateFromDisk(str(NANO))).ok
        assert loaded.built.engine.scheduler.flush_cache()
    assert answers(two.llm, 3) == before


@pytest.mark.parametrize("which", ["two", "stages"])
def test_a_killed_rank_ends_requests_with_an_error_and_is_named(
    which: str, request: pytest.FixtureRequest
) -> None:
    """The last test of these: the rank is gone afterwards."""
    loaded: Loaded = request.getfixturevalue(which)
    ranks = loaded.built.ranks
    assert ranks is not None
    told = threading.Event()
    reasons: list[str] = []

    def note(reason: str) -> None:
        reasons.append(reason)
        told.set()

    ranks.on_lost(note)
    (pid,) = ranks.pids
    os.kill(pid, signal.SIGKILL)
    assert told.wait(240)
    assert reasons == ["rank 1 was ended by SIGKILL (signal 9)"]
    params = SamplingParams(max_new_tokens=4)
    with pytest.raises(EngineBroken, match=r"rank 1|another rank"):
        loaded.llm.generate(["x"] * 20, params)


def test_the_end_of_a_rank_is_reported_by_its_signal() -> None:
    assert explain_end(3, -9) == "rank 3 was ended by SIGKILL (signal 9)"
    assert "rank 1 ended with exit status 2" in explain_end(1, 2)
