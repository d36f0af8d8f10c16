"""Keeps the KV of a chat that has ended with tool calls until its client is expected back.

The front says which requests may end so (`may_pause`), and which have (`pause`). Their KV is then
pinned softly: other prefixes are evicted first, but no request waits for its memory. It counts as
pinned, beside the pins that users have asked for, which have priority.

    end ─▶ it may be a pause ── pause ─▶ pinned ── a prompt that begins with its own ─▶ learnt
                                            └───── it takes longer than expected ──▶ not pinned

A pause that is longer than expected is still learnt when it ends. The time is an input (`now`), so
a journal repeats each decision.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np

from weft.arrays import IntArray
from weft.memory.accounting.pins import Pin
from weft.memory.radix.tree import pages_of
from weft.messages.replies import FinishReason
from weft.messages.requests import GenerateRequest
from weft.scheduler.estimate.pauses import PausesSeen
from weft.scheduler.feature import Feature
from weft.scheduler.features.pin_book import PinBook
from weft.scheduler.kv import KvMemory
from weft.scheduler.request import Request, namespace_of
from weft.scheduler.settings import SchedulerSettings

MAX_CHATS = 256
MAX_BYTES = 64_000_000  # of the tokens of these chats


class PausedChat:
    """A chat whose client may come back."""

    __slots__ = ("began_s", "id", "key", "pin", "prompt", "tenant", "tools", "until_s")

    def __init__(self, request: Request, now: float) -> None:
        self.id = request.id
        self.tenant = request.message.tenant
        self.key = request.cache_key(request.packed)
        # The part with which the next prompt begins in any case.
        self.prompt = self.key.first(request.spec.prompt_len)
        self.tools: tuple[str, ...] = ()  # empty: whether it has called tools is not known
        self.began_s = now
        self.pin: Pin | None = None
        self.until_s = math.inf  # when the pin is dropped

    @property
    def is_pinned(self) -> bool:
        return self.pin is not None and not self.pin.why_lost


class ToolPausesFeature(Feature):
    """The engine sets `wake`, which is called when a chat gets pinned."""

    request_fields = ("may_pause",)

    def __init__(self, settings: SchedulerSettings, book: PinBook) -> None:
        self.longest_s = settings.tool_pause_s if settings.max_pinned else 0.0
        self.seen = PausesSeen()
        self.chats: OrderedDict[int, PausedChat] = OrderedDict()  # by id, in order of their end
        self.num_kept = 0
        self.num_back = 0  # pauses that ended while the chat was pinned
        self.wake: Callable[[], None] | None = None
        self._book = book
        self._num_bytes = 0
        self._back: dict[int, PausedChat] = {}  # by the id of the request that continues the chat

    # ---- requests

    def arrive(self, message: GenerateRequest) -> None:
        chat = self._continued_by(message)
        if chat is not None:
            chat.until_s = math.inf  # it waits for a row, and not for its client
            self._forget(chat)
            self._back[message.id] = chat

    def enter_row(self, request: Request) -> None:
        """The request uses the chat's KV itself now."""
        chat = self._back.pop(request.id, None)
        if chat is None:
            return
        if chat.tools:
            self.seen.note(chat.tenant, chat.tools, request.spec.arrival_s - chat.began_s)
            self.num_back += chat.is_pinned
        _drop(chat)

    def end(self, request: Request, reason: FinishReason, now: float, kv: KvMemory) -> None:
        chat = self._back.pop(request.id, None)
        if chat is not None:  # it has never had a row
            _drop(chat)
        if reason != "stop" or not self.longest_s or not request.message.shares_kv:
            return
        chat = PausedChat(request, now)
        self.chats[chat.id] = chat
        self._num_bytes += _size(chat)
        while len(self.chats) > MAX_CHATS or self._num_bytes > MAX_BYTES:
            oldest = next(iter(self.chats.values()))
            self._forget(oldest)
            _drop(oldest)

    # ---- pauses

    def pause(self, id: int, tools: tuple[str, ...], kv: KvMemory, now: float) -> str:
        """The request that has just ended has called these tools. Returns what is done, in words;
        empty if the request is not known."""
        chat = self.chats.get(id)
        if chat is None or chat.tools or not tools:
            return ""
        chat.tools = tools
        expected = self.seen.expected(chat.tenant, tools)
        seconds = f"{expected.seconds:,.1f} s"
        if expected.seconds > self.longest_s:
            return (
                f"its KV is not kept for the pause: {seconds} are expected ({expected.why}), "
                f"at most {self.longest_s:,.1f} s are allowed"
            )
        pages = kv.cache.match(chat.key).pages
        if not len(pages):
            return "its KV is not kept for the pause: it is not in the cache"
        if not self._make_room(chat, pages, kv):
            return "its KV is not kept for the pause: pins have no room for it"
        chat.pin = kv.pins.keep_softly(f"pause of {id}", chat.key)
        chat.until_s = now + expected.seconds
        self.num_kept += 1
        if self.wake is not None:
            self.wake()
        num_tokens = chat.pin.num_tokens
        return f"{num_tokens:,} tokens of its KV are kept for a pause, {seconds}: {expected.why}"

    def expire(self, now: float) -> list[PausedChat]:
        """Drop the pins of the chats whose pause takes longer than expected. Returns these."""
        late = [chat for chat in self.chats.values() if chat.until_s <= now]
        for chat in late:
            chat.until_s = math.inf
            _drop(chat)
        return late

    @property
    def due_s(self) -> float:
        """No pin is dropped before this time."""
        return min((chat.until_s for chat in self.chats.values()), default=math.inf)

    @property
    def num_pinned(self) -> int:
        """Chats whose KV is kept for their pause."""
        return sum(chat.is_pinned for chat in self.chats.values())

    # ---- inside

    def _continued_by(self, message: GenerateRequest) -> PausedChat | None:
        """The chat with the longest prompt that the prompt of a request begins with."""
        found: PausedChat | None = None
        namespace = namespace_of(message.adapter, message.cache_salt)
        for chat in self.chats.values():
            prompt = chat.prompt
            if found is not None and prompt.num_tokens < found.prompt.num_tokens:
                continue
            is_same = (chat.tenant, prompt.namespace) == (message.tenant, namespace)
            if is_same and message.input_ids.startswith(prompt.tokens):
                found = chat
        return found

    def _make_room(self, chat: PausedChat, pages: IntArray, kv: KvMemory) -> bool:
        """Let the tenant's earlier chats go, until the pages of this one may be pinned. Returns
        whether they may be."""
        quota = self._book.quota(chat.tenant)
        left = self._book.max_pages - self._book.num_pages(kv)
        own = [one for one in self.chats.values() if one.tenant == chat.tenant and one.is_pinned]
        others = [one for one in self.chats.values() if one.is_pinned and one not in own]
        if _num_pages([], pages, kv) > quota or _num_pages(others, pages, kv) > left:
            return False
        while _num_pages(own, pages, kv) > quota or _num_pages([*others, *own], pages, kv) > left:
            earliest = own.pop(0)
            earliest.until_s = math.inf
            _drop(earliest)
        return True

    def _forget(self, chat: PausedChat) -> None:
        del self.chats[chat.id]
        self._num_bytes -= _size(chat)


def _drop(chat: PausedChat) -> None:
    if chat.pin is not None:
        chat.pin.drop()
        chat.pin = None


def _size(chat: PausedChat) -> int:
    return len(chat.key.tokens) + len(chat.prompt.tokens)


def _num_pages(chats: Iterable[PausedChat], pages: IntArray, kv: KvMemory) -> int:
    """The pages of these pins and the others; a page of several counts once."""
    marked = np.zeros(kv.allocator.num_pages, dtype=np.bool_)
    marked[pages] = True
    for chat in chats:
        if chat.pin is not None:
            marked[pages_of(chat.pin.handle)] = True
    return int(np.count_nonzero(marked))
