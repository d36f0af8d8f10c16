"""Audits of a scheduler, as the engine makes them."""

from __future__ import annotations

from weft.memory.accounting.audit import Fault
from weft.scheduler.scheduler import Scheduler


def audit(scheduler: Scheduler) -> None:
    """Check that every page has one owner. Raises AccountingError."""
    scheduler.kv.accounts.audit(scheduler.with_row())


def find_faults(scheduler: Scheduler) -> list[Fault]:
    """The pages that do not have exactly one owner."""
    return scheduler.kv.accounts.find_faults(scheduler.with_row())
