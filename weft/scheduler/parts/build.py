"""Chooses the parts of a scheduler by its settings: its memory, its passes over the queue, and what
plans its steps.

    part      by default          with
    memory    KvMemory            windows, states, tiers: their own
    passes    PrefillScheduler    windows, states: their own; split_prefill_layers: SplitPrefills
                                  around them
    planner   Planner             draft_sources: SpeculativePlanner, with a draft model
                                  DraftingPlanner; split_prefill_layers: SplitPlanner
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from weft.config.drafts import MODEL
from weft.config.handoff import DECODE
from weft.memory.allocator import PageAllocator, RowTable
from weft.memory.prefix_cache import NoPrefixCache, PrefixCache
from weft.memory.radix import RadixCache
from weft.scheduler.batch import RunningBatch
from weft.scheduler.feature import FeatureHooks
from weft.scheduler.history import Counters, RequestHistory
from weft.scheduler.kv import KvMemory
from weft.scheduler.limits import RequestLimits
from weft.scheduler.pace.pace import Pace
from weft.scheduler.planner import Planner
from weft.scheduler.prefill import PrefillScheduler
from weft.scheduler.queue import WaitingQueue
from weft.scheduler.request import Columns
from weft.scheduler.settings import SchedulerSettings, TierSettings
from weft.scheduler.speculation.drafting import DraftingPlanner
from weft.scheduler.speculation.guessing import Guesser
from weft.scheduler.speculation.planner import SpeculativePlanner
from weft.scheduler.speculation.sources import make_sources
from weft.scheduler.speculation.speculator import Speculator
from weft.scheduler.split.planner import SplitPlanner
from weft.scheduler.split.prefill import SplitPrefills, unmixed
from weft.scheduler.stages.columns import TurnColumns
from weft.scheduler.states.admission import StatefulPrefills
from weft.scheduler.states.kv import StatefulKv
from weft.scheduler.tiers.groups import TieredStatefulKv, TieredWindowedKv
from weft.scheduler.tiers.kv import TieredKv
from weft.scheduler.windows.admission import WindowedPrefills
from weft.scheduler.windows.kv import WindowedKv


class MemoryParts(NamedTuple):
    kv: KvMemory
    prefills: type[PrefillScheduler]  # class that admits requests to this memory


class StepParts(NamedTuple):
    planner: Planner
    prefills: PrefillScheduler | SplitPrefills


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What the parts of a scheduler share."""

    settings: SchedulerSettings
    kv: KvMemory
    queue: WaitingQueue
    running: RunningBatch
    hooks: FeatureHooks
    pace: Pace | None
    limits: RequestLimits
    history: RequestHistory
    counters: Counters


def make_memory(settings: SchedulerSettings) -> MemoryParts:
    """The KV memory of a model, and the class that admits requests to it."""
    page_size = settings.page_size
    num_rows = settings.sized_for.max_running_requests
    cache: PrefixCache = NoPrefixCache(page_size)
    if settings.prefix_cache:
        cache = RadixCache(page_size)
    rows = RowTable(
        num_rows, settings.context_length, page_size, limit=settings.max_running_requests
    )
    allocator = PageAllocator(settings.num_pages, page_size)
    columns: Columns
    if settings.num_stages > 1:
        columns = TurnColumns(num_rows, settings)
    else:
        columns = Columns(num_rows, settings.context_length)
    kv: KvMemory
    passes: type[PrefillScheduler] = PrefillScheduler
    tiers = settings.tiers
    if settings.handoff is not None and tiers is None:
        # A server that lends needs no transfers, but the endings of sequences that have some.
        has_endings = settings.windows is not None or settings.states is not None
        if has_endings or settings.handoff.mode == DECODE:
            tiers = TierSettings(block_len=page_size)
    if tiers is not None and settings.windows is not None:
        kv = TieredWindowedKv(
            rows, allocator, cache, columns, settings.windows, settings.chunk_len, tiers
        )
        passes = WindowedPrefills
    elif tiers is not None and settings.states is not None:
        kv = TieredStatefulKv(rows, allocator, cache, columns, settings.states, tiers)
        passes = StatefulPrefills
    elif tiers is not None:
        kv = TieredKv(rows, allocator, cache, columns, tiers)
    elif settings.windows is not None:
        kv = WindowedKv(rows, allocator, cache, columns, settings.windows, settings.chunk_len)
        passes = WindowedPrefills
    elif settings.states is not None:
        kv = StatefulKv(rows, allocator, cache, columns, settings.states)
        passes = StatefulPrefills
    else:
        kv = KvMemory(rows, allocator, cache, columns)
    kv.keeps_items_whole = settings.keeps_items_whole
    return MemoryParts(kv, passes)


def make_steps(shared: Shared, kind: type[PrefillScheduler]) -> StepParts:
    """What plans the steps, and the passes over the queue; `kind` admits requests to the
    memory."""
    settings = shared.settings
    if not settings.split_prefill_layers:
        planner = _planner(shared)
        return StepParts(planner, _passes(kind, settings, shared, planner))
    split = SplitPlanner(
        shared.kv,
        shared.hooks,
        settings=settings,
        running=shared.running,
        queue=shared.queue,
        pace=shared.pace,
    )
    whole = _passes(kind, unmixed(settings), shared, split)
    passes = SplitPrefills(whole, split, history=shared.history, counters=shared.counters)
    return StepParts(split, passes)


def _passes(
    kind: type[PrefillScheduler], settings: SchedulerSettings, shared: Shared, planner: Planner
) -> PrefillScheduler:
    return kind(
        settings,
        kv=shared.kv,
        queue=shared.queue,
        running=shared.running,
        hooks=shared.hooks,
        pace=shared.pace,
        limits=shared.limits,
        planner=planner,
        history=shared.history,
        counters=shared.counters,
    )


def _planner(shared: Shared) -> Planner:
    """The planner of steps that compute all layers."""
    settings = shared.settings
    if not settings.draft_sources:
        return Planner(shared.kv, shared.hooks)
    assert shared.pace is not None, "drafts are made by what steps cost"
    speculator = Speculator(
        shared.kv.columns,
        shared.hooks,
        shared.pace,
        shared.history,
        shared.counters,
        make_sources(
            settings.draft_sources, shared.kv.cache, settings.ngram_max, settings.ngram_min
        ),
        settings.max_draft,
        # Pages before a window are freed while a run may still be computed again.
        repeats_runs=settings.draft is None and settings.windows is None,
    )
    longest = settings.max_step_tokens
    if settings.draft is None or MODEL not in settings.draft_sources:
        return SpeculativePlanner(shared.kv, shared.hooks, speculator, longest)
    guesser = Guesser(shared.kv, settings, settings.draft, speculator)
    if isinstance(shared.kv, TieredKv):
        shared.kv.on_landing = guesser.landed
    return DraftingPlanner(shared.kv, shared.hooks, speculator, guesser, longest)
