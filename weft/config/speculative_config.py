"""`--speculative-config`: translates vLLM's JSON settings of drafts into weft's options.

{"method": "draft_model", "model": "weft-nano-draft", "num_speculative_tokens": 4}
{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
"""

from __future__ import annotations

from weft.config.drafts import AUTO, MODEL, SOURCES, source_named
from weft.config.engine import EngineConfig
from weft.config.json_object import read_object, spread
from weft.config.options import SettingsError, options_by_name
from weft.json_types import JsonObject

FLAG = "--speculative-config"
METHOD = "method"
OPTIONS = {  # vLLM's key → weft's option
    "model": "draft_model",
    "num_speculative_tokens": "max_draft",
    "prompt_lookup_max": "ngram_max",
    "prompt_lookup_min": "ngram_min",
}


def with_speculative_config(config: EngineConfig) -> EngineConfig:
    """The settings with the values from `--speculative-config`. Raises SettingsError."""
    if not config.speculative_config:
        return config
    content = read_object(FLAG, config.speculative_config, (METHOD, *OPTIONS))
    options = options_by_name(EngineConfig)
    values: JsonObject = {"speculative": _method(content)}
    for key, name in OPTIONS.items():
        if key in content:
            values[name] = options[name].from_python(content[key], f"{FLAG}: {key}")
    return spread(config, "speculative_config", values)


def _method(content: JsonObject) -> str:
    """The sources of drafts that `method` names; without a method, the source that the keys
    imply. Raises SettingsError."""
    method = content.get(METHOD)
    if method is None:
        return MODEL if "model" in content else "ngram"
    name = source_named(str(method), f"{FLAG}: {METHOD}")
    if name not in (AUTO, *SOURCES):
        raise SettingsError(
            f"{FLAG}: {METHOD} is {method!r}; one of ngram, draft_model, {AUTO} and "
            f"{', '.join(SOURCES)} is expected"
        )
    return name
