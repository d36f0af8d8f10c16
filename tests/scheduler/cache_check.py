"""Whether the prefix cache holds what it says: the K and V of its keys' tokens, of all that go
before them, and of the present weights.

The oracle's K and V of a token are a hash of all tokens up to it. So a page under a wrong key, a
page that somebody else has written to, one of old weights and one of a step that went wrong all
differ from the chain of hashes that the keys give.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.scheduler.oracle_runner import OracleRunner, adapter_weights, extend_hash
from weft.arrays import IntArray, LongArray
from weft.memory.allocator import slots_of
from weft.memory.prefix_cache import CacheKey
from weft.memory.radix.cache import RadixCache


def adapter_of(namespace: str) -> str:
    """The adapter whose K and V are below the root of a namespace (`Request.cache_key`)."""
    return namespace.split("\0")[1] if namespace.startswith("\0") else ""


def states_of(runner: OracleRunner, key: CacheKey) -> list[int]:
    """What a runner computes at each token of a sequence."""
    weights = runner.weights + adapter_weights(adapter_of(key.namespace))
    state = 0
    states = []
    for token in np.frombuffer(key.tokens, dtype=np.int32).tolist():
        state = extend_hash(state, token, weights)
        states.append(state)
    return states


def resume_state_memory(
    runner: OracleRunner, resume_state: IntArray, page_size: int
) -> tuple[LongArray, IntArray]:
    """The memory of resume states, and where in it the places `resume_state` are."""
    if runner.windows is not None:
        return runner.windows.state, slots_of(resume_state, page_size)
    assert runner.states is not None
    return runner.states.state, resume_state


class CacheCheck:
    """Remembers the chains of keys that it has seen: a tree changes little from one step to the
    next."""

    def __init__(self, runner: OracleRunner) -> None:
        self._runner = runner
        self._chains: dict[tuple[int, int, bytes], list[int]] = {}
        self.num_tokens = 0  # that were compared

    def check(self, cache: RadixCache) -> None:
        """Compare every token that is cached, but for those that a launched step is still to
        compute."""
        if not cache.shares:
            return
        slots, expected = [], []
        ends: dict[int, int] = {}  # the state behind a node, by its identity
        for node in cache.tree.nodes():
            chain = self.chain(ends.get(id(node.parent), 0), node)
            ends[id(node)] = chain[-1]
            slots.append(slots_of(np.frombuffer(node.pages, dtype=np.int32), cache.page_size))
            expected += chain
        if not slots:
            return
        at = np.concatenate(slots)
        is_computed = ~np.isin(at, self._runner.pending_slots())
        computed = self._runner.state[at[is_computed]]
        assert (computed == np.array(expected, dtype=np.int64)[is_computed]).all(), (
            "a page is not what its key says"
        )
        self.num_tokens += len(computed)

    def chain(self, before: int, node: Any) -> list[int]:
        top = node
        while top.parent is not None:
            top = top.parent
        weights = self._runner.weights + adapter_weights(adapter_of(top.namespace))
        key = before, weights, node.key
        chain = self._chains.get(key)
        if chain is None:
            chain = []
            for token in np.frombuffer(node.key, dtype=np.int32).tolist():
                before = extend_hash(before, token, weights)
                chain.append(before)
            self._chains[key] = chain
        return chain
