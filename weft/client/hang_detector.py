"""Whether the engine hangs, judged from what it sends.

A thread of the engine sends heartbeats while its steps run, so a long step is no silence.

    silence      nothing has come for `hang_after_s`: its process is stopped, or no thread of it
                 can run
    standstill   heartbeats come, but for `hang_after_s` it has been in one step without using a
                 processor: it waits for something that does not come
    endless      it has computed one step for `step_timeout_s`

Time is counted in ticks of our own: while this process did not run itself (a laptop asleep, a
debugger), nothing is held against the engine. Where the machine has no processor for it or for us,
silence proves little: there `BUSY_TICKS` ticks count as one, so that a hang is still found. What
follows from a hang is for the launcher to decide.
"""

from __future__ import annotations

from weft.messages.status import Heartbeat

TICK_S = 0.5
LATE_S = 0.25  # a tick that comes later was held up by a busy machine
HANG_AFTER_S = 4.0
BUSY_TICKS = 10


class HangDetector:
    def __init__(self, step_timeout_s: float = 0.0, hang_after_s: float = HANG_AFTER_S) -> None:
        """`step_timeout_s`: the longest step; 0: no bound. `hang_after_s`: the longest silence or
        standstill."""
        self._step_timeout_s = step_timeout_s
        self._hang_after_s = hang_after_s
        # In ticks; each counts `BUSY_TICKS`, or 1 on a busy machine.
        self._silence = 0
        self._last = Heartbeat(step_s=0.0, idle_s=0.0)

    def heard(self) -> None:
        """Something has come from the engine."""
        self._silence = 0

    def beat(self, beat: Heartbeat) -> None:
        self._last = beat

    def tick(self, passed_s: float = TICK_S, *, is_engine_queued: bool = False) -> None:
        """Another `TICK_S` is over, which took `passed_s`.

        `is_engine_queued`: the engine waits for a processor.
        """
        is_busy = is_engine_queued or passed_s > TICK_S + LATE_S
        self._silence += 1 if is_busy else BUSY_TICKS

    @property
    def hang(self) -> str:
        """Why the engine is taken to hang; empty if it is not."""
        silent_s = self._silence / BUSY_TICKS * TICK_S
        if silent_s >= self._hang_after_s:
            return f"the engine has given no sign of life for {silent_s:.0f} s"
        beat = self._last
        if min(beat.idle_s, beat.step_s) >= self._hang_after_s:
            return f"the engine has stood still in a step for {beat.step_s:.0f} s"
        if 0 < self._step_timeout_s <= beat.step_s:
            return f"the engine has computed at one step for {beat.step_s:.0f} s"
        return ""
