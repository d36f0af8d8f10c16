"""200 mixed requests to a model in two ranks and to the same in one, in float32: the same tokens,
whatever happens between them.

    python -m tests.launch.ranks_proof

Adapters, grammars, penalties, seeds, several completions, log probabilities and hidden states, of
prompts that come in chunks while memory runs short; after every 25 of them other weights, memory
that is released and resumed, or an empty cache. It is no test, because it takes a minute. The
status is 1 if an answer differs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tests.launch.loaded import Loaded, load, mixed_requests
from tests.nano_adapters import NANO, make_adapter
from weft.config.model import ModelConfig
from weft.plan.device import KV_CACHE, WEIGHTS, ReleaseMemory, ResumeMemory, UpdateFromDisk
from weft.weights.load import save_random

ROUNDS = 8
EACH = 25
CLOSE = 1e-3  # log probabilities and vectors of sums in another order


def ask_all(loaded: Loaded, turn: int) -> list[Any]:
    """The requests of a round, in three groups: without an adapter, and with each."""
    prompts, params = mixed_requests(EACH * ROUNDS)
    found: list[Any] = []
    for group, adapter in enumerate(("", "a", "b")):
        which = range(turn * EACH + group, (turn + 1) * EACH, 3)
        own = [params[index] for index in which]
        own[-1] = msgspec.structs.replace(own[-1], hidden_states="last")
        texts = [f"{adapter}{turn} {prompts[index]}" for index in which]
        found += loaded.llm.generate(texts, own, adapter=adapter)
    return found


def between(loaded: Loaded, turn: int, folder: Path) -> None:
    """What happens to the model behind a round."""
    tags = (WEIGHTS, KV_CACHE)
    requests: list[list[Any]] = [
        [UpdateFromDisk(str(folder))],
        [ReleaseMemory(tags), ResumeMemory(tags)],
        [UpdateFromDisk(str(NANO))],
        [],
    ]
    for request in requests[turn % len(requests)]:
        reply = loaded.ask(request)
        assert reply.ok, reply.message
    assert loaded.built.engine.scheduler.flush_cache()


def differences(ours: list[Any], theirs: list[Any]) -> int:
    """Of two lists of outputs."""
    found = 0
    for mine, other in zip(ours, theirs, strict=True):
        same = mine.token_ids == other.token_ids
        for one, two in zip(mine.logprobs or (), other.logprobs or (), strict=True):
            same &= abs(one.logprob - two.logprob) < CLOSE
        if other.hidden_states is not None:
            same &= np.allclose(mine.hidden_states, other.hidden_states, atol=CLOSE)
        found += not same
    return found


def prove(folder: Path) -> int:
    """How many of the answers differ."""
    settings = {"enable_return_hidden_states": True, "max_loaded_loras": 2}
    one = load(**settings)
    two = load(tp_size=2, dist_backend="shm", **settings)
    save_random(ModelConfig.from_folder(NANO), folder / "model.safetensors")
    for loaded in (one, two):
        for seed, name in enumerate("ab"):
            loaded.llm.load_adapter(name, make_adapter(folder / name, seed))
    num_outputs = 0
    num_different = 0
    for turn in range(ROUNDS):
        ours = ask_all(two, turn)
        theirs = ask_all(one, turn)
        num_outputs += len(theirs)
        num_different += differences(ours, theirs)
        for loaded in (two, one):
            between(loaded, turn, folder)
    two.close()
    print(f"{EACH * ROUNDS} requests, {num_outputs} answers: {num_different} differ")
    return num_different


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(1 if prove(Path(temporary)) else 0)
