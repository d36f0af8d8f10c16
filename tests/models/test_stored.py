"""Models that need more than K and V to go on behind a prefix, with a store on disk: what an engine has stored is found
by the next one, and gives the same tokens."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from tests.models.many import VOCAB, make_checkpoint
from tests.models.pictures import make_with_pictures
from tests.models.seeing import Prompt, SeeingServed
from tests.models.windowed import Served, make_windowed
from weft.messages.cache import GetCache, GetCacheReply, SaveCache, SaveCacheReply
from weft.messages.control import FlushCache
from weft.messages.requests import Abort
from weft.messages.weights import ReleaseMemoryOccupation, ResumeMemoryOccupation
from weft.weights.known import BUNDLED

HANG_S = 100.0
STATES = {"context_length": 128, "max_mamba_cache_size": 8, "kv_tokens": 1_024}
WINDOWS = {"kv_tokens": 2_048, "swa_full_tokens_ratio": 0.5, "chunked_prefill_size": 64}


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows how long prompts take to compute, so every request waits for what is stored, however slow that is."""
    monkeypatch.setattr("weft.engine.tiers.reads.LEAST_MEASURED", 1_000_000)


S = TypeVar("S", bound=Served)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, VOCAB, length).tolist()


def begin(folder: Path, cache: Path, kind: type[S] = Served, **settings: Any) -> S:
    """An engine that knows what is stored."""
    served = kind(
        folder,
        page_size=4,
        cache_dir=str(cache),
        cache_block=16,
        cache_write="back",
        cache_wait_ms=int(1_000 * HANG_S),
        **settings,
    )
    deadline = time.monotonic() + HANG_S
    while told(served).disk != "open":
        assert time.monotonic() < deadline, told(served)
        time.sleep(0.005)
    return served


def told(served: Served) -> GetCacheReply:
    reply = served.engine.submit(GetCache(call=1))
    assert isinstance(reply, GetCacheReply)
    return reply


def save(served: Served) -> None:
    """Write all that is cached."""
    reply = served.engine.submit(SaveCache(call=2, timeout_s=HANG_S))
    deadline = time.monotonic() + HANG_S
    while reply is None:
        assert time.monotonic() < deadline
        for one in served.engine.step():
            if isinstance(one, SaveCacheReply):
                reply = one
        time.sleep(0.002)
    assert isinstance(reply, SaveCacheReply)
    assert reply.success, reply
    assert reply.written_bytes


def compare(folder: Path, cache: Path, length: int, found: int, **settings: Any) -> Served:
    """Serve prompts, restart, and serve them again: the same tokens, `found` of the first one from what is stored.
    Returns the last engine."""
    shared = prompt(1, length)
    other = [*shared[: length // 2], *prompt(2, length // 3)]
    served = begin(folder, cache, **settings)
    first = [served.outputs[served.run(one, max_new=8)[0]] for one in (shared, other)]
    save(served)
    served.runner.close()

    served = begin(folder, cache, **settings)
    for one, expected in zip((shared, other), first, strict=True):
        (id,) = served.run(one, max_new=8)
        assert served.outputs[id] == expected
    assert served.cached[0] == found
    assert told(served).disk_hit_tokens >= served.cached[0]
    assert told(served).faults == 0
    return served


@pytest.mark.parametrize("name", ["lfm2", "qwen3.5"])
def test_states_are_found_after_a_restart(name: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(name, tmp_path / "model")
    cache = tmp_path / "cache"
    served = compare(checkpoint.folder, cache, 100, 96, **STATES)
    served.runner.close()
    # Without the endings nothing can be resumed, and all is computed.
    found = []
    for path in cache.rglob("*.kv"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        found.append(path)
    served = begin(checkpoint.folder, cache, **STATES)
    (id,) = served.run(prompt(1, 100), max_new=8)
    assert served.cached[id] == 0
    assert told(served).faults
    assert len(list(cache.rglob("*.kv"))) < len(found)
    served.runner.close()


def test_windows_are_found_after_a_restart(tmp_path: Path) -> None:
    checkpoint = make_windowed("gemma3", tmp_path / "model")
    served = compare(checkpoint.folder, tmp_path / "cache", 300, 288, **WINDOWS)
    assert served.windows.pool.allocator.num_pages < served.kv.allocator.num_pages
    served.runner.close()


def test_a_draft_model_guesses_behind_what_was_found(tmp_path: Path) -> None:
    pair = {
        "draft_model": str(BUNDLED.parent / "weft-nano-draft"),
        "speculative": "draft",
        "context_length": 512,
        "kv_tokens": 2_048,
    }
    served = compare(BUNDLED, tmp_path / "cache", 300, 288, **pair)
    assert served.engine.services.stats().total_drafts_draft > 0
    served.runner.close()


def test_prompts_with_pictures_are_found_after_a_restart(tmp_path: Path) -> None:
    folder = make_with_pictures("llava", tmp_path / "model").folder
    seen = Prompt(folder, 1, 20, 101, 30)
    other = Prompt(folder, 1, 20, 102, 30)  # the same text beside another picture
    cache = tmp_path / "cache"
    served = begin(folder, cache, SeeingServed)
    outputs = served.serve(seen)
    save(served)
    served.runner.close()

    served = begin(folder, cache, SeeingServed)
    assert served.serve(seen) == outputs
    assert served.cached[0] == (len(seen.ids) - 1) // 16 * 16
    assert served.num_runs == 0  # nobody looks at the picture again
    served.serve(other)
    assert served.cached[1] == 20  # the text before it, which is in memory now
    assert served.num_runs == 1
    served.runner.close()


HOSTED = {
    "kernels": "torch",
    "page_size": 16,
    "kv_tokens": 640,
    "context_length": 192,
    "cache_host_ratio": 8.0,
    "cache_wait_ms": int(1_000 * HANG_S),
}


def test_what_the_pool_has_no_room_for_comes_back_from_the_memory_of_the_host() -> None:
    prompts = [prompt(seed, 150) for seed in range(6)]
    alone = Served(BUNDLED, kernels="torch", kv_tokens=4_096, context_length=192)
    expected = [alone.outputs[id] for id in alone.run(*prompts, max_new=3)]
    alone.runner.close()
    served = Served(BUNDLED, **HOSTED)
    for _ in range(2):
        for one, output in zip(prompts, expected, strict=True):
            (id,) = served.run(one, max_new=3)
            assert served.outputs[id] == output
            settle(served)
    second = [served.cached[id] for id in range(6, 12)]
    assert sum(second) >= 0.95 * 6 * 128
    reply = told(served)
    assert reply.host_hit_tokens >= 0.5 * sum(second)  # the rest was in the pool still
    assert reply.disk.startswith("this server was started without")
    served.runner.close()


def test_an_abort_leaves_the_memory_of_the_host_as_it_is_and_a_flush_empties_it() -> None:
    served = Served(BUNDLED, **HOSTED, cache_write="through")
    one = prompt(3, 150)
    (first,) = served.run(one, max_new=3)
    settle(served)
    id = served.send(one, 3)
    served.engine.submit(Abort(ids=(id,)))
    del served.outputs[id]
    for seed in range(4, 9):  # for which others have to go from the pool
        served.run(prompt(seed, 150), max_new=3)
        settle(served)
    (again,) = served.run(one, max_new=3)
    assert served.cached[again] == told(served).host_hit_tokens == 128
    settle(served)
    empty = [FlushCache(call=5), ReleaseMemoryOccupation(call=6, tags=["kv_cache"])]
    for call in empty:
        assert told(served).host_blocks > 0
        served.engine.submit(call)
        until(served, call.call)
        assert told(served).host_blocks == 0
        if isinstance(call, ReleaseMemoryOccupation):
            served.engine.submit(ResumeMemoryOccupation(call=7))
            until(served, 7)
        (last,) = served.run(one, max_new=3)
        assert served.outputs[last] == served.outputs[again] == served.outputs[first]
        assert served.cached[last] == 0
        settle(served)
    served.runner.close()


def until(served: Served, call: int) -> None:
    """Step until a call has been answered."""
    deadline = time.monotonic() + HANG_S
    while not any(getattr(one, "call", 0) == call for one in served.engine.step()):
        assert time.monotonic() < deadline


def settle(served: Served) -> None:
    """Let copies end that are under way, as they do while a server waits for requests."""
    deadline = time.monotonic() + HANG_S
    while True:
        served.step()
        service = served.engine.services.tiers
        assert service is not None
        service._writes.next_look_s = -1.0
        if not (service.feature.worthy or service._transfers.table):  # type: ignore[attr-defined]
            return
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_host_and_then_the_disk_have_what_is_not_in_the_pool(tmp_path: Path) -> None:
    disk = {"cache_dir": str(tmp_path), "cache_write": "through"}
    prompts = [prompt(seed, 150) for seed in range(4)]
    outputs: list[list[list[int]]] = []
    for ratio in (2.0, 0.3):  # at first there is more room in the memory of the host than later
        served = Served(BUNDLED, **{**HOSTED, "cache_host_ratio": ratio}, **disk)
        while told(served).disk != "open":
            served.step()
            time.sleep(0.005)
        outputs.append([])
        for one in prompts:
            (id,) = served.run(one, max_new=3)
            outputs[-1].append(served.outputs[id])
            settle(served)
        served.runner.close()
    assert outputs[0] == outputs[1]
    assert told(served).disk_hit_tokens >= 3 * 128
