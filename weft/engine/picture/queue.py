"""The first requests that wait, with their reasons, for a picture."""

from __future__ import annotations

from weft.engine.explain import Reasons
from weft.engine.picture.columns import floats
from weft.messages.picture import QueueColumns
from weft.scheduler.features.registry import Features
from weft.scheduler.scheduler import Scheduler

MAX_QUEUED = 50


def queue_columns(
    scheduler: Scheduler,
    features: Features,
    now: float,
) -> QueueColumns:
    """As they came. The policy is not asked for its order: some keep accounts of what they were
    asked."""
    first = scheduler.waiting_queue.first_come(MAX_QUEUED)
    if not first:
        return QueueColumns()
    reasons = Reasons(scheduler, features.grammar.queue)
    return QueueColumns(
        rids=[one.message.rid for one in first],
        reasons=[reasons.of(one) for one in first],
        age_s=floats([now - one.spec.arrival_s for one in first]),
    )
