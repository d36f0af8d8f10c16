"""Several engines that serve the same model, behind the interface of one engine.

    EngineClient ── send ──▶ Fleet ─┬─▶ engine 0        requests: to one of them
                 ◀─ receive ─┘      ├─▶ engine 1        aborts: to those that have the requests
                                    └─▶ ...             control requests: to all, replies joined

The client does not know that there is a fleet: it has one table of open completions, whose ids are
the same in every engine. The router (`weft/route`) chooses the engine of a request, except that

- completions of one prompt stay together,
- requests of a session go to the engine that has the session,
- requests that name an engine go to that engine.

The fleet lives on one event loop and opens no socket. The launcher starts the engines, checks
whether they hang, and reports what it finds (`attach`, `hangs`, `recovers`, `lose`).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from weft.client.fleet.batches import split_batch
from weft.client.fleet.bookings import OpenBookings, SessionRanks
from weft.client.fleet.changes import EngineChanges
from weft.client.fleet.joined import has_failed, join, join_ready, join_stats
from weft.client.fleet.member import Member, Send
from weft.client.fleet.wanted import wanted_rank
from weft.messages.adapters import AdapterReply
from weft.messages.calls import CallFailed, ControlReply, ControlRequest
from weft.messages.codec import FromEngine, ToEngine, Unreadable
from weft.messages.control import (
    BlockInput,
    FlushCache,
    GetState,
    GetStateReply,
    StartProfileReply,
    UnblockInput,
)
from weft.messages.picture import GetPrefix, Watch
from weft.messages.replies import Finish, StepOutput
from weft.messages.requests import Abort, BatchGenerate, GenerateRequest
from weft.messages.sessions import CloseSession, KeepSessions, OpenSession
from weft.messages.status import EngineReady, Heartbeat, Stats
from weft.messages.weights import InitWeightsUpdateGroup, WeightsReply
from weft.observe.log import EventLog
from weft.route.policy import EngineRouter

FIRST_OWN_CALL = 1 << 40  # calls of the client have smaller ids
KEEPS_STEP = "lockstep"  # the pass of engines that run their steps together
BARRIER_S = 0.1  # until all engines open their inputs
MEETING_S = 8.0  # in which engines that keep step must come to the same step for it
PREPARING_S = 0.1  # before an engine that prepares its profiler is asked again
BEING_SET_UP = "it is being set up like the others"

log = EventLog("fleet")


@dataclass
class JoinedCall:
    """A control request whose replies are being collected."""

    request: ControlRequest[Any]
    awaited: set[int]  # ranks
    begins_session: bool = False  # it opens one that no engine has yet
    replies: dict[int, ControlReply] = field(default_factory=dict)


class Fleet:
    def __init__(
        self,
        members: Sequence[Member],
        router: EngineRouter,
        *,
        on_availability: Callable[[str], None] = lambda why_not: None,
    ) -> None:
        """`on_availability` is called with the reason why no engine takes requests, or with an
        empty text when one does."""
        self.members = members
        self.changes = EngineChanges()
        self._open = OpenBookings(router)
        self._sessions = SessionRanks()
        self._on_availability = on_availability
        self._inbox: asyncio.Queue[FromEngine | Unreadable] = asyncio.Queue()
        self._has_begun = False  # all engines have been ready once
        self._calls: dict[int, JoinedCall] = {}  # by the number of the client's call
        self._own_numbers = itertools.count(FIRST_OWN_CALL)
        self._catching_up: dict[int, int] = {}  # own calls to new engines without a reply: rank

    @property
    def up(self) -> list[int]:
        """The engines that take requests."""
        return [member.rank for member in self.members if member.is_up]

    # ---- from the client

    def send(self, message: ToEngine) -> None:
        """Send `message` to the engines that it is for. If none can take it, answer it here."""
        match message:
            case GenerateRequest():
                booked = self._booked_rank(message)
                if booked is not None:
                    self.members[booked].send(message)
            case BatchGenerate():
                ranks = [self._booked_rank(request) for request in message.members()]
                for rank, part in split_batch(message, ranks).items():
                    self.members[rank].send(part)
            case Abort():
                self._send_abort(message)
            case ControlRequest():
                self._send_call(message)
            case _:
                for member in self.members:
                    member.send(message)

    def _booked_rank(self, request: GenerateRequest) -> int | None:
        """Choose and book the engine of a request. None if no engine takes it; the error is then
        already sent to the client."""
        ranks = self._ranks_for(request)
        missing = [rank for rank in ranks if not self.members[rank].is_up]
        if not ranks:
            self._refuse([request.id], self.why_unavailable())
            return None
        if missing:
            why = self.members[missing[0]].missing
            self._refuse([request.id], f"engine {missing[0]} takes no requests: {why}")
            return None
        return self._open.book(request, ranks)

    def _ranks_for(self, request: GenerateRequest) -> list[int]:
        """The engines that may get a request: all that are up, or the one to which it is bound."""
        bound = wanted_rank.get()
        session = request.session
        if bound is None and session is not None:
            bound = self._sessions.of(session.id, session.owner)
        if bound is None:
            bound = self._open.rank_of_siblings(request)
        return self.up if bound is None else [bound]

    def _send_abort(self, abort: Abort) -> None:
        if abort.all or abort.names:
            for member in self.members:
                member.send(abort)
            return
        lens = dict(zip(abort.ids, abort.output_lens, strict=False))
        for rank, ids in self._open.by_rank(abort.ids).items():
            own_lens = tuple(lens[id] for id in ids if id in lens)
            self.members[rank].send(replace(abort, ids=tuple(ids), output_lens=own_lens))

    # ---- control requests

    def _rank_for_session(
        self, request: OpenSession | CloseSession, bound: int | None
    ) -> list[int]:
        """The engine that has the session, `bound`; for a new session the engine with the fewest
        sessions."""
        if bound is not None and self.members[bound].is_up:
            return [bound]
        up = self.up
        if not up:
            return []
        rank = self._sessions.emptiest(up)
        if isinstance(request, OpenSession):
            self._sessions.bind(request.session_id, request.owner, rank)
        return [rank]

    def _send_call(self, request: ControlRequest[Any]) -> None:
        begins_session = False
        if isinstance(request, OpenSession | CloseSession):
            bound = self._sessions.of(request.session_id, request.owner)
            begins_session = isinstance(request, OpenSession) and bound not in self.up
            ranks = self._rank_for_session(request, bound)
        elif isinstance(request, GetPrefix):
            # Numbers of nodes are valid only for the pictures of one engine.
            wanted = wanted_rank.get() or 0
            ranks = [rank for rank in self.up if rank == wanted]
        else:
            ranks = [member.rank for member in self.members if member.ready is not None]
        if not ranks:
            self._tell(CallFailed(call=request.call, message=self.why_unavailable()))
            return
        self._calls[request.call] = JoinedCall(request, set(ranks), begins_session)
        if isinstance(request, BlockInput | UnblockInput) and len(ranks) > 1:
            request = _at_once(request, [self.members[rank].ready for rank in ranks])
        for index, rank in enumerate(ranks):
            part = _for_rank(request, rank)
            if isinstance(part, KeepSessions):
                # Each engine gets its share of the sessions, and tells the changes of these.
                share = part.sessions[index :: len(ranks)]
                for session in share:
                    self._sessions.bind(session.id, session.owner, rank)
                part = replace(part, sessions=share)
            self.members[rank].send(part)

    def _take_reply(
        self,
        rank: int,
        reply: ControlReply,
    ) -> None:
        if reply.call in self._catching_up:
            self._caught_up(rank, reply)
            return
        call = self._calls.get(reply.call)
        if call is None or rank not in call.awaited:
            return
        if isinstance(reply, GetStateReply):
            self.members[rank].record(reply.stats)
        if isinstance(reply, StartProfileReply) and reply.is_preparing:
            # The client would ask all engines again, and some of them may be recording already.
            loop = asyncio.get_running_loop()
            loop.call_later(PREPARING_S, self._ask_again, rank, reply.call)
            return
        call.awaited.discard(rank)
        call.replies[rank] = reply
        if not call.awaited:
            self._finish_call(reply.call)

    def _ask_again(
        self,
        rank: int,
        number: int,
    ) -> None:
        call = self._calls.get(number)
        if call is not None and rank in call.awaited:
            self.members[rank].send(_for_rank(call.request, rank))

    def _finish_call(self, number: int) -> None:
        call = self._calls.pop(number)
        if not call.replies:
            self._tell(CallFailed(call=number, message=self.why_unavailable()))
            return
        reply = join(call.replies)
        request = call.request
        succeeded = not has_failed(reply)
        if isinstance(reply, AdapterReply):
            self.changes.forget_adapters(reply.evicted)
        if succeeded:
            self.changes.note(request)
        # A session that is open already stays where it is, though it cannot be opened again.
        failed_to_begin = call.begins_session and not succeeded
        if isinstance(request, CloseSession) or (
            isinstance(request, OpenSession) and failed_to_begin
        ):
            self._sessions.forget(request.session_id, request.owner)
        if isinstance(request, FlushCache) or isinstance(reply, WeightsReply):
            for rank in call.replies:
                self._open.router.forget_cache(rank)
        self._tell(reply)

    # ---- from the engines

    async def receive(self) -> FromEngine | Unreadable:
        """Wait for the next message for the client."""
        return await self._inbox.get()

    def take(
        self,
        rank: int,
        message: FromEngine | Unreadable,
    ) -> None:
        """Take a message from the engine `rank`."""
        member = self.members[rank]
        member.detector.heard()
        match message:
            case StepOutput():
                self._open.note(message)
                self._tell(message)
            case Stats():
                member.record(message)
                self._tell_stats()
            case Heartbeat():
                member.detector.beat(message)
            case EngineReady():
                self._engine_ready(member, message)
            case ControlReply():
                self._take_reply(rank, message)
            case Unreadable(call=call) if call is not None:
                self._take_reply(rank, CallFailed(call=call, message="its reply is unreadable"))
            case _:
                self._tell(message)

    def _tell(self, message: FromEngine | Unreadable) -> None:
        self._inbox.put_nowait(message)

    def _tell_stats(self) -> None:
        self._tell(join_stats([member.stats for member in self.members]))

    # ---- engines that come and go

    def attach(
        self,
        rank: int,
        send: Send,
    ) -> None:
        """An engine has been started."""
        self.members[rank].attach(send)
        if self._has_begun:
            self._on_availability(self.why_unavailable())

    def _engine_ready(
        self,
        member: Member,
        ready: EngineReady,
    ) -> None:
        member.ready = ready
        if self._has_begun:
            self._catch_up(member)
            self._on_availability(self.why_unavailable())
            return
        member.missing = ""
        found = [one.ready for one in self.members if one.ready is not None]
        if len(found) == len(self.members):
            self._has_begun = True
            self._tell(join_ready(found))
        self._on_availability(self.why_unavailable())

    def _catch_up(self, member: Member) -> None:
        """Send a new engine the changes that the others have already made. It takes requests after
        it has carried them out."""
        member.missing = BEING_SET_UP
        for change in self.changes.for_new_engine():
            number = next(self._own_numbers)
            self._catching_up[number] = member.rank
            member.send(replace(_for_rank(change, member.rank), call=number))
        # Calls that the other engines still work on are no changes yet. Nothing awaits these
        # replies.
        for call in self._calls.values():
            if not isinstance(call.request, OpenSession | CloseSession):
                member.send(_for_rank(call.request, member.rank))
        number = next(self._own_numbers)
        self._catching_up[number] = member.rank
        member.send(GetState(call=number))

    def _caught_up(
        self,
        rank: int,
        reply: ControlReply,
    ) -> None:
        del self._catching_up[reply.call]
        if has_failed(reply):
            log.error("engine_not_set_up", rank=rank, reason=getattr(reply, "message", ""))
        if rank not in self._catching_up.values():
            self.members[rank].missing = ""
            log.info("engine_is_back", rank=rank)
            self._on_availability(self.why_unavailable())

    def lose(
        self,
        rank: int,
        reason: str,
    ) -> None:
        """An engine has ended. Its requests end with an error; joined calls no longer wait for
        it."""
        self._drop_requests(rank, f"engine {rank} has stopped: {reason}")
        self.members[rank].detach(reason)
        for number in [number for number, of in self._catching_up.items() if of == rank]:
            del self._catching_up[number]
        for number, call in list(self._calls.items()):
            call.awaited.discard(rank)
            if not call.awaited:
                self._finish_call(number)
        self._sessions.forget_all_of(rank)
        self._open.router.forget_cache(rank)
        if self._has_begun:
            self._tell_stats()
        self._on_availability(self.why_unavailable())

    def hangs(
        self,
        rank: int,
        reason: str,
    ) -> None:
        """An engine does not answer: its requests end with an error, and it gets no new ones."""
        open_ids = tuple(self._open.router.open_on(rank))
        if open_ids:  # if the engine recovers, the client no longer reads them
            self.members[rank].send(Abort(ids=open_ids, message=reason))
        self._drop_requests(rank, reason)
        for number, call in self._calls.items():
            # The others wait for it, or go on without it: the caller must know.
            if rank in call.awaited and isinstance(call.request, BlockInput | UnblockInput):
                self._tell(
                    CallFailed(
                        call=number, message=_why_no_barrier(self.members[rank], reason), status=503
                    )
                )
        self.members[rank].missing = reason
        self._on_availability(self.why_unavailable())

    def recovers(self, rank: int) -> None:
        """An engine answers again. A new one still gets no requests before it is set up."""
        is_set_up = rank not in self._catching_up.values()
        self.members[rank].missing = "" if is_set_up else BEING_SET_UP
        self._on_availability(self.why_unavailable())

    def why_unavailable(self) -> str:
        """Why no engine takes requests; empty if one does."""
        if self.up:
            return ""
        reasons = [f"engine {member.rank}: {member.missing}" for member in self.members]
        return "no engine takes requests; " + "; ".join(reasons)

    def _drop_requests(
        self,
        rank: int,
        message: str,
    ) -> None:
        self._refuse(self._open.forget_all_of(rank), message)

    def _refuse(self, ids: Iterable[int], message: str) -> None:
        finished = [
            Finish(id=id, reason="error", message=message, status=503, retry_after_s=1)
            for id in ids
        ]
        if finished:
            self._tell(StepOutput(finished=finished))


def _at_once(
    request: BlockInput | UnblockInput, ready: Sequence[EngineReady | None]
) -> BlockInput | UnblockInput:
    """The version of `request` that takes effect in all engines at once: at the same step if they
    keep step, else at one moment. The moment of a block is now: an engine gets it before all
    requests that are sent later. All engines have the order to open by its moment; they have the
    clock of this machine."""
    if all(_keeps_step(one) for one in ready):
        return replace(request, together=True, at_s=time.monotonic() + MEETING_S)
    if isinstance(request, BlockInput):
        return request
    return replace(request, at_s=time.monotonic() + BARRIER_S)


def _keeps_step(ready: EngineReady | None) -> bool:
    return ready is not None and KEEPS_STEP in ready.passes


def _why_no_barrier(member: Member, reason: str) -> str:
    """Why blocking or opening the inputs has failed, and what follows."""
    then = "the others have changed; its input changes when it is back"
    if _keeps_step(member.ready):
        then = f"no input changes unless it is back within {MEETING_S:g} s of the call"
    return f"engine {member.rank} does not answer ({reason}): {then}"


def _for_rank(request: ControlRequest[Any], rank: int) -> ControlRequest[Any]:
    """The version of `request` for the engine `rank`. Each engine has its own rank in a group that
    sends weights, and of each engine a viewer has seen different steps."""
    if isinstance(request, Watch):
        return request.for_rank(rank)
    if isinstance(request, InitWeightsUpdateGroup):
        return replace(request, rank_offset=request.rank_offset + rank)
    return request
