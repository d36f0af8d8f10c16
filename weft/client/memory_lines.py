"""The memory of an engine, for the live page: tokens of the KV pool by owner, and a line of text
for each other store and for each pin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from weft.config.drafts import SOURCES
from weft.config.numbers import counted
from weft.messages.pins import PinStatus
from weft.messages.status import Stats

UNITS = ("B", "kB", "MB", "GB", "TB")


class Store(NamedTuple):
    """A line with names of `Stats` in braces. It is shown if one of these numbers is not 0."""

    words: str
    # The bar of the line shows the sum of `parts` as a share of `total`; "": there is no bar.
    parts: tuple[str, ...] = ()
    total: str = ""


def _guesses(source: str) -> Store:
    accepted = f"total_accepted_{source}"
    drafts = f"total_drafts_{source}"
    return Store(f"guesses ({source}): {{{accepted}}} of {{{drafts}}} right", (accepted,), drafts)


STORES = (
    Store(
        "layers with windows: {kv_window_used} used, {kv_window_evictable} cached "
        "of {kv_window_tokens}",
        ("kv_window_used", "kv_window_evictable"),
        "kv_window_tokens",
    ),
    Store(
        "states: {state_slots_used} used, {state_slots_evictable} snapshots of {state_slots}",
        ("state_slots_used", "state_slots_evictable"),
        "state_slots",
    ),
    Store(
        "in the host's memory: {host_bytes} in {host_blocks} blocks · {total_host_hit_tokens} "
        "tokens found there"
    ),
    Store(
        "on disk: {disk_bytes} in {disk_blocks} blocks · {total_disk_hit_tokens} tokens found "
        "there · {total_disk_faults} faults"
    ),
    Store(
        "adapters: {adapter_slots_used} run in {adapter_slots} slots, {num_adapters} loaded",
        ("adapter_slots_used",),
        "adapter_slots",
    ),
    Store(
        "pictures, videos, sounds: {encoder_tokens} tokens kept · encoded {total_encoder_runs}, "
        "found {total_encoder_hits}"
    ),
    Store("sessions: {num_sessions} open"),
    Store(
        "grammars: {total_grammars} asked for, {total_grammar_hits} found compiled, "
        "{num_grammar_queue} being compiled"
    ),
    *map(_guesses, SOURCES),
)


class _NamedFigures(dict[str, str]):
    """The numbers of `Stats` as text, by name. `is_something`: a number that was read is not 0."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self.is_something = False

    def __missing__(self, name: str) -> str:
        value = getattr(self._stats, name)
        self.is_something = self.is_something or value > 0
        if name.endswith("_bytes"):
            return _size(value)
        return f"{value:,}"


def stores(stats: Stats) -> list[dict[str, Any]]:
    """The lines to show: `words`, and `share` of the bar, from 0 to 1; None: there is no bar."""
    lines = []
    for store in STORES:
        figures = _NamedFigures(stats)
        words = store.words.format_map(figures)
        if not figures.is_something:
            continue
        share = None
        if store.total and getattr(stats, store.total):
            used = sum(getattr(stats, name) for name in store.parts)
            share = min(used / getattr(stats, store.total), 1.0)
        lines.append({"words": words, "share": share})
    return lines


def owners(stats: Stats) -> dict[str, int]:
    """Tokens of the KV pool by owner. Pinned tokens are in use, and are listed separately."""
    found = {
        "requests": stats.kv_used - stats.pinned_tokens,
        "cached": stats.kv_evictable,
        "pinned": stats.kv_held + stats.pinned_tokens,
        "out of use": stats.kv_quarantined,
    }
    found["free"] = max(stats.kv_tokens - sum(found.values()), 0)
    return found


def pins(found: Sequence[PinStatus]) -> list[dict[str, Any]]:
    """The fields of each pin, and its description in `words`."""
    return [{**msgspec.structs.asdict(pin), "words": _pin_words(pin)} for pin in found]


def _pin_words(pin: PinStatus) -> str:
    words = [
        counted(pin.tokens, "token"),
        pin.tenant,
        f"used {counted(pin.uses, 'time')}",
        f"for {_span(pin.expires_in_s)}",
    ]
    if pin.state != "firm":
        words.append(pin.state)
    return " · ".join(word for word in words if word)


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7_200:
        return f"{seconds // 60:.0f} min"
    return f"{seconds // 3_600:,.0f} h {seconds % 3_600 // 60:.0f} min"


def _size(num_bytes: float) -> str:
    for unit in UNITS:
        if num_bytes < 1_000 or unit == UNITS[-1]:
            break
        num_bytes /= 1_000
    return f"{num_bytes:.3g} {unit}"
