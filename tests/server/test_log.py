from __future__ import annotations

import io
import json
import logging
import subprocess
import sys

import pytest

from weft.observe.log import MAX_VALUE_LEN, EventLog, escaped, setup
from weft.observe.request_context import RequestContext, current


def test_event_is_one_line_of_fields(own_lines: io.StringIO) -> None:
    EventLog("client").info("finished", rid="r-1", reason="stop", tokens=3, seconds=0.123456)
    _, level, *rest = own_lines.getvalue().split()
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
def test_no_value_can_forge_a_line(own_lines: io.StringIO, hostile: str) -> None:
    EventLog("server").info("event", rid=hostile, after=1)
    text = own_lines.getvalue()
    assert len(text.splitlines()) == 1
    assert text.endswith(" after=1\n")
    assert text.isprintable() or text.removesuffix("\n").isprintable()
    value = text.partition("rid=")[2].removesuffix(" after=1\n")
    assert value.startswith('"')
    assert value.endswith('"')
    assert '"' not in value[1:-1].replace('\\"', "")


def test_long_value_is_cut() -> None:
    assert len(escaped("a" * 1_000_000)) < MAX_VALUE_LEN + 10


def test_foreign_message_is_escaped_too(own_lines: io.StringIO) -> None:
    logging.getLogger("other").warning("bad %s", "a\nb")
    assert len(own_lines.getvalue().splitlines()) == 1


def test_traceback_is_indented(own_lines: io.StringIO) -> None:
    try:
        raise ValueError("a\x1b[31m\nINFO forged")
    except ValueError:
        EventLog("server").exception("failed", rid="r")
    first, *rest = own_lines.getvalue().splitlines()
    assert first.endswith("error server failed rid=r")
    assert rest
    assert all(line.startswith("    ") and "\x1b" not in line for line in rest)


def test_level_is_kept(own_lines: io.StringIO) -> None:
    EventLog("server").debug("hidden")
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    assert own_lines.getvalue() == ""


@pytest.mark.parametrize(
    "hostile",
    [
        "a\nb",
        "\x1b[31m",
        '"}\n{"level":"error"',
        "\u2028",
        "\x7f",
        "\x9b",
        "\ud800",
        "ü",
        "a" * 9_999,
    ],
)
def test_no_value_can_forge_a_line_of_json(own_lines: io.StringIO, hostile: str) -> None:
    setup("info", own_lines, "json")
    EventLog("server").info(
        "event", rid=hostile, level="forged", number=3, seconds=0.123456789, nothing=None
    )
    text = own_lines.getvalue()
    assert len(text.splitlines()) == 1
    assert text.removesuffix("\n").isprintable()
    assert text.isascii()
    found = json.loads(text)
    assert found["level"] == "info"
    assert found["component"] == "server"
    assert found["event"] == "event"
    assert found["rid"] == hostile or (found["rid"] == hostile[:MAX_VALUE_LEN] + "...")
    assert found["number"] == 3
    assert found["seconds"] == 0.123457
    assert found["nothing"] is None


def test_json_has_the_traceback_in_the_same_line(own_lines: io.StringIO) -> None:
    setup("info", own_lines, "json")
    try:
        raise ValueError("a\x1b[31m\nforged")
    except ValueError:
        EventLog("server").exception("failed", limit=float("inf"))
    logging.getLogger("other").warning("bad %s", "a\nb")
    failed, foreign = map(json.loads, own_lines.getvalue().splitlines())
    assert "ValueError: a\x1b[31m\nforged" in failed["traceback"]
    assert failed["limit"] == "inf"
    assert foreign["event"] == "bad a\nb"


def test_line_carries_the_name_of_the_request_that_is_worked_on(own_lines: io.StringIO) -> None:
    token = current.set(RequestContext("r-7", 0.0))
    try:
        EventLog("server").info("one")
        EventLog("server").info("other", rid="own")
    finally:
        current.reset(token)
    EventLog("server").info("none")
    one, other, none = own_lines.getvalue().splitlines()
    assert one.endswith(" one rid=r-7")
    assert other.endswith(" other rid=own")
    assert none.endswith(" none")


def test_a_program_without_logging_sees_warnings_with_level_and_values() -> None:
    program = """
from weft.observe.log import EventLog, silent
log = EventLog("engine")
log.info("unseen")
log.warning("lack", pages=3)
with silent():
    log.warning("unseen")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert ended.stderr.decode().split()[1:] == ["warning", "engine", "lack", "pages=3"]
