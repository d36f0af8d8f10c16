"""Models that need more than K and V to go on behind a prefix, with a store on disk: what an engine has stored is found
by the next one, and gives the same tokens."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.many import VOCAB, make_checkpoint
from tests.models.windowed import Served, make_windowed
from weft.executor.weights.known import BUNDLED
from weft.messages.cache import GetCache, GetCacheReply, SaveCache, SaveCacheReply

HANG_S = 100.0
STATES = {"context_length": 128, "max_mamba_cache_size": 8, "kv_tokens": 1_024}
WINDOWS = {"kv_tokens": 2_048, "swa_full_tokens_ratio": 0.5, "chunked_prefill_size": 64}


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, VOCAB, length).tolist()


def begin(folder: Path, cache: Path, **settings: Any) -> Served:
    """An engine that knows what is stored."""
    served = Served(
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
    served = compare(checkpoint.folder, cache, 100, 64, **STATES)
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
    assert served.kv.windows.pool.allocator.num_pages < served.kv.allocator.num_pages
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
