"""Message parts other than text, in the forms of OpenAI, vLLM and Hugging Face: the sources of
their bytes, and the parts that the chat template gets instead."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from weft.messages.media import MediaKind
from weft.server.chat.models import AudioData, ChatMessage, ContentPart, MediaAddress, PlacedPart
from weft.server.errors import ApiError
from weft.text.media.sources import MediaSource, text_source

KINDS: dict[str, MediaKind] = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "video_url": "video",
    "video": "video",
    "input_audio": "audio",
    "audio_url": "audio",
    "audio": "audio",
}


def without_media(
    message: ChatMessage,
    parts: Sequence[ContentPart],
    where: str,
) -> tuple[ChatMessage, list[MediaSource]]:
    """`message`, with the content `parts`, in the form for its template, and the sources of its
    media.

    Raises `ApiError` for a part without a source.
    """
    sources: list[MediaSource] = []
    kept: list[ContentPart] = []
    for number, part in enumerate(parts):
        kind = KINDS.get(part.type)
        if kind is None:
            kept.append(part)
            continue
        param = f"{where}.content[{number}]"
        if isinstance(part, PlacedPart):
            param = part.where
        sources.append(_source(part, kind, param))
        kept.append(ContentPart(type=kind))
    if sources:
        message = msgspec.structs.replace(message, content=kept)
    return message, sources


def _source(
    part: ContentPart,
    kind: MediaKind,
    where: str,
) -> MediaSource:
    if part.file_id is not None:
        message = f"{where} names a file_id; uploaded files serve batches only"
        raise ApiError(400, message, param=where, code="unsupported_parameter")
    content = getattr(part, part.type, None)
    if part.type == "input_image":
        content = part.image_url
    if isinstance(content, MediaAddress):
        content = content.url
    if isinstance(content, AudioData):
        return text_source(kind, where, content.data)
    if not content:
        name = "image_url" if part.type == "input_image" else part.type
        raise ApiError(400, f"{where} has no {name}", param=where)
    if part.type in ("image", "video", "audio"):
        return text_source(kind, where, content)
    return MediaSource(kind, where, url=content)
