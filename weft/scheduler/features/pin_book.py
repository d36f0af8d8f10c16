"""The pinned beginnings of prompts: their tenants, their ends, and their limits.

All pins together hold at most a part of the pool, and those of a tenant at most its share of that.
A new pin replaces the least recently used unnamed pins of its tenant, but never pins of another
tenant. An entry outlives its KV: if the KV was evicted, it is pinned again when it is computed or
read again, until the entry expires. The book knows keys and pages, but no requests.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from weft.arrays import BoolArray, IntArray
from weft.memory.accounting.pins import Pin
from weft.memory.prefix_cache import CacheKey
from weft.memory.radix.tree import pages_of
from weft.scheduler.kv import KvMemory


class WantedPin(NamedTuple):
    """A sequence to pin."""

    name: str  # empty: the book makes up a name
    tenant: str
    key: CacheKey  # of whole pages
    ttl_s: float


class PinEntry:
    """One entry of the book."""

    __slots__ = ("key", "name", "num_uses", "pin", "tenant", "ttl_s", "until_s")

    def __init__(
        self,
        name: str,
        wanted: WantedPin,
        pin: Pin,
    ) -> None:
        self.name = name
        self.tenant = wanted.tenant
        self.key = wanted.key
        self.ttl_s = wanted.ttl_s
        self.until_s = 0.0
        self.num_uses = 0
        self.pin = pin  # its `why_lost` says whether the KV is cached

    @property
    def num_tokens(self) -> int:
        return self.key.num_tokens

    @property
    def is_there(self) -> bool:
        return not self.pin.why_lost

    @property
    def is_complete(self) -> bool:
        """Whether the whole sequence is pinned. A store has only full blocks, so KV that was read
        from it may lack the last few pages."""
        return self.is_there and self.pin.num_tokens == self.num_tokens


class PinBook:
    """`max_pages`: limit of all pins together. `shares`: part of it by tenant; a tenant without an
    entry may use all of it."""

    def __init__(
        self,
        max_pages: int,
        shares: Mapping[str, float],
    ) -> None:
        self.max_pages = max_pages
        self._shares = dict(shares)
        self.by_name: OrderedDict[str, PinEntry] = OrderedDict()  # least recently used first
        self._named: set[str] = set()  # pins whose names were given by users
        self._num_made_up = 0
        self.due_s = math.inf  # no pin expires before this time
        self.num_refused = 0
        self._fresh: list[CacheKey] = []  # keys pinned since the last `take_fresh`

    def __len__(self) -> int:
        return len(self.by_name)

    # Coming and going

    def use(
        self,
        wanted: WantedPin,
        kv: KvMemory,
        now: float,
    ) -> str:
        """Pin a sequence that is cached completely, or extend its pin. Returns why not; empty if it
        is pinned."""
        entry = self._find(wanted)
        if entry is None or not entry.is_complete:
            pages = kv.cache.match(wanted.key).pages
            why_not = self._make_room(wanted, pages, kv)
            if why_not:
                self.num_refused += 1
                return why_not
            if entry is None or entry.name not in self.by_name:  # `_make_room` may have removed it
                entry = self._enter(wanted, kv)
            else:
                part = entry.pin
                entry.pin = _keep(entry.name, entry.key, kv)
                part.drop()
            self._fresh.append(entry.key)
        kv.pins.harden(entry.pin)
        entry.pin.touch()
        self.by_name.move_to_end(entry.name)
        entry.num_uses += 1
        entry.ttl_s = wanted.ttl_s
        until_s = now + wanted.ttl_s
        if not wanted.name:
            until_s = max(entry.until_s, until_s)
        entry.until_s = until_s
        self._drop_covered(entry)
        self._find_due()
        return ""

    def remove(self, name: str) -> int:
        """Remove a pin. Returns its tokens; 0 if there is no pin of this name."""
        entry = self.by_name.pop(name, None)
        if entry is None:
            return 0
        self._named.discard(name)
        entry.pin.drop()
        return entry.num_tokens

    def expire(self, now: float) -> list[str]:
        """Remove the expired pins. Returns their names."""
        if now < self.due_s:
            return []
        late = [entry.name for entry in self.by_name.values() if entry.until_s <= now]
        for name in late:
            self.remove(name)
        self._find_due()
        return late

    def take_fresh(self) -> list[CacheKey]:
        """The keys that were pinned since the last call."""
        fresh = self._fresh
        self._fresh = []
        return fresh

    def restore(self, kv: KvMemory, block_len: int = 1) -> list[PinEntry]:
        """Make all pins firm again whose KV is cached, in full blocks. Call it while nothing runs.
        Returns the entries whose KV is not cached."""
        missing = []
        for entry in self.by_name.values():
            if entry.is_there:
                kv.pins.harden(entry.pin)
            elif kv.cache.peek(entry.key) < max(entry.num_tokens // block_len * block_len, 1):
                missing.append(entry)
            elif self._fits(self._present(), entry.tenant, kv.cache.match(entry.key).pages, kv):
                entry.pin = _keep(entry.name, entry.key, kv)
        return missing

    # Observation

    def state_of(
        self,
        entry: PinEntry,
        kv: KvMemory,
    ) -> str:
        """The state of an entry in a word, or why its KV is not cached."""
        if entry.pin.why_lost:
            return entry.pin.why_lost
        if kv.pins.is_firm(entry.pin):
            return "firm"
        return "gives way"

    def num_pages(self, kv: KvMemory) -> int:
        """Number of pinned pages; a page of several pins counts once."""
        return int(np.count_nonzero(_marked(self._present(), kv)))

    # Inside

    def _find(self, wanted: WantedPin) -> PinEntry | None:
        if wanted.name:
            entry = self.by_name.get(wanted.name)
            same = entry is not None and entry.key == wanted.key
            return entry if same else None
        for entry in self.by_name.values():
            if entry.tenant == wanted.tenant and entry.key == wanted.key:
                return entry
        return None

    def _enter(
        self,
        wanted: WantedPin,
        kv: KvMemory,
    ) -> PinEntry:
        name = wanted.name
        if name:
            self.remove(name)  # a pin of another sequence
            self._named.add(name)
        else:
            name = self._made_up_name()
        entry = PinEntry(name, wanted, _keep(name, wanted.key, kv))
        self.by_name[name] = entry
        return entry

    def _made_up_name(self) -> str:
        while True:
            self._num_made_up += 1
            name = f"pin-{self._num_made_up}"
            if name not in self.by_name:
                return name

    def _make_room(
        self,
        wanted: WantedPin,
        pages: IntArray,
        kv: KvMemory,
    ) -> str:
        """Remove pins of the same tenant until there is room for `pages`. Returns why there cannot
        be room, and then removes none; empty if there is room."""
        tenant = wanted.tenant
        replaceable = []
        others = []
        for entry in self._present():
            is_own = entry.tenant == tenant and entry.name not in self._named
            if is_own or entry.name == wanted.name:
                replaceable.append(entry)
            else:
                others.append(entry)
        if not self._fits(others, tenant, pages, kv):
            return self._why_full(tenant, pages, kv)
        while not self._fits([*others, *replaceable], tenant, pages, kv):
            self.remove(replaceable.pop(0).name)
        return ""

    def _fits(
        self, entries: Iterable[PinEntry], tenant: str, pages: IntArray, kv: KvMemory
    ) -> bool:
        entries = list(entries)
        own = [entry for entry in entries if entry.tenant == tenant]
        for limit, counted in ((self.max_pages, entries), (self.quota(tenant), own)):
            marked = _marked(counted, kv)
            marked[pages] = True
            if int(np.count_nonzero(marked)) > limit:
                return False
        return True

    def quota(self, tenant: str) -> int:
        """Pages that all pins of a tenant may hold."""
        return int(self.max_pages * self._shares.get(tenant, 1.0))

    def _why_full(
        self,
        tenant: str,
        pages: IntArray,
        kv: KvMemory,
    ) -> str:
        num_tokens = len(pages) * kv.page_size
        quota = self.quota(tenant) * kv.page_size
        if num_tokens > quota:
            return f"{num_tokens:,} tokens are more than the {quota:,} that may be pinned"
        used = self.num_pages(kv) * kv.page_size
        return f"{used:,} of the {self.max_pages * kv.page_size:,} tokens that may be are pinned"

    def _present(self) -> list[PinEntry]:
        return [entry for entry in self.by_name.values() if entry.is_there]

    def _find_due(self) -> None:
        self.due_s = min((entry.until_s for entry in self.by_name.values()), default=math.inf)

    def _drop_covered(self, longer: PinEntry) -> None:
        """Remove the unnamed pins that are contained in a pin of the same tenant that expires
        later: each turn of a conversation marks a new end."""
        covered = []
        for entry in self.by_name.values():
            if entry is longer or entry.tenant != longer.tenant or entry.name in self._named:
                continue
            if entry.key.namespace != longer.key.namespace or entry.until_s > longer.until_s:
                continue
            if longer.key.tokens.startswith(entry.key.tokens):
                covered.append(entry.name)
        for name in covered:
            self.remove(name)


def _keep(
    name: str,
    key: CacheKey,
    kv: KvMemory,
) -> Pin:
    if kv.pins_firmly:
        return kv.pins.keep_firm(name, key)
    return kv.pins.keep_softly(name, key)


def _marked(entries: Iterable[PinEntry], kv: KvMemory) -> BoolArray:
    """[pages of the pool] whether a page belongs to some of these pins."""
    marked: BoolArray = np.zeros(kv.allocator.num_pages, dtype=np.bool_)
    for entry in entries:
        marked[pages_of(entry.pin.handle)] = True
    return marked
