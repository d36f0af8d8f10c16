"""The lenders that an operator names: what is not understood is refused at the start, and nothing
is looked up."""

from __future__ import annotations

import random
import socket

import pytest

from weft.config.lenders import canonical_host, parse_lenders, why_no_lenders
from weft.config.options import SettingsError


@pytest.mark.parametrize(
    ("entry", "host", "port", "is_lender"),
    [
        ("a", "a", 8998, True),
        ("a", "a", 8999, False),
        ("a:9", "a", 9, True),
        ("a:9", "a", 8998, False),
        ("a:*", "a", 1, True),
        ("*.a.b", "x.y.a.b", 8998, True),
        ("*.a.b", "a.b", 8998, False),
        ("*.a.b", "xa.b", 8998, False),
        ("10.0.0.0/8:*", "10.9.9.9", 5, True),
        ("10.0.0.0/8:*", "11.0.0.1", 5, False),
        ("10.0.0.0/8:*", "10.a", 5, False),
        ("[fd00::1]:9", "fd00::1", 9, True),
        ("[fd00::/16]:9", "fd00::2", 9, True),
        ("fd00::1", "fd00::1", 8998, True),
        ("x, a:9 ,", "a", 9, True),
        ("A.B.", "a.b", 8998, True),
    ],
)
def test_an_entry_allows_what_it_says(entry: str, host: str, port: int, is_lender: bool) -> None:
    found = parse_lenders(entry, 8998)
    assert any(one.is_at(canonical_host(host), port) for one in found) is is_lender


@pytest.mark.parametrize(
    "entry", ["*", "*:9", "*a.b", "a..b", "a:0", "a:65536", "a:b", "10.0.0.1/8", "[::1]x", "a b"]
)
def test_what_is_no_lender_is_refused_by_name(entry: str) -> None:
    with pytest.raises(SettingsError, match="handoff-lenders") as refused:
        parse_lenders(f"good,{entry}", 8998)
    assert repr(entry) in str(refused.value)
    assert why_no_lenders(entry)


def test_every_canonical_host_can_be_looked_up_and_is_its_own_canonical_form() -> None:
    rng = random.Random(4)
    parts = [
        "a",
        "a-b",
        "a_b",
        "1",
        "127",
        "0x7f",
        ".",
        "..",
        ":",
        "::",
        "-",
        "[",
        "]",
        "%",
        "\0",
        "é",
        "A",
    ]
    found = set()
    for _ in range(20_000):
        host = canonical_host("".join(rng.choices(parts, k=rng.randrange(1, 8))))
        if not host:
            continue
        found.add(host)
        assert canonical_host(host) == host
        assert "\0" not in host
        host.encode("idna")  # what `getaddrinfo` does first
        if host.rpartition(".")[2].isdigit():
            socket.inet_pton(socket.AF_INET, host)
    assert len(found) > 100
