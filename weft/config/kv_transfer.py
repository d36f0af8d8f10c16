"""`--kv-transfer-config`: translates vLLM's JSON settings of a handoff into weft's options.

{"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_port": 8998}
{"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_load_failure_policy": "recompute"}
"""

from __future__ import annotations

from typing import Any

from weft.config.engine import EngineConfig
from weft.config.handoff import DECODE, PREFILL
from weft.config.json_object import read_object, spread
from weft.config.options import SettingsError, options_by_name
from weft.json_types import JsonObject

FLAG = "--kv-transfer-config"
ROLES = {"kv_producer": PREFILL, "kv_consumer": DECODE}
POLICIES = {"recompute": "compute", "fail": "fail"}
# Connectors between two servers. Here both servers are weft, and use weft's own protocol.
CONNECTORS = ("NixlConnector", "MooncakeConnector", "P2pNcclConnector")
WORDS = {
    "kv_role": ("disaggregation_mode", ROLES),
    "kv_load_failure_policy": ("handoff_fallback", POLICIES),
}
OPTIONS = {"kv_ip": "handoff_host", "kv_port": "disaggregation_bootstrap_port"}
KNOWN = ("kv_connector", *WORDS, *OPTIONS)


def with_kv_transfer_config(config: EngineConfig) -> EngineConfig:
    """The settings with the values from `--kv-transfer-config`. Raises SettingsError."""
    if not config.kv_transfer_config:
        return config
    content = read_object(FLAG, config.kv_transfer_config, KNOWN)
    _check_connector(content)
    values: JsonObject = {}
    for key, (name, words) in WORDS.items():
        if key in content:
            values[name] = _word(key, content[key], words)
    if "disaggregation_mode" not in values:
        raise SettingsError(f"{FLAG} has no kv_role; one of {', '.join(ROLES)} is expected")
    options = options_by_name(EngineConfig)
    for key, name in OPTIONS.items():
        if key in content:
            values[name] = options[name].from_python(content[key], f"{FLAG}: {key}")
    return spread(config, "kv_transfer_config", values)


def _check_connector(content: JsonObject) -> None:
    connector = content.get("kv_connector", CONNECTORS[0])
    if connector not in CONNECTORS:
        raise SettingsError(
            f"{FLAG}: kv_connector is {connector!r:.80}; one of {', '.join(CONNECTORS)} is "
            "expected. KV on disk is --cache-dir"
        )


def _word(key: str, value: Any, words: dict[str, str]) -> str:
    if value == "kv_both":
        raise SettingsError(
            f"{FLAG}: {key} is 'kv_both'; here a server is kv_producer or kv_consumer"
        )
    if not isinstance(value, str) or value not in words:
        raise SettingsError(
            f"{FLAG}: {key} is {value!r:.80}; one of {', '.join(words)} is expected"
        )
    return words[value]
