"""Reads options of other engines that are JSON, as several of weft's own options."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from weft.config.engine import EngineConfig
from weft.config.options import SettingsError, did_you_mean, options_by_name
from weft.json_types import JsonObject


def read_object(flag: str, text: str, known: Sequence[str]) -> JsonObject:
    """The members of the JSON object `text`, the value of `flag`; all must be `known`. Raises
    SettingsError."""
    try:
        content = json.loads(text)
    except ValueError as exc:
        raise SettingsError(f"{flag} is {text!r:.200}, which is not valid JSON: {exc}") from exc
    if not isinstance(content, dict):
        raise SettingsError(f"{flag} is {text!r:.200}; an object is expected")
    for key in content:
        if key not in known:
            hint = did_you_mean(key, known)
            raise SettingsError(
                f"{flag} has the key {key!r}; allowed keys: {', '.join(known)}{hint}"
            )
    return content


def spread(config: EngineConfig, source: str, values: Mapping[str, Any]) -> EngineConfig:
    """The settings with the `values` that the field `source` contains; that field is then empty.
    Raises SettingsError if one of these settings is also given."""
    options = options_by_name(EngineConfig)
    for name in values:
        option = options[name]
        if getattr(config, name) != option.default:
            flag = options[source].flag
            raise SettingsError(f"{flag} and {option.flag} are both given; one is enough")
    changed: JsonObject = {**values, source: ""}
    return replace(config, **changed)
