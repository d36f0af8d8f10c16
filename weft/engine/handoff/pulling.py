"""On a server that continues prompts of another one: the transfer of their KV.

    a request opens ─▶ ask ─▶ FoundKv ─▶ memory for it? ─▶ fetch ─▶ the request waits
    before a step   ─▶ landed, in the tree       ─▶ the request continues: a hit like any other
                       missed, or its wait over  ─▶ the request computes its prompt, or fails

Memory is reserved before KV is sent, with room left for running requests. No call waits for the
other server.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from weft.config.handoff import REASONS
from weft.engine.core import EngineCore
from weft.engine.hooks import Service
from weft.memory.handoff.protocol import Handoff, RoomAddress
from weft.memory.prefix_cache import NO_PAGES, TOKEN_BYTES, CacheKey
from weft.memory.tiers.protocol import Landed
from weft.messages.handoff import HandoffParams
from weft.messages.requests import GenerateRequest
from weft.observe.log import EventLog
from weft.scheduler.admission import spare_tokens
from weft.scheduler.features.handoff import Pull, PullFeature
from weft.scheduler.history import EventKind
from weft.scheduler.request import Request, namespace_of
from weft.scheduler.settings import HandoffSettings, TierSettings
from weft.scheduler.tiers.transfers import LARGEST_PART, Transfers

# A cancelled transfer lands at once. If it does not within this time, its pages are lost.
HUNG_S = 30.0

log = EventLog("handoff")


class PullService(Service):
    """Attached all the time, if prompts of another server are continued."""

    name = "what comes from another server"

    def __init__(
        self,
        core: EngineCore,
        feature: PullFeature,
        handoff: Handoff,
        settings: HandoffSettings,
    ) -> None:
        self._core = core
        self.feature = feature
        self._kv = core.scheduler.kv
        blocks = TierSettings(block_len=self._kv.page_size)
        self._transfers = Transfers(self._kv, blocks, handoff)
        self._handoff = handoff
        self._settings = settings
        self._num_pulls = 0
        self.num_landed = 0  # tokens
        self.num_missed = Counter[str]()  # requests without KV from the other server, by reason

    @property
    def waiting(self) -> dict[int, int]:
        """Number of the pull, by id of the requests that wait for another server."""
        return self.feature.waiting

    def wake_at(self) -> float:
        wake_at = min((one.until_s for one in self.feature.pulls.values()), default=math.inf)
        for transfer in self._transfers.table.values():
            if transfer.is_cancelled:
                wake_at = min(wake_at, transfer.since_s + HUNG_S)
        return wake_at

    # Moments

    def opened(self, message: GenerateRequest, now: float) -> None:
        params = message.handoff
        if params is None:
            return
        address = RoomAddress(params.host, params.port, params.room)
        self._look_for(self._core.scheduler.requests[message.id], address, params, now)

    def before_step(self, now: float) -> None:
        self._forget_ended(now)
        news = self._handoff.take()
        for number, num_tokens in news.found:
            pull = self.feature.pulls.get(number)
            if pull is not None:
                pull.num_found = num_tokens
                for id in pull.ids:
                    detail = f"{num_tokens:,} tokens of its KV are ready on {pull.address}"
                    self._core.note(id, EventKind.HANDOFF, detail, now)
        for landed in news.landed:
            self._land(landed)
        for number, reason, why in news.missed:
            self._end(number, now, reason, why)
        if news.landed:
            self._core.scheduler.memory_came_back()
        self._end_late(now)
        self._end_hung(now)
        self._fetch(now)

    def after_step(self, now: float) -> None:
        self._forget_ended(now)
        self._fetch(now)

    def aborted(self, ids: Sequence[int]) -> None:
        """Does nothing: what requests wait for ends with them."""

    # Transfers of a request's KV

    def _look_for(
        self, request: Request, address: RoomAddress, params: HandoffParams, now: float
    ) -> None:
        """Let a request wait if another server has more of its prompt than the cache."""
        page_size = self._kv.page_size
        usable = request.reusable_len // page_size * page_size
        key = request.cache_key(request.packed[: usable * TOKEN_BYTES])
        have = self._transfers.memory.resumable(key)
        if have >= usable:
            detail = f"nothing is taken from {address}: {have:,} tokens are cached here"
            if not usable:
                detail = f"nothing is taken from {address}: the request needs its prompt computed"
            self._core.note(request.id, EventKind.HANDOFF, detail, now)
            self._handoff.dismiss(address)
            return
        number = self._same(address, key)
        if number is None:
            until_s = now + self._settings.wait_s
            number = self._num_pulls
            self._num_pulls += 1
            self.feature.pulls[number] = Pull(address, key, now, until_s)
            asked = key
            if params.lent_salt is not None:
                namespace = namespace_of(request.message.adapter, params.lent_salt)
                asked = key._replace(namespace=namespace)
            self._handoff.ask(number, address, asked, have)
        self.feature.pulls[number].ids.append(request.id)
        self.feature.waiting[request.id] = number
        detail = f"asks {address} for {usable - have:,} of its tokens"
        self._core.note(request.id, EventKind.HANDOFF, detail, now)

    def _same(self, address: RoomAddress, key: CacheKey) -> int | None:
        """A pull of the same prompt for another completion; None if there is none."""
        for number, pull in self.feature.pulls.items():
            if pull.address == address and pull.key == key:
                return number
        return None

    def _fetch(self, now: float) -> None:
        """Begin transfers for which there is memory, oldest first, and that need not wait for a
        launched step."""
        for number, pull in list(self.feature.pulls.items()):
            if pull.num_found and pull.ticket is None and not self._reserve(number, pull, now):
                break  # later pulls must not overtake it
        if self._transfers.table:
            first = self._core.loop.first_in_flight
            if first is None:
                first = self._core.scheduler.planner.num_steps
            self._transfers.begin(first)

    def _reserve(self, number: int, pull: Pull, now: float) -> bool:
        """Reserve pages for the next part of a pull, or end the pull if it is complete. Returns
        whether that was possible."""
        kv = self._kv
        page_size = kv.page_size
        end = min(pull.num_found, pull.key.num_tokens)
        until_end = pull.key.first(end)
        if self._transfers.memory.resumable(until_end) >= end:
            self._end(number, now)
            return True
        # If all tokens are cached, only the resume state is missing.
        start = kv.cache.peek(until_end)
        # Only a part, if the prompt is longer than a transfer may be.
        most = kv.allocator.num_pages // LARGEST_PART * page_size
        num_tokens = min(end - start, max(most, page_size))
        ratio = self._core.scheduler.prefills.new_token_ratio.current
        spare = spare_tokens(kv, ratio)
        # Without numbers that change with every step: histories keep the words.
        num_needed = max(num_tokens, page_size)
        pull.lacks = f"no KV memory for {num_needed:,} tokens that are ready on {pull.address}"
        if self._transfers.room(spare) < num_tokens:
            return False
        resume_state = NO_PAGES
        if start + num_tokens == end:
            reserved = kv.resume_states.reserve(end, spare - num_tokens)
            if reserved is None:
                pull.lacks = f"no memory for the ending of {end:,} tokens"
                return False
            resume_state = reserved
        part = pull.key.first(start + num_tokens)
        step = self._core.scheduler.planner.num_steps - 1
        ticket = self._transfers.read(part, start, step=step, now=now, resume_state=resume_state)
        if ticket is None:
            if len(resume_state):
                kv.resume_states.memory.give_back(resume_state)
            return False
        pull.lacks = ""
        pull.ticket = ticket
        self._handoff.bind(ticket, number)
        return True

    def _land(self, landed: Landed) -> None:
        """Put the received tokens into the tree; the rest is fetched next."""
        self.num_landed += self._transfers.land(
            landed.ticket, landed.num_tokens, has_resume_state=landed.has_resume_state
        )
        for pull in self.feature.pulls.values():
            if pull.ticket == landed.ticket:
                pull.ticket = None
                pull.num_landed += landed.num_tokens

    # Ends

    def _end(self, number: int, now: float, reason: str = "", why: str = "") -> None:
        """Let the requests of a pull continue. With a `reason`, KV is missing."""
        pull = self.feature.pulls.pop(number, None)
        if pull is None:
            return
        self._handoff.leave(number)
        if pull.ticket is not None and pull.ticket in self._transfers.table:
            self._transfers.cancel(pull.ticket, now)
        for id in pull.ids:
            del self.feature.waiting[id]
        if reason:
            self._miss(pull.ids, reason, why, now)
            return
        took_ms = 1e3 * (now - pull.since_s)
        detail = f"{pull.num_landed:,} tokens came from {pull.address} after {took_ms:,.0f} ms"
        for id in pull.ids:
            self._core.note(id, EventKind.HANDOFF, detail, now)
        self._core.scheduler.memory_came_back()

    def _miss(self, ids: list[int], reason: str, why: str, now: float) -> None:
        """Requests get no KV, or no more, from another server."""
        self.num_missed[reason] += len(ids)
        if reason != "refused":  # a refusal is logged elsewhere
            log.seldom("missed", reason=reason, why=why, requests=len(ids))
        for id in ids:
            if self._settings.fallback == "fail":
                message = f"its KV did not come from the prefill server ({reason}): {why}"
                self._core.scheduler.fail(id, message, status=503)
                continue
            detail = f"it computes its prompt ({reason}): {why}"
            self._core.note(id, EventKind.HANDOFF, detail, now)
        self._core.scheduler.memory_came_back()

    def _forget_ended(self, now: float) -> None:
        """Remove requests that have ended while they waited."""
        left = self.feature.left
        self.feature.left = []
        for id in left:
            number = self.feature.waiting.pop(id, None)
            if number is None:
                continue
            pull = self.feature.pulls[number]
            pull.ids.remove(id)
            if not pull.ids:
                self._end(number, now)

    def _end_late(self, now: float) -> None:
        for number, pull in list(self.feature.pulls.items()):
            if now >= pull.until_s:
                why = f"nothing arrived within {self._settings.wait_s:g} s"
                if pull.num_landed:
                    why = f"{pull.num_landed:,} tokens arrived within {self._settings.wait_s:g} s"
                if pull.num_found and pull.ticket is None:
                    why += f": {pull.shortage}"
                self._end(number, now, "late", why)

    def _end_hung(self, now: float) -> None:
        """Give up the pages of cancelled transfers that do not land."""
        for ticket, transfer in self._transfers.table.items():
            if not transfer.is_cancelled or now < transfer.since_s + HUNG_S:
                continue
            log.error("pages_lost", pages=len(transfer.pages), after_s=HUNG_S)
            self._transfers.give_up(ticket)
            self._core.settle()
            self._core.recovery.shrink()

    # Observation

    def numbers(self) -> dict[str, int]:
        """The numbers by their names in `Stats`."""
        report = self._handoff.report()
        pulls = self.feature.pulls.values()
        num_moving = sum(one.ticket is not None for one in pulls)
        found = {
            "num_handoff_prealloc": len(pulls) - num_moving,
            "num_handoff_transfer": num_moving,
            "total_handoff_tokens": self.num_landed,
            "total_handoff_bytes": report.num_bytes,
            "total_handoff_faults": report.faults,
        }
        for reason in REASONS:
            found[f"total_handoff_{reason}"] = self.num_missed[reason]
        return found
