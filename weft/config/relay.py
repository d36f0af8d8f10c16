"""Settings of `weft route`, the front before several servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

from weft.config.options import SettingsError, option
from weft.config.server_url import url_parts

BOOTSTRAP_PORT = 8998


class ServerAddress(NamedTuple):
    """A server behind the front."""

    url: str
    host: str
    bootstrap_port: int = BOOTSTRAP_PORT  # port on which a prefill server lends KV

    @property
    def authority(self) -> str:
        """The host and the port, as a request names them."""
        return urlsplit(self.url).netloc


@dataclass(frozen=True, kw_only=True)
class RelayConfig:
    host: str = option("127.0.0.1", "address to listen on", group="front", everyday=True)
    port: int = option(
        30000,
        "port to listen on; 0 takes a free one",
        group="front",
        everyday=True,
        low=0,
        high=65535,
    )
    worker: str = option(
        "",
        "URLs of servers, each of which answers whole requests",
        group="servers",
        everyday=True,
        several=True,
        elsewhere=("worker_urls",),
    )
    prefill: str = option(
        "",
        "URLs of servers with --disaggregation-mode prefill, each with its "
        f"--disaggregation-bootstrap-port after it if that is not {BOOTSTRAP_PORT}",
        group="servers",
        everyday=True,
        several=True,
        elsewhere=("pd_disaggregation",),
    )
    decode: str = option(
        "",
        "URLs of servers with --disaggregation-mode decode",
        group="servers",
        everyday=True,
        several=True,
    )
    load_balance_method: str = option(
        "cache_aware",
        "which server gets a request: the one that probably has its prompt, or can compute it "
        "first; in turn; the one with the fewest open requests, or tokens in their prompts",
        group="servers",
        everyday=True,
        choices="weft.route.policy:method_names",
        elsewhere=("policy", "prefill_policy", "decode_policy"),
    )
    kv_tokens: int = option(
        131_072,
        "tokens that the cache of one server is taken to hold, for cache_aware",
        group="servers",
        everyday=True,
        low=1,
    )
    prefill_wait_s: float = option(
        60.0,
        "the longest time for which a request waits for a prefill server; then the decode server "
        "computes its prompt",
        group="servers",
        everyday=True,
        low=0.1,
        high=3600.0,
    )
    probe_s: float = option(
        2.0,
        "time between two probes of a server",
        group="servers",
        everyday=True,
        low=0.05,
        high=3600.0,
    )
    max_body_mb: float = option(
        16.0, "largest request body", group="front", everyday=True, low=0.001, high=1024.0
    )
    max_connections: int = option(
        4_096,
        "open connections; beyond, idle ones are closed and requests get 503",
        group="front",
        everyday=True,
        low=1,
    )
    drain_s: float = option(
        10.0,
        "time that open requests get when the front is stopped",
        group="front",
        everyday=True,
        low=0.0,
        high=3600.0,
    )
    log_level: str = option(
        "info",
        "what is logged",
        group="front",
        everyday=True,
        choices=("debug", "info", "warning", "error"),
    )
    log_format: str = option(
        "text",
        "how a line of the log is written",
        group="front",
        everyday=True,
        choices=("text", "json"),
    )


class RelayServers(NamedTuple):
    """The servers by role: either `workers`, or `decode` and optionally `prefill`."""

    workers: tuple[ServerAddress, ...]
    prefill: tuple[ServerAddress, ...]
    decode: tuple[ServerAddress, ...]


def relay_servers(config: RelayConfig) -> RelayServers:
    """The servers that the settings name. Raises SettingsError."""
    servers = RelayServers(
        addresses("--worker", config.worker),
        addresses("--prefill", config.prefill, has_ports=True),
        addresses("--decode", config.decode),
    )
    if servers.workers and (servers.prefill or servers.decode):
        raise SettingsError(
            "--worker excludes --prefill and --decode: a server either answers whole requests, or "
            "does one part of them"
        )
    if servers.prefill and not servers.decode:
        raise SettingsError("--prefill needs --decode: prefill servers generate nothing")
    if not servers.workers and not servers.decode:
        raise SettingsError(
            "no server is named: --worker URL, or --prefill URL and --decode URL; put spaces "
            "between several URLs"
        )
    return servers


def addresses(flag: str, text: str, *, has_ports: bool = False) -> tuple[ServerAddress, ...]:
    """The servers of one option: URLs, each followed by its bootstrap port if `has_ports`. Raises
    SettingsError, which names `flag`."""
    found: list[ServerAddress] = []
    for word in text.replace(",", " ").split():
        if word.isdecimal():
            if not (has_ports and found and 0 < int(word) < 65_536):
                raise SettingsError(f"{flag}: {word} is not a URL; http://HOST:PORT is expected")
            found[-1] = found[-1]._replace(bootstrap_port=int(word))
            continue
        found.append(_address(flag, word))
    urls = [one.url for one in found]
    for url in urls:
        if urls.count(url) > 1:
            raise SettingsError(f"{flag}: {url} is given twice")
    return tuple(found)


def _address(flag: str, word: str) -> ServerAddress:
    parts = url_parts(word)
    if parts is None or parts.query or parts.fragment:
        raise SettingsError(f"{flag}: {word!r} is not a URL; http://HOST:PORT is expected")
    if parts.username is not None:
        raise SettingsError(
            f"{flag}: a URL may not contain a user or a key; requests bring their keys"
        )
    return ServerAddress(word.rstrip("/"), parts.hostname or "")
