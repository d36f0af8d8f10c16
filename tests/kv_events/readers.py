"""Readers of KV events, and what a tree really has, in the same terms."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from weft.kv_events.mirror import block_hashes
from weft.kv_events.wire import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent
from weft.memory.prefix_cache import TOKEN_BYTES
from weft.memory.radix.cache import RadixCache

EXAMPLE = Path(__file__).parents[2] / "examples" / "kv_events.py"
Blocks = dict[int, tuple[int | None, tuple[int, ...]]]  # by hash: the one before, and the tokens


def example() -> Any:
    """The module of the example that users copy."""
    spec = importlib.util.spec_from_file_location("example_kv_events", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks_of(cache: RadixCache) -> Blocks:
    """What the tree holds, found by walking over it."""
    step = cache.page_size * TOKEN_BYTES
    found: Blocks = {}
    stack: list[tuple[Any, str, int | None]] = [
        (top, top.namespace, None) for top in cache.tree.roots.values()
    ]
    while stack:
        node, namespace, before = stack.pop()
        for start, name in zip(
            range(0, len(node.key), step),
            block_hashes(namespace, before, node.key, step),
            strict=True,
        ):
            tokens = np.frombuffer(node.key[start : start + step], np.uint32).tolist()
            found[name] = (before, tuple(tokens))
            before = name
        stack += [(child, namespace, before) for child in node.children.values()]
    return found


def read(blocks: Blocks, events: Iterable[CacheEvent]) -> None:
    """Follow events as strictly as a reader could: nothing comes twice, goes twice, or hangs on
    nothing, and only what nothing hangs on goes."""
    for event in events:
        match event:
            case AllBlocksCleared():
                blocks.clear()
            case BlockRemoved():
                for name in event.block_hashes:
                    assert name not in {before for before, _ in blocks.values()}
                    del blocks[name]
            case BlockStored():
                before = event.parent_block_hash
                assert before is None or before in blocks
                size = event.block_size
                assert len(event.token_ids) == size * len(event.block_hashes) > 0
                for index, name in enumerate(event.block_hashes):
                    assert name not in blocks
                    tokens = event.token_ids[index * size : (index + 1) * size]
                    blocks[name] = (before, tuple(tokens))
                    before = name
