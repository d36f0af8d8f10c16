"""URLs of servers on the command line."""

from __future__ import annotations

import pytest

from weft.bench.http import HttpClient
from weft.cli.remote import RemoteServer
from weft.config.options import SettingsError
from weft.config.server_url import server_url


@pytest.mark.parametrize("url", ["[::1]:30000", "http://[::1]:30000", "http://[::1]:30000/v1"])
def test_an_address_of_version_6_stands_in_brackets(url: str) -> None:
    server = RemoteServer(url)
    assert server.url == "http://[::1]:30000"
    assert (server_url("URL", url).hostname, server_url("URL", url).port) == ("::1", 30_000)


@pytest.mark.parametrize(
    "url",
    [
        *("", "http://", "ftp://x", "::1", "http://[::1", "http://]", "http://[zz]:1"),
        *("http://[::1]:abc", "http://x:99999", "http://x:1:2", "http://a b", "http://a\nb"),
        *("http://a..b:1", f"http://{'a' * 64}:1"),
    ],
)
def test_what_is_no_url_is_refused_by_its_value(url: str) -> None:
    with pytest.raises(SettingsError) as refused:
        RemoteServer(url)
    expected = f"--url is {url!r}; something like http://127.0.0.1:30000 is expected"
    assert str(refused.value) == expected
    with pytest.raises(SettingsError, match=r"^URL is "):
        HttpClient(url)


def test_a_url_with_a_password_is_refused_without_repeating_it() -> None:
    with pytest.raises(SettingsError, match="may not contain a user or a key") as refused:
        RemoteServer("http://user:secret@127.0.0.1:30000")
    assert "secret" not in str(refused.value)
