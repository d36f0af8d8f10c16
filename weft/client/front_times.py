"""The front's part of the time of each request: what it did before it sent the request to the
engine, and when it had the last token and had written the answer.

The engine's parts (`engine/times.py`) lie between `started_s` and `ended_s`. The clocks of two
processes are not compared, so the way to the engine and back is the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.messages.control import TimePart

MAX_FRONT_TIMES = 1_024  # requests, open ones and the latest that ended


@dataclass(slots=True)
class FrontTimes:
    """Times are from `time.perf_counter`; 0: not yet."""

    arrived_s: float  # the head of the HTTP request
    read_s: float = 0.0  # its body was received
    parse_s: float = 0.0  # its body was decoded and checked
    render_s: float = 0.0  # the template was applied
    tokenize_s: float = 0.0
    started_s: float = 0.0  # it was sent to the engine
    ended_s: float = 0.0  # its last token was here
    sent_s: float = 0.0  # all of the answer was written
    elsewhere: str = ""  # the server that had more of its prompt, in the words of `weft route`

    def total_s(self, now: float) -> float:
        return (self.sent_s or now) - self.arrived_s

    def parts(self, engine_s: float, now: float) -> tuple[list[TimePart], list[TimePart]]:
        """The parts before those of the engine, which are `engine_s` together, and those after."""
        named = [
            ("read", self.read_s),
            ("parse", self.parse_s),
            ("render", self.render_s),
            ("tokenize", self.tokenize_s),
        ]
        rest_s = self.started_s - self.arrived_s - sum(seconds for _, seconds in named)
        named.append(("front", rest_s))
        before = [TimePart(part=part, seconds=seconds) for part, seconds in named if seconds]
        ended_s = self.ended_s or now
        after = [
            TimePart(
                part="dispatch",
                seconds=ended_s - self.started_s - engine_s,
                detail="the way to the engine and back",
            )
        ]
        if self.sent_s:
            after.append(TimePart(part="sending", seconds=self.sent_s - ended_s))
        return before, after
