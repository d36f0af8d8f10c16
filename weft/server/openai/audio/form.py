"""Reads the form of a request about speech. Errors name the field and what is allowed."""

from __future__ import annotations

import math
from typing import NamedTuple

from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request

from weft.config.numbers import shown
from weft.server.context import ServerContext
from weft.server.errors import ApiError, not_supported
from weft.server.http.form_texts import MAX_PARTS, TRUE
from weft.server.openai.audio.models import SpeechForm
from weft.server.openai.form import read_form

FORMATS = ("json", "text", "srt", "vtt", "verbose_json")
GRANULARITIES = ("segment", "word")
FALSE = ("false", "0", "no", "off", "")
# Fields of OpenAI's other models, which have no effect there if they have these values.
OTHERS = {"chunking_strategy": ("auto",), "include[]": (), "known_speaker_names[]": ()}


class ReadForm(NamedTuple):
    form: SpeechForm
    sound: bytes


async def read_speech(context: ServerContext, request: Request, task: str) -> ReadForm:
    """The form and the file of a request. Raises `ApiError` and ClientGone."""
    limits = context.limits
    form = await read_form(
        request,
        most_mb=limits.max_media_mb,
        limit="max_media_mb",
        timeout_s=limits.body_timeout_s,
        max_fields=MAX_PARTS,
    )
    try:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise ApiError(
                400, "the form has no file; give the sound as the field file", param="file"
            )
        return ReadForm(_fields(form, task), await file.read())
    finally:
        await form.close()


def _fields(form: FormData, task: str) -> SpeechForm:
    for name, allowed in OTHERS.items():
        value = _text(form, name)
        if value and value not in allowed:
            raise not_supported(name)
    response_format = _text(form, "response_format") or "json"
    if response_format not in FORMATS:
        raise _wrong("response_format", response_format, f"allowed: {', '.join(FORMATS)}")
    granularities = _granularities(form)
    if "word" in granularities and response_format != "verbose_json":
        message = "timestamp_granularities needs response_format verbose_json"
        raise ApiError(400, message, param="timestamp_granularities")
    stream = _flag(form, "stream")
    if stream and response_format not in ("json", "text"):
        raise _wrong("response_format", response_format, "a stream is json or text")
    return SpeechForm(
        task=task,
        model=_text(form, "model") or None,
        language=_text(form, "language").lower(),
        prompt=_text(form, "prompt"),
        response_format=response_format,
        temperature=_number(form, "temperature", 0.0, 2.0),
        granularities=granularities,
        stream=stream,
        user=_text(form, "user"),
        priority=_integer(form, "priority"),
        service_tier=_text(form, "service_tier") or None,
        timeout_ms=_integer(form, "timeout_ms", 1),
        ttft_ms=_integer(form, "ttft_ms", 1),
    )


def _granularities(form: FormData) -> tuple[str, ...]:
    found = []
    for name in ("timestamp_granularities[]", "timestamp_granularities"):
        for value in form.getlist(name):
            found += str(value).split(",")
    for one in found:
        if one not in GRANULARITIES:
            allowed = f"allowed: {', '.join(GRANULARITIES)}"
            raise _wrong("timestamp_granularities", one, allowed)
    return tuple(dict.fromkeys(found))


def _text(form: FormData, name: str) -> str:
    value = form.get(name, "")
    if isinstance(value, UploadFile):
        raise ApiError(400, f"{name} is a file; a text is expected", param=name)
    return value.strip()


def _flag(form: FormData, name: str) -> bool:
    value = _text(form, name).lower()
    if value not in (*TRUE, *FALSE):
        raise _wrong(name, value, "true or false is expected")
    return value in TRUE


def _number(form: FormData, name: str, low: float, high: float) -> float | None:
    text = _text(form, name)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise _wrong(name, text, f"{low:g} to {high:g} are allowed")
    return value


def _integer(form: FormData, name: str, low: int = -(2**31)) -> int | None:
    text = _text(form, name)
    if not text:
        return None
    high = 2**31 - 1
    digits = text.removeprefix("-")
    value = int(text) if digits.isascii() and digits.isdecimal() and len(digits) < 12 else low - 1
    if not low <= value <= high:
        raise _wrong(name, text, f"an integer from {low:,} to {high:,} is expected")
    return value


def _wrong(name: str, value: str, allowed: str) -> ApiError:
    return ApiError(400, f"{name} is {shown(value)}; {allowed}", param=name)
