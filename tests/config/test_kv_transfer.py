"""What vLLM says of handoff means the same here, or is refused by name; and so do SGLang's
options."""

from __future__ import annotations

import json

import pytest

from weft.config.engine import EngineConfig
from weft.config.kv_transfer import with_kv_transfer_config
from weft.config.options import Command, SettingsError
from weft.config.relay import RelayConfig


def read(**content: object) -> EngineConfig:
    return with_kv_transfer_config(EngineConfig(kv_transfer_config=json.dumps(content)))


def test_a_producer_computes_prompts_and_a_consumer_takes_them() -> None:
    producer = read(
        kv_connector="NixlConnector", kv_role="kv_producer", kv_ip="10.0.0.1", kv_port=9000
    )
    assert producer.disaggregation_mode == "prefill"
    assert producer.handoff_host == "10.0.0.1"
    assert producer.disaggregation_bootstrap_port == 9000
    assert producer.kv_transfer_config == ""
    consumer = read(kv_role="kv_consumer", kv_load_failure_policy="fail")
    assert consumer.disaggregation_mode == "decode"
    assert consumer.handoff_fallback == "fail"
    assert read(kv_role="kv_consumer", kv_load_failure_policy="recompute") == EngineConfig(
        disaggregation_mode="decode"
    )


def test_without_it_nothing_changes() -> None:
    config = EngineConfig(disaggregation_mode="prefill")
    assert with_kv_transfer_config(config) is config


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"kv_role": "kv_both"}, "here a server is kv_producer or kv_consumer"),
        ({"kv_role": ["kv_producer"]}, "one of kv_producer, kv_consumer is expected"),
        ({"kv_port": 9000}, "has no kv_role"),
        ({"kv_role": "kv_producer", "kv_port": "x"}, "kv_port is 'x'"),
        (
            {"kv_role": "kv_producer", "kv_rank": 0},
            "has the key 'kv_rank'; allowed keys: kv_connector, kv_rol",
        ),
        ({"kv_connector": "LMCacheConnectorV1"}, "KV on disk is --cache-dir"),
    ],
)
def test_what_it_cannot_mean_is_refused_by_name(content: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        read(**content)


def test_an_option_is_not_given_twice() -> None:
    text = '{"kv_role": "kv_producer"}'
    config = EngineConfig(kv_transfer_config=text, disaggregation_mode="decode")
    with pytest.raises(SettingsError, match="--disaggregation-mode are both given"):
        with_kv_transfer_config(config)


@pytest.mark.parametrize(
    ("kind", "flag", "ours"),
    [
        (EngineConfig, "--disaggregation-ib-device", "--handoff-host"),
        (EngineConfig, "--num-reserved-decode-tokens", "--schedule-conservativeness"),
        (EngineConfig, "--kv-role", "--disaggregation-mode"),
        (RelayConfig, "--pd-disaggregation", "--prefill"),
        (RelayConfig, "--prefill-policy", "--load-balance-method"),
    ],
)
def test_options_of_others_are_answered_with_ours(kind: type, flag: str, ours: str) -> None:
    with pytest.raises(SettingsError, match=f"{flag}; its name in weft is {ours}$"):
        Command("weft", "", kind).read([flag, "x"], {})


@pytest.mark.parametrize("name", ["transfer_backend", "decode_tp", "decode_dp", "prefill_pp"])
def test_what_the_other_server_is_like_is_asked_for_by_no_option(name: str) -> None:
    flag = f"--disaggregation-{name.replace('_', '-')}"
    with pytest.raises(SettingsError, match=f"unknown option {flag}; it is not needed: "):
        Command("weft", "", EngineConfig).read([flag, "x"], {})
