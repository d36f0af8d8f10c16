"""Reads the pictures, videos and sounds of a Python program: in messages, or beside a prompt.

A program may name any file. Addresses of other machines are not fetched.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from weft.client.checked_args import require_text, wrong_value
from weft.json_types import JsonMapping, JsonObject
from weft.messages.media import MediaKind
from weft.messages.sampling import InvalidParam
from weft.text.media.sources import MediaSource, text_source

# The kind of media of each type of message part. In OpenAI's form, the type is also the field.
KINDS: dict[str, MediaKind] = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "video_url": "video",
    "video": "video",
    "audio_url": "audio",
    "input_audio": "audio",
    "audio": "audio",
}
FIELDS: dict[str, MediaKind] = {"images": "image", "videos": "video", "audios": "audio"}


def split_messages(
    messages: Iterable[JsonMapping],
) -> tuple[list[JsonObject], list[MediaSource]]:
    """The messages for the chat template, and the sources of their media.

    In the messages, each part with media becomes {"type": kind}. Raises `InvalidParam`.
    """
    found: list[JsonObject] = []
    sources: list[MediaSource] = []
    for index, sent in enumerate(messages):
        if not isinstance(sent, Mapping):
            raise wrong_value(f"messages[{index}]", sent, "a dictionary")
        message = dict(sent)
        require_text(f"messages[{index}].role", message.get("role"))
        content = message.get("content")
        if not isinstance(content, str | list | None):
            raise wrong_value(f"messages[{index}].content", content, "a text or a list of parts")
        if isinstance(content, list):
            parts: list[Any] = []
            for number, part in enumerate(content):
                where = f"messages[{index}].content[{number}]"
                if not isinstance(part, dict):
                    raise wrong_value(where, part, "a dictionary")
                kind = KINDS.get(str(part.get("type")))
                if kind is None:
                    parts.append(part)
                    continue
                sources.append(_of_part(part, kind, where))
                parts.append({"type": kind})
            message["content"] = parts
        found.append(message)
    return found, sources


def split_prompt(prompt: JsonMapping) -> tuple[Any, list[MediaSource]]:
    """The prompt itself, and the sources of its media, in the order of `FIELDS`.

    `prompt` is {"prompt": text or token ids, "images": [...], "videos": [...], "audios": [...]}.
    Raises `InvalidParam` for other fields.
    """
    unknown = prompt.keys() - FIELDS.keys() - {"prompt"}
    if unknown or "prompt" not in prompt:
        name = min(map(str, unknown), default="no prompt")
        message = f"a prompt has {name!r}; prompt, images, videos and audios are allowed"
        raise InvalidParam("prompts", message)
    sources: list[MediaSource] = []
    for name, kind in FIELDS.items():
        values = prompt.get(name)
        if values is None:
            continue
        if not isinstance(values, list | tuple):
            raise wrong_value(name, values, "a list, also for one,")
        for index, value in enumerate(values):
            sources.append(source_of(kind, f"{name}[{index}]", value))
    return prompt["prompt"], sources


def source_of(
    kind: MediaKind,
    where: str,
    value: Any,
) -> MediaSource:
    """The source for an address or base64, bytes, a path, or a Pillow picture.

    Raises `InvalidParam` for other values. `where` is the field, for messages.
    """
    if isinstance(value, str):
        return text_source(kind, where, value)
    if isinstance(value, bytes | bytearray):
        return MediaSource(kind, where, data=bytes(value))
    if isinstance(value, Path):
        return MediaSource(kind, where, url=value.resolve().as_uri())
    if kind == "image" and callable(getattr(value, "save", None)):
        file = io.BytesIO()
        value.save(file, "PNG")
        return MediaSource(kind, where, data=file.getvalue())
    raise wrong_value(where, value, "an address, base64, bytes or a path")


def _of_part(
    part: JsonMapping,
    kind: MediaKind,
    where: str,
) -> MediaSource:
    name = str(part["type"])
    if name == "input_image":
        name = "image_url"
    value = part.get(name)
    if isinstance(value, dict):
        value = value.get("data" if name == "input_audio" else "url")
    if not value:
        raise InvalidParam(where, f"{where} has no {name}")
    return source_of(kind, where, value)
