"""The classes of service: what the scheduler owes to a request of each, together.

    online        every request without a wish
    background    work that waits for what online requests leave (`background/`)

A request has one class from its arrival to its end. The queue has a line for each; what is asked
elsewhere about a class is a field here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceClass:
    name: str  # as users read it
    line: int  # its line in the queue: lower ones are looked at first
    rank: int  # added to what a policy says: lower ranks go first, and are retracted last
    aging_s: float | None  # wait after which a request of its line is overdue; None: by settings
    yields: bool  # gives its rows and its memory to every class before it, however long it waited
    is_timed: bool  # the time limits of the server count, besides that of the request itself
    keeps_prefixes: bool  # what it leaves in the cache is evicted by its last use, not first


ONLINE = ServiceClass(
    name="online",
    line=0,
    rank=0,
    aging_s=None,
    yields=False,
    is_timed=True,
    keeps_prefixes=True,
)
BACKGROUND = ServiceClass(
    name="background",
    line=1,
    rank=1 << 40,  # lower than all classes that a policy knows
    aging_s=3_600.0,  # a batch of work waits for hours
    yields=True,
    is_timed=False,
    keeps_prefixes=False,
)
SERVICES = (ONLINE, BACKGROUND)  # by whether a request is background work
