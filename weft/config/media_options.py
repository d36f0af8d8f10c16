"""The operator's limits for pictures, videos and sounds, read from the settings of the server."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from weft.config.options import SettingsError, did_you_mean
from weft.config.server import ServerConfig

# Default maximum per prompt.
PER_PROMPT = {"image": 64, "video": 4, "audio": 16}
MOST_PER_PROMPT = 10_000
_HOST = re.compile(r"(?:[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")


class MediaOptions(NamedTuple):
    per_prompt: Mapping[str, int]
    hosts: frozenset[str]  # "example.com" or "example.com:8080", in lower case
    folder: Path | None  # files below it may be read


def media_options(config: ServerConfig) -> MediaOptions:
    """The limits in the settings. Raises SettingsError for invalid values."""
    return MediaOptions(
        per_prompt=_per_prompt(config.limit_mm_per_prompt),
        hosts=_hosts(config.allowed_media_domains),
        folder=_folder(config.allowed_local_media_path),
    )


def _per_prompt(text: str) -> dict[str, int]:
    found = dict(PER_PROMPT)
    if not text:
        return found
    form = '{"image": 4, "video": 1} is the form'
    source = "--limit-mm-per-prompt"
    try:
        given = json.loads(text)
    except ValueError as exc:
        raise SettingsError(f"{source} is {text!r}, which is not valid JSON; {form}") from exc
    if not isinstance(given, dict):
        raise SettingsError(f"{source} is {text!r}, which is not an object; {form}")
    for kind, number in given.items():
        if kind not in PER_PROMPT:
            hint = did_you_mean(kind, PER_PROMPT)
            raise SettingsError(
                f"{source} names {kind!r}; {', '.join(PER_PROMPT)} are allowed{hint}"
            )
        if isinstance(number, dict):  # vLLM's other form
            number = number.get("count")
        if type(number) is not int or not 0 <= number <= MOST_PER_PROMPT:
            raise SettingsError(
                f"{source} gives {number!r} for {kind!r}; a whole number of 0 to "
                f"{MOST_PER_PROMPT:,} is expected"
            )
        found[kind] = number
    return found


def _hosts(text: str) -> frozenset[str]:
    found = set()
    for word in text.replace(",", " ").split():
        host = word.lower()
        if not _HOST.fullmatch(host):
            raise SettingsError(
                f"--allowed-media-domains names {word!r}; complete names of hosts without "
                "https:// are expected, such as images.example.com or images.example.com:8080"
            )
        found.add(host.replace("[", "").replace("]", ""))
    return frozenset(found)


def _folder(text: str) -> Path | None:
    if not text:
        return None
    folder = Path(text)
    if not folder.is_dir():
        raise SettingsError(f"--allowed-local-media-path is {text!r}, which is not a folder")
    return folder
