"""What the body of a request says about its model, read before the model's own handler reads it.

A body that cannot be read says nothing: its handler tells what is wrong with it.
"""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec

from weft.server.body import mended
from weft.server.errors import ApiError
from weft.server.http.form_texts import TRUE, is_form, texts_of_form

UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?)(ms|s|m|h)")
_DEPLOYMENT = re.compile(r"/openai/deployments/(.+?)/(?:chat/completions|completions|embeddings)")
_LATEST = ":latest"
_NOTHING = (b"null", b'""', b"[]")


class Asked(msgspec.Struct, kw_only=True):
    """The fields of a body that matter before its model is known."""

    model: Any = None
    name: Any = None  # of the model, in older clients of Ollama
    stream: Any = None
    keep_alive: Any = None  # of Ollama
    rid: Any = None
    request_id: Any = None
    # Unread, because they may be long.
    prompt: msgspec.Raw = msgspec.Raw(b"null")
    messages: msgspec.Raw = msgspec.Raw(b"null")
    is_readable: bool = True

    @property
    def has_prompt(self) -> bool:
        """Whether there is anything to answer."""
        values = (self.prompt, self.messages)
        return any(b"".join(bytes(one).split()) not in _NOTHING for one in values)


class _Plain(msgspec.Struct):
    """A body that says no more of its model than its name."""

    model: str | None = None
    name: msgspec.Raw | None = None
    keep_alive: None = None


_plain_decoder = msgspec.json.Decoder(_Plain)
_decoder = msgspec.json.Decoder(Asked)


def plain_name(body: bytes | bytearray) -> str | None:
    """The model that a body names; "" if it names none. None if more than that must be looked at.
    Whatever else is in the body, nothing is made of it."""
    try:
        found = _plain_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if found.model is None:
        return None if found.name else ""
    return found.model


def read_asked(path: str, body: bytes, content_type: str = "") -> Asked:
    """`is_readable`: whether the body is an object or a form that may name a model."""
    if is_form(content_type):
        texts = texts_of_form(content_type, body)
        return Asked(model=texts.get("model"), stream=texts.get("stream", "").lower() in TRUE)
    try:
        found = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        whole = mended(body)
        if whole == body:
            return Asked(is_readable=False)
        return read_asked(path, whole)
    except RecursionError:
        return Asked(is_readable=False)
    found.model = named_model(path, found.model, found.name)
    found.is_readable = found.model is None or isinstance(found.model, str)
    return found


def named_model(path: str, model: Any, name: Any) -> Any:
    """The model that a request to `path` means, whose body has these fields; None if it names
    none. Ollama's clients add a tag, of which there is one, and Azure's name it in the path."""
    if path.startswith("/api/"):
        found = model or name
        return found.removesuffix(_LATEST) if isinstance(found, str) else found
    deployment = _DEPLOYMENT.fullmatch(path)
    if deployment is not None and model is None:
        return deployment[1]
    return model


def idle_time_s(keep_alive: object) -> float:
    """Ollama's `keep_alive`, a number or a text like "5m", in seconds; negative: for ever. Raises
    `ApiError`."""
    if isinstance(keep_alive, int | float) and math.isfinite(keep_alive):
        return float(keep_alive)
    if isinstance(keep_alive, str):
        parts = _DURATION.findall(keep_alive)
        if parts and "".join(number + unit for number, unit in parts) == keep_alive:
            return sum(float(number) * UNITS[unit] for number, unit in parts)
        try:
            return idle_time_s(float(keep_alive))
        except ValueError:
            pass
    message = f'keep_alive is {str(keep_alive)[:64]!r}; seconds, or a text like "5m" is expected'
    raise ApiError(400, message, param="keep_alive")
