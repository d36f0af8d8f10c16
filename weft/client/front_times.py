"""The front's part of the time of each request: what it did before it sent the request to the
engine, and when it had the last token and had written the answer.

    arrived   the front's parts   sent    read by the engine      ended   answered    sent
       | front_busy, read, ... | engine_busy |  its own parts  | dispatch | siblings | sending |

The engine's parts (`engine/times.py`) are on its own clock. When it read the request is known here,
too (`on_this_clock`); the way of the last token back is the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from weft.messages.control import Explanation, TimePart

MAX_FRONT_TIMES = 1_024  # requests, open ones and the latest that ended
SHARE = "it waits for others of the same request (--max-request-share)"
DISPATCH = "the way to the engine and back"
SIBLINGS = "other completions of the same request"


@dataclass(slots=True)
class FrontTimes:
    """Times are from `time.perf_counter`; 0: not yet."""

    arrived_s: float  # the head of the HTTP request
    before: dict[str, float] = field(default_factory=dict)  # seconds by part, before `started_s`
    deferred_s: float = 0.0  # since then it waited for others of its request; 0: it did not
    started_s: float = 0.0  # it was sent to the engine
    first_s: float = 0.0  # its first token was here
    ended_s: float = 0.0  # its last token was here
    answered_s: float = 0.0  # those of all completions of its request were here
    sent_s: float = 0.0  # all of the answer was written
    elsewhere: str = ""  # the server that had more of its prompt, in the words of `weft route`

    def parts_before(self) -> list[TimePart]:
        ready_s = self.deferred_s or self.started_s
        parts = [TimePart(part=part, seconds=seconds) for part, seconds in self.before.items()]
        rest_s = ready_s - self.arrived_s - sum(self.before.values())
        parts.append(TimePart(part="front", seconds=max(rest_s, 0.0)))
        if self.deferred_s:
            deferred_s = self.started_s - self.deferred_s
            parts.append(TimePart(part="share", seconds=deferred_s, detail=SHARE))
        return parts

    def parts_after(self, now: float, outside_s: float) -> list[TimePart]:
        """`outside_s`: the time on the way to the engine and back."""
        parts = [TimePart(part="dispatch", seconds=outside_s, detail=DISPATCH)]
        ended_s = self.ended_s or now
        answered_s = self.answered_s or ended_s
        if answered_s > ended_s:
            parts.append(TimePart(part="siblings", seconds=answered_s - ended_s, detail=SIBLINGS))
        if self.sent_s:
            parts.append(TimePart(part="sending", seconds=self.sent_s - answered_s))
        return parts


def with_front(one: Explanation, front: FrontTimes, now: float) -> Explanation:
    """An explanation of the engine, whose times are on this clock, with the front's part.

    If the client leaves, the engine works until it reads that: then the parts end later than the
    answer.
    """
    engine_s = one.stages.total_s
    outside_s = max((front.ended_s or now) - front.started_s - engine_s, 0.0)
    times = front.parts_before()
    # Only the step that ran when it was sent has kept it waiting.
    if one.busy_until_s > front.started_s:
        busy_s = min(max(one.arrived_s - front.started_s, 0.0), outside_s)
        times.append(TimePart(part="engine_busy", seconds=busy_s, detail=one.busy_with))
        outside_s -= busy_s
    times += [*one.times, *front.parts_after(now, outside_s)]
    times = [part for part in times if part.seconds]
    first_s = front.first_s - front.arrived_s if front.first_s else None
    return replace(
        one,
        times=times,
        total_s=sum(part.seconds for part in times),
        first_token_s=first_s,
        elsewhere=front.elsewhere,
    )


def on_this_clock(one: Explanation, asked_s: float, came_s: float) -> Explanation:
    """An explanation that was asked for at `asked_s` and was here at `came_s`, with the engine's
    times on the clock of this process.

    On one machine both clocks are the same, or look the same. On two, the engine explained it in
    the middle between the two times, give or take half of the time between them.
    """
    offset_s = 0.0
    if not asked_s <= one.explained_s <= came_s:
        offset_s = (asked_s + came_s) / 2 - one.explained_s
    busy_until_s = one.busy_until_s + offset_s if one.busy_with else one.busy_until_s
    return replace(one, arrived_s=one.arrived_s + offset_s, busy_until_s=busy_until_s)


Fronts = Mapping[int, FrontTimes]  # by the number of a request
