"""Bytes from another machine or from a file, where the operator allows it, and from nowhere else.

Whoever lets a server fetch what a request names lends it their place in the network. So a host has
to be named by the operator; its name is resolved once, and every address that it has must be one of
the public internet; one of these very addresses is dialled; no redirect is followed; no proxy, no
cookie and no password is used; and bytes and time have limits. A file has to lie below the one
folder that the operator names, wherever links point.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import os
import re
import socket
import ssl
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from weft.text.media.errors import MediaError
from weft.text.media.sources import require_size
from weft.version import __version__

PIECE_BYTES = 1 << 16
MAX_URL_LEN = 8_192
NAT64 = ipaddress.ip_network("64:ff9b::/96")  # the last four bytes are an IPv4 address

# Nothing that parsers disagree about: no user, no backslash, no space, no other script.
_ADDRESS = re.compile(
    r"(?P<scheme>https?)://(?P<host>[a-z0-9.-]+|\[[0-9a-f:.]+\])(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<target>[/?][!$-;=?-Z_a-z~%\[\]@]*)?(?:#.*)?",
    re.IGNORECASE | re.ASCII,
)
_PORTS = {"http": 80, "https": 443}

Resolve = Callable[[str, int], Sequence[str]]


class MediaAccess(NamedTuple):
    """What may be read besides the request itself."""

    hosts: frozenset[str] = frozenset()  # as "example.com" or "example.com:8080"
    folder: Path | None = None  # files below it may be read; None: no file
    any_file: bool = False  # for programs, which may read what they like
    timeout_s: float = 10.0


def resolve(host: str, port: int) -> list[str]:
    """The addresses of a name, as the system knows them. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def is_public(address: str) -> bool:
    """Whether it is an address of the public internet, and leads nowhere else by its form."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    inner = ip
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.teredo is not None:
            return False
        embedded = ip.ipv4_mapped or ip.sixtofour
        if embedded is None and ip in NAT64:
            embedded = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if embedded is not None:
            inner = embedded
        elif int(ip) >> 32 == 0:  # the old form of a mapped address
            return False
    return inner.is_global and not inner.is_multicast and not inner.is_reserved


class Fetcher:
    """Reads addresses as one `MediaAccess` allows it. Calls may run in several threads."""

    def __init__(
        self,
        access: MediaAccess,
        resolve: Resolve = resolve,
        is_public: Callable[[str], bool] = is_public,
    ) -> None:
        self._access = access
        self._resolve = resolve
        self._is_public = is_public

    def check(self, url: str) -> None:
        """Raise `MediaError` for an address that is not allowed, before anything is done."""
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "file":
            if not self._access.any_file and self._access.folder is None:
                raise MediaError(
                    "files are not read; they would be below the folder of "
                    "--allowed-local-media-path"
                )
        elif scheme in _PORTS:
            self._parsed(url)
        else:
            raise MediaError(
                f"it is an address of the kind {url[:16]!r}; data:, https:, http: and file: "
                "are known"
            )

    def fetch(
        self,
        url: str,
        max_bytes: int,
    ) -> bytes:
        """The bytes behind an address. Raises `MediaError`, or `MediaTooLarge`."""
        self.check(url)
        if url[:5].lower() == "file:":
            return self._read_file(url, max_bytes)
        return self._get(self._parsed(url), max_bytes)

    # ---- other machines

    def _parsed(self, url: str) -> _Target:
        """Raises `MediaError` for what is no plain address, and for a host that is not allowed."""
        if not self._access.hosts:
            raise MediaError(
                "addresses are not fetched; they would be from the hosts of --allowed-media-domains"
            )
        found = _ADDRESS.fullmatch(url) if len(url) <= MAX_URL_LEN else None
        if found is None:
            raise MediaError(
                "its address is not of the form https://HOST/PATH, in ASCII, without a user"
            )
        scheme = found["scheme"].lower()
        host = found["host"].lower().strip("[]")
        port = int(found["port"] or _PORTS[scheme])
        named = {f"{host}:{port}"}
        if port in (_PORTS[scheme], 0):
            named.add(host)
        if not named & self._access.hosts or not 0 < port < 65_536:
            raise MediaError(
                f"its host {host[:128]!r} (port {port}) is none of --allowed-media-domains"
            )
        target = found["target"] or "/"
        if target.startswith("?"):
            target = "/" + target
        return _Target(scheme, host, port, target)

    def _get(
        self,
        target: _Target,
        max_bytes: int,
    ) -> bytes:
        address = self._address_of(target)
        timeout_s = self._access.timeout_s
        # The time-out of a socket is that of one read: a host could send a byte now and then.
        connection = _Dialled(target, address, timeout_s)
        timer = threading.Timer(timeout_s, connection.cut_off)
        timer.daemon = True
        timer.start()
        try:
            return _answer(connection, target, max_bytes)
        except (OSError, http.client.HTTPException) as exc:
            if connection.is_cut_off or isinstance(exc, TimeoutError):
                raise MediaError(f"it did not come within {timeout_s:g} s") from exc
            raise MediaError(f"its host does not give it ({type(exc).__name__})") from exc
        finally:
            timer.cancel()
            connection.let_go()

    def _address_of(self, target: _Target) -> str:
        try:
            addresses = self._resolve(target.host, target.port)
        except (OSError, UnicodeError) as exc:
            raise MediaError(f"its host {target.host!r} has no address") from exc
        if not addresses or not all(map(self._is_public, addresses)):
            raise MediaError(f"its host {target.host!r} is not one of the public internet")
        return addresses[0]

    # ---- files

    def _read_file(
        self,
        url: str,
        max_bytes: int,
    ) -> bytes:
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
            raise MediaError("its address is not of the form file:///PATH")
        path = unquote(parts.path)
        if "\0" in path or not path.startswith("/"):
            raise MediaError("its address is not of the form file:///PATH")
        real = os.path.realpath(path)
        if not self._access.any_file:
            assert self._access.folder is not None, "checked before"
            root = os.path.realpath(self._access.folder)
            if os.path.commonpath([root, real]) != root:
                raise MediaError("its file is not below the folder of --allowed-local-media-path")
        return _read(real, max_bytes)


def _read(path: str, max_bytes: int) -> bytes:
    """A regular file; what is none (a pipe, a device) is not waited for."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as exc:
        raise MediaError("its file cannot be read") from exc
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise MediaError("its address is not that of a file")
        require_size(status.st_size, max_bytes)
        with open(handle, "rb", closefd=False) as file:
            data = file.read(max_bytes + 1)
    finally:
        os.close(handle)
    require_size(len(data), max_bytes)
    return data


class _Target(NamedTuple):
    scheme: str
    host: str
    port: int
    target: str  # path and query


class _Dialled(http.client.HTTPConnection):
    """A connection to the one address that was checked, whatever its name stands for by now."""

    def __init__(
        self,
        target: _Target,
        address: str,
        timeout_s: float,
    ) -> None:
        super().__init__(target.host, target.port, timeout=timeout_s)
        self.default_port = _PORTS[target.scheme]
        self.is_cut_off = False
        self._address = address
        self._is_secret = target.scheme == "https"
        # http.client lets go of the socket when the head of the answer has come.
        self._dialled: socket.socket | None = None

    def connect(self) -> None:
        self._dialled = socket.create_connection((self._address, self.port), self.timeout)
        if self._is_secret:
            context = ssl.create_default_context()
            # The greeting comes afterwards, so that it, too, can be cut off.
            secret = context.wrap_socket(
                self._dialled, server_hostname=self.host, do_handshake_on_connect=False
            )
            self._dialled = secret
            secret.do_handshake()
        self.sock = self._dialled

    def let_go(self) -> None:
        """Close it, answer and all."""
        self.close()
        if self._dialled is not None:
            self._dialled.close()

    def cut_off(self) -> None:
        """End it from another thread; whoever reads it gets an error."""
        self.is_cut_off = True
        if self._dialled is not None:
            with contextlib.suppress(OSError):  # it has ended by itself
                self._dialled.shutdown(socket.SHUT_RDWR)


def _answer(
    connection: _Dialled,
    target: _Target,
    max_bytes: int,
) -> bytes:
    headers = {
        "accept": "*/*",
        "accept-encoding": "identity",
        "user-agent": f"weft/{__version__}",
        "connection": "close",
    }
    connection.request("GET", target.target, headers=headers)
    with connection.getresponse() as answer:
        if 300 <= answer.status < 400:
            raise MediaError(
                f"its host answers with a redirect ({answer.status}), which is not followed"
            )
        if answer.status != 200:
            raise MediaError(f"its host answers with status {answer.status}")
        require_size(answer.length or 0, max_bytes)
        pieces: list[bytes] = []
        size = 0
        while piece := answer.read(PIECE_BYTES):
            size += len(piece)
            require_size(size, max_bytes)
            pieces.append(piece)
        if connection.is_cut_off:
            raise TimeoutError
        if answer.length:
            raise MediaError("its host broke off in the middle")
        return b"".join(pieces)
