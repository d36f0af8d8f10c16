"""Loads the media of requests for the engine: fetches them, and finds those that are prepared.

Each step is a blocking call, which the callers run in their own threads (`server/media.py`,
`weft.LLM`). A server reads files in helper processes (`reader_helper.py`), between `look` and
`keep`; `load` reads them here. Prepared media are cached by the SHA-256 of their bytes, because in
a conversation the same picture comes with every turn.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple, TypeAlias

from weft.json_types import JsonObject
from weft.messages.media import MediaItem, MediaKind
from weft.text.media.adjusted import adjusted_within
from weft.text.media.errors import MediaError, MediaTooLarge
from weft.text.media.fetch import Fetcher
from weft.text.media.heads import size_in_head
from weft.text.media.limits import LONG_PIXELS, MediaLimits
from weft.text.media.placing import NAMES, ReadyMedia, count, in_text, in_tokens, ready
from weft.text.media.processor import MediaProcessor
from weft.text.media.reader import read_media
from weft.text.media.sources import MediaSource, Raw, read_inline

Key: TypeAlias = tuple[MediaKind, bytes, float, str]


class MediaFile(NamedTuple):
    """A file that is here, and that nothing has decoded yet."""

    kind: MediaKind
    key: Key
    raw: Raw
    found: ReadyMedia | None = None  # the prepared media, if the cache has them

    @property
    def is_long(self) -> bool:
        """Whether preparing the file is long work, as far as its head says."""
        if self.found is not None:
            return False
        if self.kind != "image":
            return True
        size = size_in_head(self.raw.files[0])
        return size is None or size[0] * size[1] > LONG_PIXELS


class MediaLoader:
    """Loads media for one model. Calls may run in several threads at once."""

    def __init__(
        self,
        processor: MediaProcessor,
        token_ids: Mapping[MediaKind, int],
        fetcher: Fetcher,
        limits: MediaLimits | None = None,
        cache_bytes: int = 0,
    ) -> None:
        """`token_ids`: the placeholder token of each kind of media that the model takes."""
        self.limits = limits or MediaLimits()
        self.fetcher = fetcher
        self.marks: Mapping[MediaKind, str] = dict(processor.marks)
        self._processor = processor
        self._token_ids = dict(token_ids)
        self._cache = ReadyCache(cache_bytes)
        self.changes: JsonObject = {}  # the request's, of the processor
        self._changes_json = ""

    def adjusted(self, kwargs: Mapping[str, Any]) -> MediaLoader:
        """A loader with a request's changes of the processor (`text/media/adjusted.py`). It shares
        the cache of prepared media. Raises `MediaError`."""
        found = copy(self)
        found._processor = adjusted_within(self._processor, kwargs)
        found.changes = dict(kwargs)
        found._changes_json = json.dumps(kwargs, sort_keys=True)
        return found

    # ---- what may be asked for

    def check(self, sources: Sequence[MediaSource]) -> None:
        """Raise `MediaRefusal` for the first source of a kind that the model does not take, for too
        many sources, and for a forbidden address. Nothing is read or fetched."""
        numbers: dict[MediaKind, int] = {}
        for source in sources:
            kind = source.kind
            if kind not in self.marks:
                raise MediaRefusal(source, MediaError(f"this model takes no {NAMES[kind][1]}"))
            numbers[kind] = numbers.get(kind, 0) + 1
        for kind, number in numbers.items():
            most = self.limits.per_prompt.get(kind, 0)
            if number > most:
                last = [source for source in sources if source.kind == kind][most]
                message = (
                    f"the prompt has {count(number, kind)}; {most:,} are allowed "
                    "(--limit-mm-per-prompt)"
                )
                raise MediaRefusal(last, MediaError(message))
        for source in sources:
            if source.is_elsewhere:
                try:
                    self.fetcher.check(source.url)
                except MediaError as exc:
                    raise MediaRefusal(source, exc) from exc

    # ---- steps of loading

    def read(
        self,
        source: MediaSource,
        max_bytes: int,
    ) -> Raw:
        """The bytes of a source. Raises `MediaRefusal`."""
        try:
            if source.is_elsewhere:
                return Raw((self.fetcher.fetch(source.url, max_bytes),))
            return read_inline(source, max_bytes)
        except ValueError as exc:
            raise MediaRefusal(source, exc) from exc

    def look(self, source: MediaSource, raw: Raw) -> MediaFile:
        """Find out whether the cache has these bytes. Nothing is decoded."""
        digest = hashlib.sha256()
        for data in raw.files:
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
        key = (source.kind, digest.digest(), raw.frames_per_s, self._changes_json)
        return MediaFile(source.kind, key, raw, self._cache.get(key))

    def keep(self, file: MediaFile, made: ReadyMedia) -> None:
        """Put prepared media into the cache."""
        self._cache.put(file.key, made)

    def load(self, sources: Sequence[MediaSource]) -> list[ReadyMedia]:
        """Do all steps for all sources, in this thread. Raises `MediaRefusal`."""
        self.check(sources)
        loaded: list[ReadyMedia] = []
        left = self.limits.max_bytes
        for source in sources:
            raw = self.read(source, left)
            left -= raw.num_bytes
            file = self.look(source, raw)
            loaded.append(file.found or self._made(source, file))
        return loaded

    def _made(self, source: MediaSource, file: MediaFile) -> ReadyMedia:
        raw = file.raw
        try:
            made = read_media(self._processor, self.limits, file.kind, raw.files, raw.frames_per_s)
            one = ready(file.kind, made)
        except ValueError as exc:
            raise MediaRefusal(source, exc) from exc
        self.keep(file, one)
        return one

    # ---- in a prompt

    def in_text(
        self,
        text: str,
        media: Sequence[ReadyMedia],
    ) -> tuple[str, list[ReadyMedia]]:
        """`placing.in_text` with the marks of this model."""
        return in_text(text, self.marks, media)

    def in_tokens(
        self,
        ids: Sequence[int],
        media: Sequence[ReadyMedia],
    ) -> tuple[MediaItem, ...]:
        """`placing.in_tokens` with the placeholders of this model."""
        return in_tokens(ids, self._token_ids, media)


class MediaRefusal(Exception):
    """One source is refused; `source.where` is its field in the request."""

    def __init__(
        self,
        source: MediaSource,
        cause: ValueError,
    ) -> None:
        super().__init__(f"{source.where}: {cause}")
        self.source = source
        self.limit = cause.limit if isinstance(cause, MediaTooLarge) else ""


class ReadyCache:
    """A cache of prepared media, up to `max_bytes`; the least recently used are evicted."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[Key, ReadyMedia] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def get(self, key: Key) -> ReadyMedia | None:
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found

    def put(
        self,
        key: Key,
        made: ReadyMedia,
    ) -> None:
        """Add prepared media, unless they are larger than the whole cache."""
        if made.num_bytes > self._max_bytes:
            return
        with self._lock:
            if key in self._kept:
                return
            self._kept[key] = made
            self._num_bytes += made.num_bytes
            while self._num_bytes > self._max_bytes:
                _, dropped = self._kept.popitem(last=False)
                self._num_bytes -= dropped.num_bytes


def token_ids(
    processor: MediaProcessor, encode: Callable[[str], Sequence[int]]
) -> dict[MediaKind, int]:
    """The ids of a processor's placeholders. `encode` turns a text into ids. Raises ValueError for
    a placeholder that is not one token."""
    found: dict[MediaKind, int] = {}
    for kind, text in processor.placeholders.items():
        ids = encode(text)
        if len(ids) != 1:
            raise ValueError(
                f"its tokenizer has no token {text!r}, which stands for {NAMES[kind][1]}"
            )
        found[kind] = ids[0]
    return found
