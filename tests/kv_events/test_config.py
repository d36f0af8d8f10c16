"""`--kv-events-config`, as users of vLLM and SGLang write it."""

from __future__ import annotations

import json

import pytest

from weft.config.kv_events import check_ports, of_engine, parse_kv_events
from weft.config.options import SettingsError

VLLM = {
    "enable_kv_cache_events": True,
    "publisher": "zmq",
    "endpoint": "tcp://*:5557",
    "replay_endpoint": "tcp://*:5558",
    "buffer_steps": 100,
    "hwm": 1000,
    "max_queue_size": 2000,
    "topic": "kv@pod@model",
}


def test_the_words_of_vllm_and_of_sglang_are_understood() -> None:
    config = parse_kv_events(json.dumps(VLLM))
    assert config.is_on
    assert config.binds
    assert config.address == "tcp://*:5557"
    assert config.topic == "kv@pod@model"
    assert config.buffer_steps == 100
    assert parse_kv_events('{"publisher": "zmq", "topic": "kv-events"}').is_on


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"publisher": "null"}',
        '{"publisher": "zmq", "enable_kv_cache_events": false}',
        '{"publisher": "null", "enable_kv_cache_events": true}',
    ],
)
def test_events_are_off_unless_somebody_asks_for_them(text: str) -> None:
    assert not parse_kv_events(text).is_on


def test_without_an_endpoint_only_this_machine_can_listen() -> None:
    config = parse_kv_events('{"publisher": "zmq"}')
    assert config.address == "tcp://127.0.0.1:5557"
    assert config.binds


def test_a_host_of_others_is_gone_to_unless_it_is_said_to_be_ones_own() -> None:
    assert not parse_kv_events('{"publisher": "zmq", "endpoint": "tcp://epp:5557"}').binds
    text = '{"publisher": "zmq", "endpoint": "tcp://127.0.0.1:5557", "bind": true}'
    assert parse_kv_events(text).binds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("yes", "which is not valid JSON"),
        ("[1]", "an object is expected"),
        ('{"endpiont": "tcp://*:1"}', "did you mean endpoint"),
        ('{"publisher": "kafka"}', "one of null, zmq is expected"),
        ('{"publisher": "zmq", "hwm": "many"}', "hwm is 'many'; int is expected"),
        ('{"publisher": "zmq", "hwm": true}', "hwm is True; int is expected"),
        ('{"publisher": "zmq", "max_queue_size": 0}', "at least 1 is expected"),
        ('{"publisher": "zmq", "encoding": "xml"}', "one of map, array is expected"),
        ('{"publisher": "zmq", "endpoint": "tcp://*"}', "tcp://HOST:PORT is expected"),
        ('{"publisher": "zmq", "endpoint": "udp://*:1"}', "tcp://HOST:PORT or ipc://PATH"),
        ('{"publisher": "zmq", "replay_endpoint": "tcp://*:0"}', "replay_endpoint is 'tcp://*:0'"),
        (
            '{"publisher": "zmq", "replay_endpoint": "tcp://127.0.0.1:5557"}',
            "endpoint and replay_endpoint are both",
        ),
    ],
)
def test_impossible_values_are_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=r"^--kv-events-config") as error:
        parse_kv_events(text)
    assert message in str(error.value)


def test_each_of_several_engines_has_ports_of_its_own() -> None:
    second = parse_kv_events(of_engine(json.dumps(VLLM), 2))
    assert second.address == "tcp://*:5559"
    assert second.replay_endpoint == "tcp://*:5560"
    assert second.data_parallel_rank == 2
    files = '{"publisher": "zmq", "endpoint": "ipc:///tmp/a", "data_parallel_rank": 4}'
    third = parse_kv_events(of_engine(files, 1))
    assert third.address == "ipc:///tmp/a_dp1"
    assert third.data_parallel_rank == 5
    assert of_engine('{"publisher": "null"}', 1) == '{"publisher": "null"}'
    with pytest.raises(SettingsError, match="engine 1 would have port 65536"):
        of_engine('{"publisher": "zmq", "endpoint": "tcp://*:65535"}', 1)


def test_events_of_one_engine_and_replays_of_another_need_two_ports() -> None:
    check_ports(json.dumps(VLLM), 1)
    with pytest.raises(SettingsError, match=r"tcp://\*:5558 would be both .* at least 2 apart"):
        check_ports(json.dumps(VLLM), 2)
    check_ports(json.dumps({**VLLM, "replay_endpoint": "tcp://*:5559"}), 2)
