"""Reads `--lora-paths`: adapters (LoRA) with their folders, in the forms of several engines."""

from __future__ import annotations

import json
from typing import NamedTuple

from weft.config.options import SettingsError

FORMS = 'NAME=FOLDER, a folder, or {"lora_name": NAME, "lora_path": FOLDER} are allowed'
KEYS = ("lora_name", "lora_path", "pinned")
ALSO = {"name": "lora_name", "path": "lora_path"}  # vLLM's keys
MAX_NAME_LEN = 256  # characters
IGNORED = ("base_model_name",)  # vLLM's key; there is only one model


class LoraPath(NamedTuple):
    """An adapter to load."""

    name: str
    path: str  # path of its folder
    pinned: bool = False


def parse_lora_paths(text: str, source: str = "--lora-paths") -> tuple[LoraPath, ...]:
    """The adapters that a text names. Raises SettingsError, which names `source`."""
    found: list[LoraPath] = []
    for line in text.splitlines():
        for one in _read_line(line.strip(), source):
            if one.name in [other.name for other in found]:
                raise SettingsError(f"{source} names the adapter {one.name!r} twice")
            found.append(one)
    return tuple(found)


def _read_line(line: str, source: str) -> list[LoraPath]:
    if line.startswith(("{", "[")):
        try:
            content = json.loads(line)
        except ValueError as exc:
            raise SettingsError(f"{source} is not valid JSON: {exc}; {FORMS}") from exc
        items = content if isinstance(content, list) else [content]
        found = []
        for item in items:
            if isinstance(item, str):
                found.append(_from_word(item, source))
            else:
                found.append(_from_object(item, source))
        return found
    return [_from_word(word.strip(), source) for word in line.split(",") if word.strip()]


def _from_word(word: str, source: str) -> LoraPath:
    name, equals, path = word.partition("=")
    if not equals:
        path = name
    return _checked(LoraPath(name.strip(), path.strip()), source)


def _from_object(item: object, source: str) -> LoraPath:
    if not isinstance(item, dict):
        raise SettingsError(f"{source} has {item!r}; {FORMS}")
    known = {ALSO.get(key, key): value for key, value in item.items() if key not in IGNORED}
    for key in known:
        if key not in KEYS:
            raise SettingsError(f"{source} has the key {key!r}; {', '.join(KEYS)} are allowed")
    name = known.get("lora_name", known.get("lora_path"))
    path = known.get("lora_path")
    pinned = known.get("pinned", False)
    if not (isinstance(name, str) and isinstance(path, str) and isinstance(pinned, bool)):
        raise SettingsError(f"{source} has {json.dumps(item)}; {FORMS}")
    return _checked(LoraPath(name, path, pinned), source)


def _checked(one: LoraPath, source: str) -> LoraPath:
    why_not = wrong_name(one.name)
    if why_not:
        raise SettingsError(f"{source}: {why_not}")
    if not one.path:
        raise SettingsError(f"{source} names no folder for the adapter {one.name!r}; {FORMS}")
    return one


def wrong_name(name: str) -> str:
    """The reason why an adapter cannot have this name; "" if it can."""
    if not name or len(name) > MAX_NAME_LEN or not name.isprintable():
        shown = name[:64]
        return (
            f"an adapter cannot have the name {shown!r}; "
            f"1 to {MAX_NAME_LEN} printable characters are allowed"
        )
    return ""
