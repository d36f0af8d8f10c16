"""Logging: one line per event, `time level component event key=value ...` or JSON, on the standard
library's loggers.

A value may hold anything that a user sent: control characters are escaped and long values cut, so
that no request can forge a line or control the terminal. Lines that are logged during an HTTP
request carry its name (`request_context.py`).

In a program that has not configured logging, warnings go to standard error: Python alone would
write the name of the event there, without its level and values.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Iterator
from typing import TextIO

from weft.observe import request_context

MAX_VALUE_LEN = 256
SELDOM_S = 60.0  # between two lines of an event that may be very frequent
LEVELS = ("debug", "info", "warning", "error")
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(0x20), 0x22, 0x5C, *range(0x7F, 0xA0))} | {
    ord("\n"): "\\n",
    ord("\r"): "\\r",
    ord("\t"): "\\t",
    ord('"'): '\\"',
    ord("\\"): "\\\\",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}


def escaped(value: object, max_len: int = MAX_VALUE_LEN) -> str:
    """`value` on one line, of at most about `max_len` characters, quoted if it would be
    ambiguous."""
    if isinstance(value, float):
        return f"{value:.4g}"
    raw = str(value)
    text = raw[:max_len].translate(_ESCAPES)
    text = text.encode("utf-8", "backslashreplace").decode()  # lone surrogates
    if len(raw) > max_len:
        text += "..."
    if text.isascii() and text == raw and not set(text) & set(" =") and text:
        return text
    return f'"{text}"'


class EventLog:
    """Events of one component: `log.info("finished", rid=rid, reason="stop")`."""

    def __init__(self, component: str) -> None:
        self._logger = logging.getLogger(f"weft.{component}")
        # Whether a level of `logging` is enabled: check it before computing expensive fields.
        self.is_enabled_for = self._logger.isEnabledFor
        # By event: time of the last line, and number of events since.
        self._seldom: dict[str, tuple[float, int]] = {}

    def debug(self, event: str, **fields: object) -> None:
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        self._write(logging.ERROR, event, fields)

    def seldom(self, event: str, **fields: object) -> None:
        """A warning about an event that may be very frequent: at most one line a minute, with the
        number of events since the last line."""
        written_at, num = self._seldom.get(event, (-SELDOM_S, 0))
        now = time.monotonic()
        if now - written_at >= SELDOM_S:
            self.warning(event, times=num + 1, **fields)
            written_at = now
            num = -1
        self._seldom[event] = written_at, num + 1

    def exception(self, event: str, exc: BaseException | None = None, /, **fields: object) -> None:
        """Like `error`, with the traceback of `exc`, or of the exception that is being handled."""
        self._logger.error(event, extra={"fields": _named(fields)}, exc_info=exc or True)

    def _write(self, level: int, event: str, fields: dict[str, object]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={"fields": _named(fields)})


def _named(fields: dict[str, object]) -> dict[str, object]:
    """`fields`, preceded by the name of the current request, if there is one."""
    rid = request_context.rid()
    if rid:
        return {"rid": rid, **fields}
    return fields


class LineFormatter(logging.Formatter):
    """A record as one line; every line of a traceback is indented."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created))
        component = record.name.removeprefix("weft.")
        fields = getattr(record, "fields", None)
        event = record.getMessage()
        # Our own events are constants; a message of another library may contain anything.
        if fields is None:
            event = escaped(event, 2_000).strip('"')
        line = f"{clock}.{int(record.msecs):03d} {record.levelname.lower()} {component} {event}"
        for key, value in (fields or {}).items():
            line += f" {key}={escaped(value)}"
        if record.exc_info:
            trace = self.formatException(record.exc_info)
            for part in trace.splitlines():
                line += f"\n    {part.translate(_TRACE_ESCAPES)}"
        return line


class JsonFormatter(logging.Formatter):
    """A record as one line of ASCII JSON. No value of `fields` can be mistaken for another key."""

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", None)
        second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{second}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "component": record.name.removeprefix("weft."),
            "event": record.getMessage()[:2_000],
        }
        for key, value in (fields or {}).items():
            if key not in line:
                line[key] = _plain(value)
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True).replace("\x7f", "\\u007f")


def _plain(value: object, max_len: int = MAX_VALUE_LEN) -> object:
    """`value` for JSON; long texts are cut. JSON has no infinity, so it becomes text."""
    if isinstance(value, bool | int) or value is None:
        return value
    if isinstance(value, float) and abs(value) < float("inf"):
        return float(f"{value:.6g}")
    text = str(value)
    if len(text) > max_len:
        return text[:max_len] + "..."
    return text


FORMATS = {"text": LineFormatter, "json": JsonFormatter}

_TRACE_ESCAPES = {code: text for code, text in _ESCAPES.items() if code not in (0x22, 0x5C)}


def _is_only_one(record: logging.LogRecord) -> bool:
    """Whether nobody has configured where our events go."""
    return not logging.getLogger().handlers and len(logging.getLogger("weft").handlers) == 1


_unconfigured = logging.StreamHandler()
_unconfigured.setLevel(logging.WARNING)
_unconfigured.setFormatter(LineFormatter())
_unconfigured.addFilter(_is_only_one)
logging.getLogger("weft").addHandler(_unconfigured)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Log none of our events, because they repeat what was logged before."""
    logger = logging.getLogger("weft")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def setup(level: str = "info", stream: TextIO | None = None, format: str = "text") -> None:
    """Log our events from `level` on to `stream` (None: standard error), those of other libraries
    from warning on.

    `format` is a key of `FORMATS`.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(FORMATS[format]())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    set_level(level)
    # Invalid requests of clients are not worth a line each.
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).setLevel(logging.ERROR)


def set_level(level: str) -> None:
    """Log our own events from this level of `LEVELS` on."""
    logging.getLogger("weft").setLevel(level.upper())


def get_format() -> str:
    """The key of `FORMATS` of the current format."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonFormatter):
            return "json"
    return "text"


def get_level() -> str:
    """The lowest level of `LEVELS` at which our own events are logged."""
    return logging.getLevelName(logging.getLogger("weft").getEffectiveLevel()).lower()
