"""Weights of the CPU kernels from the weights cache: mapped if they are there, else loaded, stored
and then mapped, too, so that all processes of a machine have them in memory once.

What is not for the cache is loaded as ever: random weights, small models with `auto`, and whatever
cannot be stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from weft.executor.assembly import RunnerSpec
from weft.executor.cpu.screened_head import HeadCopy
from weft.executor.ranks.build import placement_of
from weft.observe.log import EventLog
from weft.ops.cpp.content import WeightContent
from weft.ops.cpp.library import Library
from weft.ops.cpp.ops import CppOps
from weft.weights.cache.folder import WeightsCache, WeightsKey, cache_at
from weft.weights.cache.key import SourceFiles, code_digest, source_files

AUTO, OFF = "auto", "off"
MIN_BYTES = 64_000_000  # with `auto`; smaller ones load in less time than is worth a file

log = EventLog("engine")


class MappedWeights(NamedTuple):
    """Where the weights of a model are mapped from."""

    cache: WeightsCache
    key: WeightsKey

    def fill_head(self, copy: HeadCopy) -> None:
        """Give the copy of the model's head its content, from the cache as well."""
        name = f"{self.key.model}, head in 8 bits"
        key = WeightsKey(name, {**self.key.facts, "of": "head in 8 bits"})
        if self._map_head(key, copy):
            return
        with self.cache.making(key) as may_store:
            if may_store and self._map_head(key, copy):
                return
            copy.fill()
            if may_store and self.cache.store(key, [], copy.blocks()):
                self._map_head(key, copy)

    def _map_head(self, key: WeightsKey, copy: HeadCopy) -> bool:
        mapped = self.cache.find(key)
        if mapped is not None:
            copy.adopt(mapped.blocks)
        return mapped is not None


def fill_from_cache(
    spec: RunnerSpec, library: Library, ops: Sequence[CppOps], load: Callable[[], None]
) -> MappedWeights | None:
    """Fill the weights that these `ops` have made, which `load` does without a cache. Returns where
    they are mapped from; None: they are not. Raises what `load` raises."""
    cache = _cache_of(spec)
    if cache is None:
        load()
        return None
    content = WeightContent(ops)
    sources = source_files(spec.folder)
    try:
        is_old_enough = sources.is_settled()
        key = _key_of(spec, library, content, sources)
    except OSError:  # `load` says which file cannot be read
        load()
        return None
    mapped = MappedWeights(cache, key)
    if _map(cache, key, content):
        return mapped
    if not is_old_enough:
        load()
        log.info("weights_not_cached", model=key.model, reason="their files were written just now")
        return None
    with cache.making(key) as may_store:
        # Another process may have made them meanwhile.
        if may_store and _map(cache, key, content):
            return mapped
        load()
        if sources.facts() != key.facts["files"]:
            log.warning("weights_not_cached", model=key.model, reason="their files have changed")
            return None
        is_stored = may_store and cache.store(key, content.layout(), content.blocks())
        is_mapped = is_stored and _map(cache, key, content, is_laid_out=True)
        return mapped if is_mapped else None


def _cache_of(spec: RunnerSpec) -> WeightsCache | None:
    asked = spec.engine.weights_cache
    if asked == OFF or spec.is_dummy:
        return None
    if asked == AUTO and spec.model.weights_bytes < MIN_BYTES:
        return None
    return cache_at("" if asked == AUTO else asked, spec.engine.weights_cache_gb)


def _key_of(
    spec: RunnerSpec, library: Library, content: WeightContent, sources: SourceFiles
) -> WeightsKey:
    facts = {
        "files": sources.facts(),
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
