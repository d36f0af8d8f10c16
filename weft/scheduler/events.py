"""What was decided about each request, and why: the diary that explains the scheduler.

Two kinds of entries. An *event* concerns one request (arrived, admitted, chunk, retracted, finished). A *pass* is one
walk over the queue that left requests waiting: it is written once, with what stopped it, and equal ones in succession
are counted, not repeated. Why a request waited follows from the passes between its arrival and its admission, so that
a thousand waiting requests cost no more than one.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from enum import Enum
from typing import NamedTuple

MAX_EVENTS = 64  # of one request; the first and the latest are kept
MAX_FINISHED = 1_024  # requests that are remembered after their end
MAX_PASSES = 2_048


class EventKind(Enum):
    ARRIVED = "arrived"
    ADMITTED = "admitted"  # whole, or its first chunk
    CHUNK = "chunk"  # another piece of its prompt
    DEFERRED = "deferred"  # its new prefix is being computed by another request of the pass
    HELD = "held"  # a part of the scheduler lets it wait
    FIRST_TOKEN = "first token"
    RETRACTED = "retracted"
    FINISHED = "finished"


class Event(NamedTuple):
    time_s: float
    step: int
    kind: EventKind
    detail: str


class Stop(Enum):
    """What ended a walk over the queue."""

    FULL = "full"  # since an earlier pass nothing could be admitted, and nothing has ended since
    NO_ROW = "no row"  # as many requests run as may
    NO_TOKEN = "no token"  # memory
    BUDGET = "budget"  # the tokens of one step, or the open chunk


class Pass(NamedTuple):
    """One or more successive walks that ended alike."""

    first_s: float
    last_s: float
    first_step: int
    last_step: int
    stop: Stop
    id: int  # the request at which it stopped, or -1
    needed: int  # tokens of memory that this one needed, where memory was lacking
    available: int  # and that there were
    num_waiting: int  # after the last of them
    times: int

    def explain(self, rid: str) -> str:
        """Why requests at this place of the queue and behind it waited. `rid` names the one at which it stopped."""
        match self.stop:
            case Stop.NO_TOKEN:
                return f"no KV memory: {rid} needs {self.needed:,} tokens, {self.available:,} are available"
            case Stop.NO_ROW:
                return "as many requests run as --max-running-requests allows"
            case Stop.BUDGET:
                return f"the token budget of the step was used up before {rid}"
            case Stop.FULL:
                return "the batch is full, and no request has ended since"


class Story(NamedTuple):
    """All that is remembered of one request."""

    rid: str
    events: list[Event]


class Diary:
    """Remembers open requests, and the latest finished ones."""

    def __init__(self) -> None:
        self._stories: dict[int, Story] = {}
        self._finished: OrderedDict[int, Story] = OrderedDict()
        self.passes: deque[Pass] = deque(maxlen=MAX_PASSES)

    def note(self, id: int, rid: str, event: Event) -> None:
        """Write an event of a request."""
        story = self._stories.get(id)
        if story is None:
            story = self._stories[id] = Story(rid, [])
        events = story.events
        if events and events[-1].kind is event.kind and event.kind in (EventKind.DEFERRED, EventKind.HELD):
            return  # still
        if len(events) == MAX_EVENTS:
            del events[MAX_EVENTS // 2]
        events.append(event)
        if event.kind is EventKind.FINISHED:
            self._finished[id] = self._stories.pop(id)
            if len(self._finished) > MAX_FINISHED:
                self._finished.popitem(last=False)

    def note_pass(
        self, time_s: float, step: int, stop: Stop, id: int, needed: int, available: int, num_waiting: int
    ) -> None:
        """Write a walk that left requests waiting."""
        last = self.passes[-1] if self.passes else None
        if last is not None and last.stop is stop and last.id == id:
            self.passes[-1] = last._replace(
                last_s=time_s,
                last_step=step,
                needed=needed,
                available=available,
                num_waiting=num_waiting,
                times=last.times + 1,
            )
            return
        self.passes.append(Pass(time_s, time_s, step, step, stop, id, needed, available, num_waiting, 1))

    def story(self, id: int) -> Story | None:
        return self._stories.get(id) or self._finished.get(id)

    def name(self, id: int) -> str:
        """The rid of a request, as far as it is remembered."""
        story = self.story(id)
        return story.rid if story else f"request {id}"
