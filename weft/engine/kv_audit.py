"""The accounting of KV memory in service: faults are reported, their pages are quarantined, and the
server continues.

The sum of all pages is checked after every step, which takes a few additions. The owner of each
page is checked when the sum is wrong, when a call asks for it, and when the engine becomes idle.
(In tests, `Scheduler.audit` raises instead.)
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.engine.core import EngineCore
from weft.engine.hooks import Service
from weft.memory.accounting.audit import AccountingError, Fault
from weft.memory.allocator import NOBODY
from weft.messages.control import AuditReply
from weft.observe.log import EventLog

AUDIT_INTERVAL_S = 5.0  # minimum time between audits of an engine that often becomes idle

log = EventLog("kv_audit")


class KvAuditor(Service):
    """Audits and repairs the KV memory of one scheduler. Always attached."""

    name = "the audit of KV memory"

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._scheduler = core.scheduler
        self._calls: list[int] = []  # calls that wait for an audit
        self._known_gap = (0, 0)  # pages and rows that could not be repaired; reported once
        self._audited_at = 0.0

    def ask(self, call: int) -> None:
        """Answer this call with an audit after the next step."""
        self._calls.append(call)
        self._core.hooks.begin_work(self)

    def after_step(self, now: float) -> None:
        # The sums take a few microseconds, a check of every page many more. So it is made only when
        # the engine is idle, and not each time.
        is_wrong = self.gap() != self._known_gap
        is_due = now - self._audited_at >= AUDIT_INTERVAL_S and not self._core.loop.has_work
        if self._calls or is_wrong or is_due:
            self._audit_and_answer(now)

    # The sum of all pages
    #
    #     free + cached (evictable, pinned, protected) + owned by requests + quarantined = all
    #
    # and of all rows: requests that are not in the queue = rows in use.

    def gap(self) -> tuple[int, int]:
        """Pages and rows that are missing in the sums; (0, 0) if all are accounted for."""
        scheduler = self._scheduler
        num_with_row = len(scheduler.requests) - len(scheduler.waiting_queue)
        return scheduler.kv.accounts.imbalance, num_with_row - scheduler.kv.rows.num_used

    def audit(self, now: float) -> list[str]:
        """Check the owner of every page, and repair faults. Returns the faults. No step may be in
        flight.

        A page without an owner, or one that is free and owned, is quarantined. A page with two
        owners has the K and V of neither: both requests end with an error, and all others are
        computed again.
        """
        self._audited_at = now
        try:
            faults = self._repair()
        except AccountingError as exc:  # a page number outside of the pool
            faults = [str(exc)]
        gap = self.gap()
        if gap != self._known_gap:
            pages, rows = gap
            faults.append(f"{pages:+} pages and {rows:+} rows are counted and cannot be found")
            self._known_gap = gap
        self._scheduler.counters.num_faults += len(faults)
        for fault in faults:
            log.error("broken_books", fault=fault)
        return faults

    def _audit_and_answer(self, now: float) -> None:
        core = self._core
        core.settle()
        core.repair_if_in_doubt()
        faults = self.audit(now)
        core.send_output(self._scheduler.outbox.take_output())  # requests that a fault has ended
        calls = self._calls
        self._calls = []
        core.hooks.end_work(self)
        for call in calls:
            core.send(self._reply(call, faults))

    def _reply(self, call: int, faults: list[str]) -> AuditReply:
        kv = self._scheduler.kv
        cache = kv.cache
        # Pages of which requests may copy a part are a part of what is cached.
        num_parts = 0 if kv.copies is None else kv.copies.parts.num_owned
        cached = cache.evictable_pages + cache.pinned_pages + cache.protected_pages
        return AuditReply(
            call=call,
            faults=faults,
            num_pages=kv.allocator.num_pages,
            free=kv.allocator.num_free,
            cached=cached + num_parts,
            held=kv.accounts.num_owned - num_parts,
            rows=kv.rows.num_used,
            quarantined=len(kv.allocator.quarantined),
            total_faults=self._scheduler.counters.num_faults,
        )

    def _repair(self) -> list[str]:
        """Quarantine faulty pages, and end the requests of a page with two owners."""
        scheduler = self._scheduler
        faults = scheduler.kv.accounts.find_faults(scheduler.with_row())
        reports = [self._report(fault) for fault in faults]
        scheduler.kv.accounts.quarantine(faults)
        doubly_owned = [fault for fault in faults if len(fault.users) > 1]
        if doubly_owned:
            self._give_up(doubly_owned)
            # All pages were allocated again, so check again.
            faults = scheduler.kv.accounts.find_faults(scheduler.with_row())
            scheduler.kv.accounts.quarantine(faults)
        if faults:
            self._core.recovery.shrink()
        return reports

    def _give_up(self, faults: Sequence[Fault]) -> None:
        """Pages have two owners: end these requests, and trust nothing else that was computed."""
        scheduler = self._scheduler
        names: set[str] = set()
        for fault in faults:
            names |= set(fault.owners)
        ids = set()
        for name, request in scheduler.with_row().items():
            if name in names:
                ids.add(request.id)
        self._core.recovery.recompute(
            ids, "its KV memory was given to another request, too", "KV memory was given to two"
        )

    def _report(self, fault: Fault) -> str:
        """The fault, and what is known of the page's last owner."""
        scheduler = self._scheduler
        id = scheduler.kv.accounts.last_owner(fault)
        if id == NOBODY:
            return str(fault)
        trace = scheduler.history.trace(id)
        if trace is None:
            return f"{fault}; last given to request {id}"
        last = trace.events[-1]
        happened = f"step {last.step}: {last.kind.value} {last.detail}".rstrip(" )")
        return f"{fault}; last given to {trace.rid} ({happened})"
