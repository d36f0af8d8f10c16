"""Settings of a model's media processor that an operator can change, and a request within the
operator's bounds (`mm_processor_kwargs` of vLLM and SGLang): the size of pictures, the number of
frames of a video."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from weft.json_types import JsonMapping, JsonObject
from weft.text.media.errors import MediaError
from weft.text.media.processor import Knob, MediaProcessor

PARAM = "mm_processor_kwargs"
# A request may only raise these: a larger value is less work. It may only lower all other settings,
# and only turn switches off.
LESS_IS_MORE = ("pan_and_scan_min_crop_size", "pan_and_scan_min_ratio_to_activate")
# A request may raise these up to another setting: that is not more work than the largest picture.
UP_TO = {"min_pixels": "max_pixels", "min_frames": "max_frames"}
# The keys under `size`, as in the files of models.
EDGES = ("longest_edge", "shortest_edge")


def adjusted(processor: MediaProcessor, kwargs: JsonMapping) -> MediaProcessor:
    """The processor with an operator's changes. Raises `MediaError`."""
    return processor.adjusted(_read(processor.knobs, kwargs))


def adjusted_within(processor: MediaProcessor, kwargs: JsonMapping) -> MediaProcessor:
    """The processor with a request's changes, which may not cause more work than the largest
    picture of the server's own settings. Raises `MediaError`."""
    have = processor.knobs
    changes = _read(have, kwargs)
    for name, value in changes.items():
        of_server = have[name]
        if name in LESS_IS_MORE:
            if value < of_server:
                raise MediaError(f"{PARAM}: {name} is {value}; at least {of_server} is allowed")
            continue
        most = have.get(UP_TO.get(name, name), of_server)
        if value > most:
            allowed = f"at most {most}"
            if isinstance(of_server, bool):
                allowed = "this server has it off"
            raise MediaError(f"{PARAM}: {name} is {json.dumps(value)}; {allowed} is allowed")
    return processor.adjusted(changes)


def read_kwargs(text: str) -> JsonObject:
    """The JSON object in the text of a setting. Raises ValueError."""
    if not text:
        return {}
    try:
        kwargs = json.loads(text)
    except ValueError as exc:
        raise ValueError(f"{text[:200]!r} is not valid JSON") from exc
    if not isinstance(kwargs, dict):
        raise ValueError(f"{text[:200]!r} is not an object")
    return kwargs


def _read(have: Mapping[str, Knob], kwargs: JsonMapping) -> dict[str, Knob]:
    """The given changes, by the names of `have`. Raises `MediaError`."""
    changes: dict[str, Knob] = {}
    for name, value in _flat(have, kwargs).items():
        if name not in have:
            known = ", ".join(have) or "nothing"
            raise MediaError(f"{PARAM} has {name[:64]!r}; {known} can be changed for this model")
        changes[name] = _value(name, value, have[name])
    return changes


def _flat(have: Mapping[str, Knob], kwargs: JsonMapping) -> JsonObject:
    """The given settings, with the keys of `size` moved beside them. If the processor limits
    pixels and not edges, the edges get the names `max_pixels` and `min_pixels`."""
    found = {name: value for name, value in kwargs.items() if name != "size" and value is not None}
    size = kwargs.get("size")
    if size is None:
        return found
    if not isinstance(size, dict):
        raise MediaError(f"{PARAM}: size is not an object; {', '.join(EDGES)} are its keys")
    of_pixels = {"longest_edge": "max_pixels", "shortest_edge": "min_pixels"}
    for edge, value in size.items():
        name = str(edge)
        if name not in have:
            name = of_pixels.get(name, name)
        found[name] = value
    return found


def _value(name: str, value: Any, of_server: Knob) -> Knob:
    """The value, if it has the type of the server's. Raises `MediaError`."""
    if isinstance(of_server, bool):
        if isinstance(value, bool):
            return value
        raise MediaError(f"{PARAM}: {name} is {value!r:.64}; true or false is expected")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and math.isfinite(value) and value > 0:
        if isinstance(of_server, float):
            return float(value)
        if isinstance(value, int):
            return value
    kind = "number" if isinstance(of_server, float) else "whole number"
    raise MediaError(f"{PARAM}: {name} is {value!r:.64}; a {kind} above 0 is expected")
