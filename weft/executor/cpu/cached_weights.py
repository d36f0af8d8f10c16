"""Weights of the CPU kernels from the weights cache: mapped if they are there, else loaded, stored
and then mapped, too, so that all processes of a machine have them in memory once.

What is not for the cache is loaded as ever: random weights, small models with `auto`, and whatever
cannot be stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from weft.executor.assembly import RunnerSpec
from weft.executor.ranks.build import placement_of
from weft.observe.log import EventLog
from weft.ops.cpp.content import WeightContent
from weft.ops.cpp.library import Library
from weft.ops.cpp.ops import CppOps
from weft.weights.cache.folder import WeightsCache, WeightsKey, cache_at
from weft.weights.cache.key import code_digest, is_settled, source_facts, source_files

AUTO, OFF = "auto", "off"
MIN_BYTES = 64_000_000  # with `auto`; smaller ones load in less time than is worth a file

log = EventLog("engine")


def fill_from_cache(
    spec: RunnerSpec, library: Library, ops: Sequence[CppOps], load: Callable[[], None]
) -> None:
    """Fill the weights that these `ops` have made, which `load` does without a cache. Raises what
    `load` raises."""
    cache = _cache_of(spec)
    if cache is None:
        load()
        return
    content = WeightContent(ops)
    sources = source_files(spec.folder)
    try:
        is_old_enough = is_settled(sources)
        key = _key_of(spec, library, content, sources)
    except OSError:  # `load` says which file cannot be read
        load()
        return
    if _map(cache, key, content):
        return
    if not is_old_enough:
        load()
        log.info("weights_not_cached", model=key.model, reason="their files were written just now")
        return
    with cache.making(key) as may_store:
        # Another process may have made them meanwhile.
        if may_store and _map(cache, key, content):
            return
        load()
        if source_facts(sources) != key.facts["files"]:
            log.warning("weights_not_cached", model=key.model, reason="their files have changed")
        elif may_store and cache.store(key, content.layout(), content.blocks()):
            _map(cache, key, content, is_laid_out=True)


def _cache_of(spec: RunnerSpec) -> WeightsCache | None:
    asked = spec.engine.weights_cache
    if asked == OFF or spec.is_dummy:
        return None
    if asked == AUTO and spec.model.weights_bytes < MIN_BYTES:
        return None
    return cache_at("" if asked == AUTO else asked, spec.engine.weights_cache_gb)


def _key_of(
    spec: RunnerSpec, library: Library, content: WeightContent, sources: Sequence[Path]
) -> WeightsKey:
    facts = {
        "files": source_facts(sources),
        "code": code_digest(),
        "kernels": [library.path.name, library.instruction_set],
        "libraries": [torch.__version__, torch.backends.cpu.get_cpu_capability(), np.__version__],
        # The context and the KV cache have no part in weights.
        "model": repr(replace(spec.model, context_length=0, kv_dtype="")),
        "part": list(placement_of(spec).part),
        "sizes": content.sizes(),
    }
    return WeightsKey(spec.model.name, facts)


def _map(
    cache: WeightsCache, key: WeightsKey, content: WeightContent, *, is_laid_out: bool = False
) -> bool:
    """Map the weights of this key into the model. False: the cache does not have them."""
    began = time.monotonic()
    mapped = cache.find(key)
    if mapped is None:
        return False
    if not is_laid_out:
        content.lay_out(mapped.description["layout"])
    content.adopt(mapped.blocks)
    seconds = time.monotonic() - began
    log.info("weights_mapped", model=key.model, gb=mapped.num_bytes / 1e9, seconds=seconds)
    return True
