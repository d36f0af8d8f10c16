"""`image_data`, `video_data` and `audio_data` of `/generate`: the media of each prompt, and their
positions.

A text contains the model's own mark for each item; token ids already contain all placeholders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from weft.messages.media import MediaItem, MediaKind
from weft.server.context import ServerContext
from weft.server.errors import ApiError
from weft.server.media import ServedMedia, require_media, value_bytes
from weft.text.media.placing import ReadyMedia
from weft.text.media.sources import MediaSource, text_source

KINDS: dict[str, MediaKind] = {"image_data": "image", "video_data": "video", "audio_data": "audio"}


class NativeMedia(NamedTuple):
    """The media of a request. Without any, `loaded` is empty."""

    media: ServedMedia | None
    sources: Sequence[str | list[int]]  # the prompts, with placeholders for marks
    loaded: Sequence[Sequence[ReadyMedia]]  # per prompt, in the order of their positions

    def placed(
        self,
        index: int,
        ids: Sequence[int],
    ) -> tuple[MediaItem, ...]:
        """The media of prompt `index` at their positions in `ids`. Raises `ApiError`."""
        if not self.loaded[index]:
            return ()
        assert self.media is not None, "it has loaded them"
        param = "text" if isinstance(self.sources[index], str) else "input_ids"
        return self.media.in_tokens(ids, self.loaded[index], param)


NO_MEDIA = NativeMedia(None, (), ())


async def load_media(
    context: ServerContext,
    fields: Mapping[str, Any],
    prompts: Sequence[str | list[int]],
    *,
    is_batch: bool,
    kwargs: Mapping[str, Any] | None = None,
) -> NativeMedia:
    """Load the media of all prompts.

    `fields`: the values of the fields in `KINDS`; `kwargs`: `mm_processor_kwargs` of the request.
    Raises `ApiError`, or `ContextExceeded`.
    """
    of_prompts: list[list[MediaSource]] = [[] for _ in prompts]
    for name, value in fields.items():
        entries = _entries(name, value, len(prompts), is_batch=is_batch)
        for sources, (where, entry) in zip(of_prompts, entries, strict=True):
            sources += _sources(KINDS[name], where, entry)
    for sources in of_prompts:  # check all before loading the first
        if sources:
            require_media(context.media, sources)
    texts: list[str | list[int]] = []
    loaded: list[Sequence[ReadyMedia]] = []
    for prompt, sources in zip(prompts, of_prompts, strict=True):
        in_order: list[ReadyMedia] = []
        if sources:
            media = require_media(context.media, sources, kwargs)
            before = sum(value_bytes(one) for of_prompt in loaded for one in of_prompt)
            in_order = await media.load(sources, context.info.context_length, before)
            if isinstance(prompt, str):
                prompt, in_order = media.in_text(prompt, in_order, "text")
        texts.append(prompt)
        loaded.append(in_order)
    return NativeMedia(context.media, texts, loaded)


def _entries(
    name: str,
    value: Any,
    count: int,
    *,
    is_batch: bool,
) -> list[tuple[str, Any]]:
    """The entry of each prompt, and the name of its field."""
    if value is None:
        return [(name, None)] * count
    if not is_batch:
        return [(name, value)]
    if not isinstance(value, list) or len(value) != count:
        num = len(value) if isinstance(value, list) else 1
        raise ApiError(
            400,
            f"{name} has the length {num:,}; {count:,} is expected, an entry for each prompt",
            param=name,
        )
    return [(f"{name}[{index}]", entry) for index, entry in enumerate(value)]


def _sources(
    kind: MediaKind,
    where: str,
    entry: Any,
) -> list[MediaSource]:
    if entry is None:
        return []
    if not isinstance(entry, list):
        return [_source(kind, where, entry)]
    if len(entry) == 1 and isinstance(entry[0], list):  # SGLang's form of a batch of one
        entry = entry[0]
    return [_source(kind, f"{where}[{number}]", one) for number, one in enumerate(entry)]


def _source(
    kind: MediaKind,
    where: str,
    one: Any,
) -> MediaSource:
    if isinstance(one, dict):
        one = one.get("url")
    if not isinstance(one, str) or not one:
        message = f'{where} is neither an address nor base64; a text or {{"url": ...}} is expected'
        raise ApiError(400, message, param=where)
    return text_source(kind, where, one)
