"""How long clients take to come back after tool calls, learnt from earlier pauses.

A pause is expected to be as long as nine of ten earlier pauses for the same tool of the same
tenant, and a little longer. With too few of them those of the tenant for any tool count, then those
of all tenants. Times are in seconds.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import NamedTuple

MAX_PAUSES = 64  # that count, of one tool
MAX_TOOLS = 512  # names of tools, of all tenants together; the least recently used are forgotten
MIN_PAUSES = 4
PART = 0.9  # of the earlier pauses are not longer than expected
MARGIN = 1.25
FIRST_S = 20.0  # while nothing is known


class ExpectedPause(NamedTuple):
    """How long a pause is expected to be, and why."""

    seconds: float
    why: str


class PausesSeen:
    """The pauses that have ended."""

    def __init__(self) -> None:
        # By tenant and tool; ("alice", "") has all pauses of a tenant, ("", "") those of everyone.
        self._pauses: OrderedDict[tuple[str, str], deque[float]] = OrderedDict()

    def note(self, tenant: str, tools: Iterable[str], seconds: float) -> None:
        """A client has come back with the results of these tools."""
        for key in dict.fromkeys([*((tenant, tool) for tool in tools), (tenant, ""), ("", "")]):
            self._pauses.setdefault(key, deque(maxlen=MAX_PAUSES)).append(seconds)
            self._pauses.move_to_end(key)
        while len(self._pauses) > MAX_TOOLS:
            self._pauses.popitem(last=False)

    def expected(self, tenant: str, tools: Iterable[str]) -> ExpectedPause:
        """The pause after a call of these tools: that of the slowest of them."""
        found = [self._of(tenant, tool) for tool in dict.fromkeys(tools)]
        return max(found, default=self._of(tenant, ""))

    def _of(self, tenant: str, tool: str) -> ExpectedPause:
        known = ((tenant, tool), f"pauses for {tool}"), ((tenant, ""), "pauses of this client")
        for key, name in (*known, (("", ""), "pauses")):
            pauses = sorted(self._pauses.get(key, ()))
            if len(pauses) >= MIN_PAUSES:
                longest = pauses[int(PART * (len(pauses) - 1) + 0.5)]
                why = f"{PART:.0%} of {len(pauses)} {name} took at most {longest:,.1f} s"
                return ExpectedPause(MARGIN * longest, why)
        return ExpectedPause(FIRST_S, "nothing is known of earlier pauses")
