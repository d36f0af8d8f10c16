"""Loads the media of requests for the engine: fetches, decodes, and prepares them with the model's
processor.

Each step is a blocking call, which the callers run in their own threads (`server/media.py`,
`weft.LLM`). Prepared media are cached by the SHA-256 of their bytes, because in a conversation the
same picture comes with every turn.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from weft.messages.media import MediaItem, MediaKind
from weft.text.media.adjusted import adjusted_within
from weft.text.media.errors import MediaError, MediaTooLarge
from weft.text.media.fetch import Fetcher
from weft.text.media.limits import MediaLimits
from weft.text.media.pictures import ALLOWED as PICTURE_FORMATS
from weft.text.media.pictures import decode_frames, decode_picture, open_picture
from weft.text.media.placing import NAMES, ReadyMedia, count, in_text, in_tokens, ready
from weft.text.media.processor import MediaProcessor, PreparedMedia
from weft.text.media.sound import decode_sound
from weft.text.media.sources import MediaSource, Raw, read_inline
from weft.text.media.video import ALLOWED as VIDEO_FORMATS
from weft.text.media.video import FRAMES_PER_S, container_of, decode_video

if TYPE_CHECKING:
    from PIL.Image import Image

Key: TypeAlias = tuple[MediaKind, bytes, float, str]

LONG_PIXELS = 1_000_000  # a picture of more pixels is long work


class Opened(NamedTuple):
    """A file whose format and size are known, and which is not decoded yet."""

    kind: MediaKind
    key: Key
    raw: Raw
    images: tuple[Image, ...]  # of a picture or an animation; empty for an MP4 or a sound
    container: str = ""  # format of a video file (`video.container_of`); "" for other files
    found: ReadyMedia | None = None  # the prepared media, if the cache has them

    @property
    def is_long(self) -> bool:
        """Whether preparing the file is long work."""
        if self.found is not None:
            return False
        if self.kind != "image":
            return True
        width, height = self.images[0].size
        return width * height > LONG_PIXELS


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
        self._changes = ""  # the request's changes of the processor, as JSON

    def adjusted(self, given: Mapping[str, Any]) -> MediaLoader:
        """A loader with a request's changes of the processor (`text/media/adjusted.py`). It shares
        the cache of prepared media. Raises `MediaError`."""
        found = copy(self)
        found._processor = adjusted_within(self._processor, given)
        found._changes = json.dumps(given, sort_keys=True)
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

    def open(
        self,
        source: MediaSource,
        raw: Raw,
    ) -> Opened:
        """Find the format and size of the bytes, without decoding them. Raises `MediaRefusal`."""
        digest = hashlib.sha256()
        for file in raw.files:
            digest.update(len(file).to_bytes(8, "little"))
            digest.update(file)
        key = (source.kind, digest.digest(), raw.frames_per_s, self._changes)
        found = self._cache.get(key)
        images: tuple[Image, ...] = ()
        container = ""
        if source.kind == "video" and len(raw.files) == 1:
            container = container_of(raw.files[0])
        if found is None and source.kind != "audio" and not container:
            most = self.limits.max_image_pixels
            is_one_video = source.kind == "video" and len(raw.files) == 1
            allowed = VIDEO_FORMATS if is_one_video else PICTURE_FORMATS
            try:
                images = tuple(open_picture(file, most, allowed) for file in raw.files)
            except ValueError as exc:
                raise MediaRefusal(source, exc) from exc
        return Opened(source.kind, key, raw, images, container, found)

    def make_ready(
        self,
        source: MediaSource,
        opened: Opened,
    ) -> ReadyMedia:
        """Decode a file, and prepare it with the model's processor. Raises `MediaRefusal`."""
        if opened.found is not None:
            return opened.found
        try:
            made = ready(opened.kind, self._prepared(opened))
        except ValueError as exc:
            raise MediaRefusal(source, exc) from exc
        self._cache.put(opened.key, made)
        return made

    def load(self, sources: Sequence[MediaSource]) -> list[ReadyMedia]:
        """Do all steps for all sources, in this thread. Raises `MediaRefusal`."""
        self.check(sources)
        loaded: list[ReadyMedia] = []
        left = self.limits.max_bytes
        for source in sources:
            raw = self.read(source, left)
            left -= raw.num_bytes
            loaded.append(self.make_ready(source, self.open(source, raw)))
        return loaded

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

    # ---- by kind

    def _prepared(self, opened: Opened) -> PreparedMedia:
        match opened.kind:
            case "image":
                return self._processor.image(decode_picture(opened.images[0]))
            case "video":
                return self._video(opened)
            case "audio":
                return self._audio(opened)

    def _video(self, opened: Opened) -> PreparedMedia:
        """Prepare a video: a video file, an animation, or one picture for each frame."""
        frames_per_s = opened.raw.frames_per_s
        if opened.container:
            [file] = opened.raw.files
            return self._processor.video(*decode_video(file, opened.container, self.limits))
        if len(opened.images) == 1:
            frames, told = decode_frames(opened.images[0], self.limits)
            return self._processor.video(frames, frames_per_s or told or FRAMES_PER_S)
        first = opened.images[0].size
        self.limits.require_frames(len(opened.images), first)
        for index, image in enumerate(opened.images):
            if image.size != first:
                raise MediaError(f"its frame {index} has another size than the first")
        frames = [decode_picture(image) for image in opened.images]
        return self._processor.video(frames, frames_per_s or FRAMES_PER_S)

    def _audio(self, opened: Opened) -> PreparedMedia:
        [file] = opened.raw.files
        rate = self._processor.audio_rate
        return self._processor.audio(decode_sound(file, rate, self.limits.max_audio_s))


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
