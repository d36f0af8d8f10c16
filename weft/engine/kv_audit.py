"""The books of KV memory in service: a fault is told, its pages are taken out of circulation, and the server goes on.

The sum of all pages is checked after every step, in a few additions. Who owns each of them is looked up when the sum is
wrong, when somebody asks, and when the engine becomes idle. (In tests `Scheduler.audit` raises instead.)
"""

from __future__ import annotations

from weft.memory.accounting.audit import FREE, AccountingError, Fault, find_faults
from weft.memory.accounting.ledger import NOBODY
from weft.messages.control import AuditReply
from weft.observe.log import EventLog
from weft.scheduler.request import NO_ROW
from weft.scheduler.scheduler import Scheduler

AUDIT_INTERVAL_S = 5.0  # between audits of an engine that becomes idle again and again

log = EventLog("kv_audit")


class KvAuditor:
    """Checks and mends the books of one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._known_gap = (0, 0)  # what could not be mended: it is told once
        self._audited_at = 0.0

    def balance(self) -> bool:
        """Whether the sums hold: of pages and of rows. Costs a few microseconds."""
        return self._gap() == self._known_gap

    def is_due(self, now: float) -> bool:
        """Whether an idle engine should look again."""
        return now - self._audited_at >= AUDIT_INTERVAL_S

    def audit(self, now: float) -> list[str]:
        """Look up the owner of every page, mend what is wrong, and tell it. No step is in flight.

        A page that nobody owns, or that is free and owned at once, is taken out of circulation. One that two have been
        given holds the K and V of neither: its requests end with an error, all others are computed anew.
        """
        scheduler = self._scheduler
        self._audited_at = now
        try:
            told = self._repair()
        except AccountingError as exc:  # page numbers that are none
            told = [str(exc)]
        gap = self._gap()
        if gap != self._known_gap:
            pages, rows = gap
            told.append(f"{pages:+} pages and {rows:+} rows are counted and cannot be found")
            self._known_gap = gap
        scheduler.counters.num_faults += len(told)
        for fault in told:
            log.error("broken_books", fault=fault)
        return told

    def reply(self, call: int, faults: list[str]) -> AuditReply:
        kv = self._scheduler.kv
        return AuditReply(
            call=call,
            faults=faults,
            num_pages=kv.allocator.num_pages,
            free=kv.allocator.num_free,
            cached=kv.cache.evictable_pages + kv.cache.pinned_pages + kv.cache.protected_pages,
            held=kv.num_owned,
            rows=kv.rows.num_used,
            quarantined=len(kv.allocator.quarantined),
            total_faults=self._scheduler.counters.num_faults,
        )

    def _gap(self) -> tuple[int, int]:
        scheduler = self._scheduler
        num_with_row = len(scheduler.requests) - len(scheduler.waiting_queue)
        return scheduler.kv.imbalance, num_with_row - scheduler.kv.rows.num_used

    def _repair(self) -> list[str]:
        allocator = self._scheduler.kv.allocator
        faults = self._faults()
        told = [self._told(fault) for fault in faults]
        for fault in faults:
            allocator.quarantine(fault.page, is_owned=bool(set(fault.owners) - {FREE}))
        if any(len(set(fault.owners) - {FREE}) > 1 for fault in faults):
            self._give_up(faults)
            for fault in self._faults():
                allocator.quarantine(fault.page, is_owned=bool(set(fault.owners) - {FREE}))
        if faults:
            self._shrink()
        return told

    def _faults(self) -> list[Fault]:
        scheduler = self._scheduler
        return find_faults(scheduler.kv.allocator, scheduler.kv.cache, scheduler.owned_pages())

    def _give_up(self, faults: list[Fault]) -> None:
        """Pages were given to two: end the requests among them, trust nothing else that was computed."""
        scheduler = self._scheduler
        names = {
            name for fault in faults for name in fault.owners if len(set(fault.owners) - {FREE}) > 1
        }
        held = zip(
            scheduler.owned_pages(),
            (r for r in scheduler.requests.values() if r.row != NO_ROW),
            strict=True,
        )
        ids = {request.id for name, request in held if name in names}
        scheduler.recompute(
            ids, "its KV memory was given to another request, too", "KV memory was given to two"
        )

    def _shrink(self) -> None:
        """Less fits than before: requests end earlier, and what could never run any more ends now."""
        scheduler = self._scheduler
        scheduler.max_len = min(scheduler.settings.context_length, scheduler.kv.capacity)
        too_long = {
            request.id
            for request in scheduler.requests.values()
            if request.fill_len >= scheduler.max_len
        }
        if too_long:
            scheduler.recompute(
                too_long, "there is no KV memory for it any more", "KV memory was lost"
            )
        for request in scheduler.requests.values():
            request.max_len = min(request.max_len, scheduler.max_len)
            if request.row != NO_ROW:
                scheduler.columns.max_len[request.row] = request.max_len

    def _told(self, fault: Fault) -> str:
        """The fault, and what is known of the page's last holder."""
        history, id = self._scheduler.history, int(self._scheduler.kv.ledger.last_owner[fault.page])
        if id == NOBODY:
            return str(fault)
        trace = history.trace(id)
        if trace is None:
            return f"{fault}; last given to request {id}"
        last = trace.events[-1]
        return (
            f"{fault}; last given to {trace.rid} (step {last.step}: {last.kind.value} {last.detail})".rstrip(
                " )"
            )
            + ")"
        )
