"""Every request that was sent, and how it ended. One that has no end, or a wrong one, is a
fault."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tests.soak.http import Lost

DEADLINE_S = 300.0  # for any request to end
MAX_TOLD = 50  # faults that are told in full


class Wrong(Exception):
    """An answer that must not be."""


@dataclass
class Ledger:
    ends: Counter[str] = field(default_factory=Counter)  # "complete stop", "error 400", ...
    kinds: Counter[str] = field(default_factory=Counter)  # behaviour -> number of requests
    faults: list[str] = field(default_factory=list)
    num_faults: int = 0
    num_tokens: int = 0  # that complete answers brought
    killed_at: float = float("inf")  # when the engine was killed; who came later may find nobody

    @property
    def num_sent(self) -> int:
        return sum(self.kinds.values())

    @property
    def num_open(self) -> int:
        return self.num_sent - sum(self.ends.values())

    async def account(self, kind: str, work: Callable[[], Awaitable[str]]) -> str:
        """Run one request and book its end. Never raises but for cancellation."""
        self.kinds[kind] += 1
        began = time.monotonic()
        end = "forgotten"
        try:
            async with asyncio.timeout(DEADLINE_S):
                end = await work()
        except TimeoutError:
            self.fault(f"{kind}: no end within {DEADLINE_S:g} s")
            end = "hangs"
        except (Lost, OSError) as exc:
            end = self._broken_off(kind, began, exc)
        except Wrong as exc:
            self.fault(f"{kind}: {exc}")
            end = "wrong"
        finally:
            self.ends[end] += 1
        return end

    def _broken_off(self, kind: str, began: float, exc: Exception) -> str:
        if began >= self.killed_at or (
            isinstance(exc, ConnectionRefusedError) and time.monotonic() >= self.killed_at
        ):
            return "nobody there"
        self.fault(f"{kind}: {type(exc).__name__}: {exc}")
        return "lost"

    def fault(self, told: str) -> None:
        self.num_faults += 1
        if len(self.faults) < MAX_TOLD:
            self.faults.append(told)
