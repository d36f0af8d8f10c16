"""`--kv-events-config`: reads and checks the JSON settings of KV events of vLLM and SGLang.

{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557",
 "replay_endpoint": "tcp://*:5558", "topic": "kv@pod-1@my-model"}

Each of several engines has its own ports: the port in an endpoint plus the engine's rank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

from weft.config.engine import EngineConfig
from weft.config.options import SettingsError, did_you_mean

FLAG = "--kv-events-config"
PUBLISHERS = ("null", "zmq")
ENCODINGS = ("map", "array")
TRANSPORTS = ("tcp", "ipc", "inproc")
MAX_PORT = 65_535
# Parts of an endpoint that mean that weft binds it, and does not connect to it.
_BOUND = ("*", "::", "ipc://", "inproc://")
_TCP = re.compile(r"tcp://(?P<host>.+):(?P<port>\d+)")


@dataclass(frozen=True, kw_only=True)
class KvEventsConfig:
    """The settings of KV events. Fields up to `topic` are vLLM's; the others are weft's own."""

    enable_kv_cache_events: bool | None = None  # None: on if there is a publisher
    publisher: str = ""  # one of PUBLISHERS; "": as `enable_kv_cache_events` says
    endpoint: str = ""  # address for batches; "": port 5557 of this machine's loopback
    replay_endpoint: str | None = None  # address where subscribers ask for missed batches
    buffer_steps: int = 10_000  # batches that are kept for replay
    hwm: int = 100_000  # batches that wait for a slow subscriber; it misses further ones
    max_queue_size: int = 100_000  # batches that wait to be published, before they become one
    topic: str = ""
    bind: bool | None = None  # whether subscribers connect to weft; None: by the endpoint's form
    encoding: str = "map"  # encoding of an event: one of ENCODINGS
    data_parallel_rank: int = 0  # rank of the first engine

    @property
    def is_on(self) -> bool:
        if self.enable_kv_cache_events is not None:
            return self.enable_kv_cache_events and self.publisher != "null"
        return self.publisher == "zmq"

    @property
    def address(self) -> str:
        return self.endpoint or "tcp://127.0.0.1:5557"

    @property
    def binds(self) -> bool:
        """Whether weft binds the socket for batches; else it connects to a bound subscriber."""
        if self.bind is not None:
            return self.bind
        return not self.endpoint or any(mark in self.endpoint for mark in _BOUND)


def parse_kv_events(text: str) -> KvEventsConfig:
    """The settings in the option; "" means off. Raises SettingsError."""
    if not text:
        return KvEventsConfig()
    try:
        content = json.loads(text)
    except ValueError as exc:
        raise SettingsError(f"{FLAG} is {text!r:.200}, which is not valid JSON: {exc}") from exc
    if not isinstance(content, dict):
        raise SettingsError(f"{FLAG} is {text!r:.200}; an object is expected")
    known = {field.name: str(field.type) for field in fields(KvEventsConfig)}
    for key, value in content.items():
        if key not in known:
            hint = did_you_mean(key, tuple(known))
            raise SettingsError(
                f"{FLAG} has the key {key!r}; allowed keys: {', '.join(known)}{hint}"
            )
        _check_type(key, value, known[key])
    config = KvEventsConfig(**content)
    _check(config)
    return config


def check_kv_events(config: EngineConfig) -> None:
    """Raise SettingsError if events are on but there is no prefix cache. `config` is resolved."""
    if parse_kv_events(config.kv_events_config).is_on and not config.prefix_cache:
        raise SettingsError(
            f"{FLAG}: it publishes the content of the prefix cache, and there is none "
            "(--no-prefix-cache)"
        )


def of_engine(text: str, rank: int) -> str:
    """The option for one of several engines. `text` has been parsed before."""
    config = parse_kv_events(text)
    if not config.is_on:
        return text
    replay = config.replay_endpoint
    moved = replace(
        config,
        endpoint=_shifted(config.address, rank),
        replay_endpoint=_shifted(replay, rank) if replay else None,
        bind=config.binds,
        data_parallel_rank=config.data_parallel_rank + rank,
    )
    return json.dumps(asdict(moved))


def check_ports(text: str, num_engines: int) -> None:
    """Raise SettingsError if two of several engines would have the same address."""
    config = parse_kv_events(text)
    if not config.is_on or not config.replay_endpoint:
        return
    events = {_shifted(config.address, rank) for rank in range(num_engines)}
    replays = {_shifted(config.replay_endpoint, rank) for rank in range(num_engines)}
    for address in sorted(events & replays):
        raise SettingsError(
            f"{FLAG}: with {num_engines} engines {address} would be both for the events of one "
            f"and the replays of another; choose ports that are at least {num_engines} apart"
        )


class Publisher(NamedTuple):
    """A model that may publish."""

    name: str  # for users
    option: str  # its `--kv-events-config`
    num_engines: int


def check_models(publishers: Iterable[Publisher]) -> None:
    """Raise SettingsError if two models of a server would listen at the same address, or publish
    to the same listener under the same topic, so that a subscriber would mix them."""
    taken: dict[str, str] = {}
    for one in publishers:
        config = parse_kv_events(one.option)
        if not config.is_on:
            continue
        for rank in range(one.num_engines):
            for address in _claimed(config, rank):
                other = taken.setdefault(address, one.name)
                if other != one.name:
                    raise SettingsError(
                        f"{FLAG}: {other} and {one.name} would both publish at {address}; with "
                        "several models, each that shall publish has a kv_events_config with "
                        "addresses of its own in its table [models.NAME]"
                    )


def _claimed(config: KvEventsConfig, rank: int) -> list[str]:
    """What only one engine may have: the addresses where it listens; its topic elsewhere."""
    address = _shifted(config.address, rank)
    if not config.binds:
        address = f"{address} (topic {config.topic!r}, rank {config.data_parallel_rank + rank})"
    found = [address]
    if config.replay_endpoint:
        found.append(_shifted(config.replay_endpoint, rank))
    return found


def _check_type(key: str, value: Any, type_name: str) -> None:
    expected = {"bool": bool, "int": int, "str": str}[type_name.removesuffix(" | None")]
    if value is None and type_name.endswith("None"):
        return
    if type(value) is not expected:
        raise SettingsError(f"{FLAG}: {key} is {value!r:.200}; {expected.__name__} is expected")


def _check(config: KvEventsConfig) -> None:
    if config.publisher not in ("", *PUBLISHERS):
        raise SettingsError(
            f"{FLAG}: publisher is {config.publisher!r}; one of {', '.join(PUBLISHERS)} is expected"
        )
    if config.encoding not in ENCODINGS:
        raise SettingsError(
            f"{FLAG}: encoding is {config.encoding!r}; one of {', '.join(ENCODINGS)} is expected"
        )
    for name, low in (("buffer_steps", 0), ("hwm", 0), ("max_queue_size", 1)):
        value = getattr(config, name)
        if value < low:
            raise SettingsError(f"{FLAG}: {name} is {value}; at least {low} is expected")
    if config.data_parallel_rank < 0:
        raise SettingsError(
            f"{FLAG}: data_parallel_rank is {config.data_parallel_rank}; at least 0 is expected"
        )
    if not config.is_on:
        return
    _check_address("endpoint", config.address)
    if config.replay_endpoint is not None:
        _check_address("replay_endpoint", config.replay_endpoint)
    if config.replay_endpoint == config.address:
        raise SettingsError(
            f"{FLAG}: endpoint and replay_endpoint are both {config.address!r}; they must differ"
        )


def _check_address(name: str, address: str) -> None:
    transport, _, rest = address.partition("://")
    if transport not in TRANSPORTS or not rest:
        raise SettingsError(
            f"{FLAG}: {name} is {address!r}; tcp://HOST:PORT or ipc://PATH is expected"
        )
    if transport != "tcp":
        return
    match = _TCP.fullmatch(address)
    if match is None or not 0 < int(match["port"]) <= MAX_PORT:
        raise SettingsError(f"{FLAG}: {name} is {address!r}; tcp://HOST:PORT is expected")


def _shifted(address: str, rank: int) -> str:
    """The address of the engine with this rank: another port, or another name."""
    if not rank:
        return address
    match = _TCP.fullmatch(address)
    if match is None:
        return f"{address}_dp{rank}"
    port = int(match["port"]) + rank
    if port > MAX_PORT:
        raise SettingsError(
            f"{FLAG}: engine {rank} would have port {port}; at most {MAX_PORT} is possible"
        )
    return f"tcp://{match['host']}:{port}"
