"""Holders: who uses pages of the pool without a request, besides the prefix cache and its pins.

`KvMemory` asks each of its holders before it takes memory back, and counts what they own. A holder
overrides the hooks that it needs. This module knows no request.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from weft.arrays import IntArray


class ResumeStateInUse(NamedTuple):
    """The resume state of a sequence (`memory/tiers/resume_states.py`) that a holder uses."""

    name: str  # of the holder's part, for reports of faults
    indices: IntArray  # slots or pages of the group
    is_reserved: bool  # whether the holder owns them alone, because they are being written


class Holder:
    num_owned = 0  # pages that the holder owns alone

    def reclaim(self) -> bool:
        """Give back as much memory as possible now. Returns whether more will come back later."""
        return False

    def tokens_become_invalid(self) -> None:
        """Computed tokens are going to be dropped from the cache: end the locks that can end."""

    def before_emptying(self, why: str) -> None:
        """The cache is going to be emptied: unlock everything in it."""

    def after_emptying(self) -> None:
        """The cache has been emptied."""

    def before_reset(self, why: str) -> None:
        """All memory is going to be freed. Read no state that a fault may have damaged, and unlock
        nothing."""

    def after_reset(self) -> None:
        """All memory is free: take back what may still be written."""

    def weights_changed(self, why: str) -> None:
        """KV from now on is computed with other weights."""

    # Accounting

    def owned(self) -> dict[str, IntArray]:
        """The pages that the holder owns alone, by names for reports of faults."""
        return {}

    def resume_states_in_use(self) -> Iterable[ResumeStateInUse]:
        """The resume states of sequences that it uses."""
        return ()
