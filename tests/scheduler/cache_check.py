"""Whether the prefix cache holds what it says: the K and V of its keys' tokens, of all that go
before them, and of the present weights.

The oracle's K and V of a token are a hash of all tokens up to it. So a page under a wrong key, a
page that somebody else has written to, one of old weights and one of a step that went wrong all
differ from the chain of hashes that the keys give.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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


class Chain(NamedTuple):
    """The states behind each token of a node's key."""

    states: list[int]
    packed: bytes  # the same, as the memory of K and V has them


class CacheCheck:
    """Remembers the chains of keys that it has seen: a tree changes little from one step to the
    next."""

    def __init__(self, runner: OracleRunner) -> None:
        self._runner = runner
        self._chains: dict[tuple[int, int, bytes], Chain] = {}

    def check(self, cache: RadixCache) -> None:
        """Compare every token that is cached, but for those that a launched step is still to
        compute."""
        if not cache.shares:
            return
        pages: list[bytes] = []
        expected: list[bytes] = []
        for root in cache.tree.roots.values():
            weights = self._weights_below(root)
            open_nodes: list[tuple[Any, int]] = [(root, 0)]  # and the state behind each
            while open_nodes:
                above, state = open_nodes.pop()
                for node in above.children.values():
                    chain = self._chain(state, weights, node.key)
                    pages.append(node.pages)
                    expected.append(chain.packed)
                    if node.children:
                        open_nodes.append((node, chain.states[-1]))
        packed = np.frombuffer(b"".join(pages), dtype=np.int32)
        at = slots_of(packed, cache.page_size)
        wanted = np.frombuffer(b"".join(expected), dtype=np.int64)
        others = at[self._runner.state[at] != wanted]
        is_pending = np.isin(others, self._runner.pending_slots())
        assert is_pending.all(), "a page is not what its key says"

    def chain(self, before: int, node: Any) -> list[int]:
        """The states behind each token of a node, where `before` is the state above it."""
        top = node
        while top.parent is not None:
            top = top.parent
        return self._chain(before, self._weights_below(top), node.key).states

    def _weights_below(self, root: Any) -> int:
        return self._runner.weights + adapter_weights(adapter_of(root.namespace))

    def _chain(self, before: int, weights: int, tokens: bytes) -> Chain:
        key = before, weights, tokens
        chain = self._chains.get(key)
        if chain is None:
            states = []
            for token in np.frombuffer(tokens, dtype=np.int32).tolist():
                before = extend_hash(before, token, weights)
                states.append(before)
            chain = Chain(states, np.array(states, dtype=np.int64).tobytes())
            self._chains[key] = chain
        return chain
