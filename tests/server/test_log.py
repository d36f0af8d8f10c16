from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from weft.observe.log import MAX_VALUE_LEN, EventLog, escaped, setup


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before = (root.handlers[:], root.level, logging.getLogger("weft").level)
    stream = io.StringIO()
    setup("info", stream)
    yield stream
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    logging.getLogger("weft").setLevel(before[2])


def test_event_is_one_line_of_fields(lines: io.StringIO) -> None:
    EventLog("client").info("finished", rid="r-1", reason="stop", tokens=3, seconds=0.123456)
    _, level, *rest = lines.getvalue().split()
    assert level == "info"
    assert rest == ["client", "finished", "rid=r-1", "reason=stop", "tokens=3", "seconds=0.1235"]


@pytest.mark.parametrize(
    "hostile",
    [
        "a\nINFO forged",
        "a\r\nb",
        "\x1b[31mred",
        "a b",
        "k=v",
        'say "x"',
        "\u2028",
        "\x85",
        "\x00",
        "\\n",
        "ü",
        "",
        "\ud800",
    ],
)
def test_no_value_can_forge_a_line(lines: io.StringIO, hostile: str) -> None:
    EventLog("server").info("event", rid=hostile, after=1)
    text = lines.getvalue()
    assert len(text.splitlines()) == 1
    assert text.endswith(" after=1\n")
    assert text.isprintable() or text.removesuffix("\n").isprintable()
    value = text.partition("rid=")[2].removesuffix(" after=1\n")
    assert value.startswith('"')
    assert value.endswith('"')
    assert '"' not in value[1:-1].replace('\\"', "")


def test_long_value_is_cut() -> None:
    assert len(escaped("a" * 1_000_000)) < MAX_VALUE_LEN + 10


def test_foreign_message_is_escaped_too(lines: io.StringIO) -> None:
    logging.getLogger("other").warning("bad %s", "a\nb")
    assert len(lines.getvalue().splitlines()) == 1


def test_traceback_is_indented(lines: io.StringIO) -> None:
    try:
        raise ValueError("a\x1b[31m\nINFO forged")
    except ValueError:
        EventLog("server").exception("failed", rid="r")
    first, *rest = lines.getvalue().splitlines()
    assert first.endswith("error server failed rid=r")
    assert rest
    assert all(line.startswith("    ") and "\x1b" not in line for line in rest)


def test_level_is_kept(lines: io.StringIO) -> None:
    EventLog("server").debug("hidden")
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    assert lines.getvalue() == ""
