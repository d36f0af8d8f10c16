"""Chooses the parts of a scheduler by its settings: its policy, its memory, its passes over the
queue, and what plans its steps.

    part      by default          with
    policy    the one named       shadow_policy: Shadowed around it
    memory    KvMemory            a group for each kind of layers with memory of their own
    passes    PrefillScheduler    split_prefill_layers: SplitPrefills around it
    planner   Planner             draft_sources: SpeculativePlanner, with a draft model
                                  DraftingPlanner; split_prefill_layers: SplitPlanner
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.memory.accounting.part_pages import PartPages
from weft.memory.accounting.pins import Pins
from weft.memory.allocator import PageAllocator, RowTable
from weft.memory.radix.cache import RadixCache
from weft.memory.tiers.resume_states import NoResumeStates, ResumeStates
from weft.scheduler.batch import RunningBatch
from weft.scheduler.feature import FeatureHooks
from weft.scheduler.groups.kinds import make_groups
from weft.scheduler.groups.protocol import GroupParts, KvGroup
from weft.scheduler.history import Counters, RequestHistory, ShadowCounts
from weft.scheduler.kv import KvMemory
from weft.scheduler.limits import RequestLimits
from weft.scheduler.outbox import Outbox
from weft.scheduler.pace.pace import Pace
from weft.scheduler.planner import Planner
from weft.scheduler.policies.composed.build import build_policy
from weft.scheduler.policies.composed.shadowed import Shadowed
from weft.scheduler.policies.protocol import Policy, PolicyContext
from weft.scheduler.prefill import PrefillScheduler
from weft.scheduler.request import Columns
from weft.scheduler.settings import SchedulerSettings
from weft.scheduler.speculation.drafting import DraftingPlanner
from weft.scheduler.speculation.guessing import Guesser
from weft.scheduler.speculation.planner import SpeculativePlanner
from weft.scheduler.speculation.sources import make_sources
from weft.scheduler.speculation.speculator import Speculator
from weft.scheduler.split.planner import SplitPlanner
from weft.scheduler.split.prefill import SplitPrefills, unmixed
from weft.scheduler.stages.turns import StageTurns
from weft.scheduler.waiting.line import WaitingLine
from weft.scheduler.waiting.queue import WaitingQueue


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
    pace: Pace
    limits: RequestLimits
    history: RequestHistory
    counters: Counters


def make_policy(
    settings: SchedulerSettings,
    context: PolicyContext,
    outbox: Outbox,
    counts: ShadowCounts,
    before: Policy | None = None,
) -> Policy:
    """The policy that decides, with its shadow if it has one; `before`: the policy that it follows.
    Raises UnknownPolicy."""
    live = build_policy(settings.schedule_policy, context)
    policy = _with_shadow(settings.shadow_policy, live, outbox, counts)
    if isinstance(policy, Shadowed) and isinstance(before, Shadowed):
        policy.remember(before)
    return policy


def switch_shadow(queue: WaitingLine, name: str, outbox: Outbox, counts: ShadowCounts) -> None:
    """Use this policy as the shadow of the queue's from now on; no name: no shadow. The live policy
    is not affected. Raises UnknownPolicy."""
    live = queue.policy
    tags = queue.tags()
    if isinstance(live, Shadowed):
        tags = live.tags_of_live(tags)
        live = live.live
    policy = _with_shadow(name, live, outbox, counts)
    if isinstance(policy, Shadowed):
        tags = policy.introduce(queue, tags)
    outbox.shadow_fault = ""
    queue.go_on_with(policy, tags)


def _with_shadow(name: str, live: Policy, outbox: Outbox, counts: ShadowCounts) -> Policy:
    if not name:
        return live
    context = live.context._replace(report=outbox.shadow_failed)
    shadow = build_policy(name, context)
    return Shadowed(live, shadow, name=name, counts=counts)


def make_memory(settings: SchedulerSettings) -> KvMemory:
    """The KV memory of a model."""
    page_size = settings.page_size
    num_rows = settings.sized_for.max_running_requests
    cache = RadixCache(page_size, shares=False)
    if settings.prefix_cache:
        cache = RadixCache(page_size)
    rows = RowTable(
        num_rows, settings.context_length, page_size, limit=settings.max_running_requests
    )
    allocator = PageAllocator(settings.num_pages, page_size)
    columns = Columns(num_rows, settings.context_length)
    if settings.num_stages > 1:
        columns.turns.append(StageTurns(num_rows, settings))
    pins = Pins(cache)
    groups = make_groups(GroupParts(settings, cache, columns, pins))
    part_pages = None
    if settings.copies_pages and not groups and settings.can_copy_pages:
        part_pages = PartPages(allocator, cache)
    return KvMemory(
        rows,
        allocator,
        cache,
        columns,
        pins=pins,
        groups=groups,
        resume_states=_resume_states(settings, groups),
        part_pages=part_pages,
        keeps_items_unsplit=settings.keeps_items_unsplit,
        repeats_runs=settings.repeats_runs,
    )


def _resume_states(settings: SchedulerSettings, groups: Sequence[KvGroup]) -> ResumeStates:
    """What a sequence needs besides K and V to be resumed, if its KV leaves the pool."""
    block_len = settings.page_size
    if settings.tiers is not None:
        block_len = settings.tiers.block_len
    elif settings.handoff is None:
        return NoResumeStates()
    for group in groups:
        resume_states = group.resume_states(block_len)
        if resume_states is not None:
            return resume_states
    return NoResumeStates()


def make_steps(shared: Shared) -> StepParts:
    """What plans the steps, and the passes over the queue."""
    settings = shared.settings
    if not settings.split_prefill_layers:
        planner = _planner(shared)
        return StepParts(planner, _passes(settings, shared, planner))
    split = SplitPlanner(
        shared.kv,
        shared.hooks,
        settings=settings,
        running=shared.running,
        queue=shared.queue,
        pace=shared.pace,
    )
    unsplit = _passes(unmixed(settings), shared, split)
    passes = SplitPrefills(unsplit, split, history=shared.history, counts=shared.counters.steps)
    return StepParts(split, passes)


def _passes(settings: SchedulerSettings, shared: Shared, planner: Planner) -> PrefillScheduler:
    return PrefillScheduler(
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
        return Planner(shared.kv, shared.hooks, shared.pace)
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
        repeats_runs=settings.repeats_runs,
    )
    longest = settings.max_step_tokens
    if settings.draft is None or settings.draft.source not in settings.draft_sources:
        return SpeculativePlanner(shared.kv, shared.hooks, speculator, longest)
    guesser = Guesser(shared.kv, settings, settings.draft, speculator)
    shared.kv.on_landing(guesser.seen.landed)
    return DraftingPlanner(shared.kv, shared.hooks, speculator, guesser, longest)
