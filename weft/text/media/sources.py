"""Sources of the bytes of a picture, a video or a sound: the request itself, or an address."""

from __future__ import annotations

import binascii
import re
from typing import NamedTuple

from weft.messages.media import MediaKind
from weft.text.media.errors import MediaError, MediaTooLarge

LIMIT = "max_media_mb"
# Characters of base64 that are decoded at once: between two pieces other threads can run.
PIECE_LEN = 1 << 20
FRAMES_TYPE = "video/jpeg"  # a video as one picture per frame (vLLM)
ADDRESSES = ("data:", "http:", "https:", "file:")
# The first character that does not belong in base64; = belongs at the end, one or two times.
_FOREIGN = re.compile(r"[^A-Za-z0-9+/=]|=(?!=?\Z)")


class MediaSource(NamedTuple):
    """The source of one picture, video or sound. One of `url`, `base64` and `data` is set."""

    kind: MediaKind
    where: str  # the field of the request, for messages
    url: str = ""
    base64: str = ""
    data: bytes = b""

    @property
    def is_elsewhere(self) -> bool:
        """Whether the bytes must be read from another machine or a file."""
        return bool(self.url) and self.url[:5].lower() != "data:"


class Raw(NamedTuple):
    """The bytes of a file, or of each of a video's frames."""

    files: tuple[bytes, ...]
    frames_per_s: float = 0.0  # of a video that is sent as frames; 0: unknown

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.files))


def text_source(
    kind: MediaKind,
    where: str,
    text: str,
) -> MediaSource:
    """The source for a text that is an address or base64."""
    if text[:6].lower().startswith(ADDRESSES):
        return MediaSource(kind, where, url=text)
    return MediaSource(kind, where, base64=text)


def read_inline(source: MediaSource, max_bytes: int) -> Raw:
    """The bytes of a source that the request contains.

    Raises `MediaError`, or `MediaTooLarge` before more than `max_bytes` are decoded.
    """
    if source.data:
        require_size(len(source.data), max_bytes)
        return Raw((source.data,))
    if not source.url:
        return Raw((_decoded(source.base64, max_bytes),))
    return _data_url(source, max_bytes)


def require_size(num_bytes: int, max_bytes: int) -> None:
    """Raise `MediaTooLarge` for more than `max_bytes`."""
    if num_bytes > max_bytes:
        message = f"it has {num_bytes / 1e6:,.1f} MB; {max_bytes / 1e6:,g} MB are allowed"
        raise MediaTooLarge(LIMIT, message)


def _data_url(source: MediaSource, max_bytes: int) -> Raw:
    """The bytes in a data: URL (RFC 2397). Its declared type is ignored, except for a video sent as
    frames."""
    begin = source.url.find(",", 0, 1_024)
    if begin < 0:
        raise MediaError("it is a data: URL without a comma; data:image/png;base64,... is expected")
    type, *params = source.url[len("data:") : begin].split(";")
    if not params or params[-1].strip().lower() != "base64":
        raise MediaError("it is a data: URL that is not base64; only base64 is allowed")
    if source.kind != "video" or type.strip().lower() != FRAMES_TYPE:
        return Raw((_decoded(source.url, max_bytes, begin + 1),))
    frames: list[bytes] = []
    left = max_bytes
    for index, text in enumerate(source.url[begin + 1 :].split(",")):
        if not text:
            raise MediaError(f"its frame {index} is empty: base64 is expected between two commas")
        frames.append(_decoded(text, left))
        left -= len(frames[-1])
    return Raw(tuple(frames), _frames_per_s(params))


def _frames_per_s(params: list[str]) -> float:
    """The frame rate in a data: URL, `data:video/jpeg;fps=4;base64,...`; 0 if it is not given."""
    for param in params:
        name, _, text = param.partition("=")
        if name.strip().lower() == "fps":
            try:
                value = float(text)
            except ValueError:
                value = 0.0
            if not 0.01 <= value <= 1_000:  # false for NaN, too
                raise MediaError(f"its fps are {text[:32]!r}; a number of 0.01 to 1000 is allowed")
            return value
    return 0.0


def _decoded(
    text: str,
    max_bytes: int,
    begin: int = 0,
) -> bytes:
    """The decoded bytes of the base64 from `begin` on. Line breaks are skipped: many encoders write
    lines of 76 characters (MIME)."""
    if "\n" in text or "\r" in text:
        text = text[begin:].replace("\n", "").replace("\r", "")
        begin = 0
    length = len(text) - begin
    padding = text[-2:].count("=") if length else 0
    require_size(length // 4 * 3 - padding, max_bytes)
    pieces: list[bytes] = []
    for start in range(begin, len(text), PIECE_LEN):
        piece = text[start : start + PIECE_LEN]
        try:
            pieces.append(binascii.a2b_base64(piece.encode("ascii"), strict_mode=True))
        except ValueError as exc:  # binascii.Error and UnicodeEncodeError are such
            why = _why_not_base64(piece, start - begin, length)
            raise MediaError(f"it is not base64: {why}") from exc
    return b"".join(pieces)


def _why_not_base64(piece: str, before: int, length: int) -> str:
    """What is wrong with this piece of base64 of `length` characters; `before`: characters before
    the piece."""
    foreign = _FOREIGN.search(piece)
    if foreign is None:
        return f"its length is {length:,}; a multiple of 4 characters is needed"
    return (
        f"its character {before + foreign.start() + 1:,} is {foreign[0]!r}; "
        "A to Z, a to z, 0 to 9, + and / are allowed, and = at its end"
    )
