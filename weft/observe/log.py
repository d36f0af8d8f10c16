"""Logging: one line per event, `time level component event key=value ...`, on the standard library's loggers.

A value can hold whatever a user sent: control characters are escaped and long values cut, so that no request can write
a line of its own or paint the terminal.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO

MAX_VALUE_LEN = 256
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
    """`value` on one line, of at most about `max_len` characters, in quotes if it would not stand alone."""
    if isinstance(value, float):
        return f"{value:.4g}"
    raw = str(value)
    text = raw[:max_len].translate(_ESCAPES)
    text = text.encode("utf-8", "backslashreplace").decode()  # lone surrogates
    if len(raw) > max_len:
        text += "..."
    return text if text.isascii() and text == raw and not set(text) & set(" =") and text else f'"{text}"'


class EventLog:
    """Events of one component: `log.info("finished", rid=rid, reason="stop")`."""

    def __init__(self, component: str) -> None:
        self._logger = logging.getLogger(f"weft.{component}")

    def debug(self, event: str, **fields: object) -> None:
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        self._write(logging.ERROR, event, fields)

    def exception(self, event: str, **fields: object) -> None:
        """As `error`, with the traceback of the exception that is being handled."""
        self._logger.error(event, extra={"fields": fields}, exc_info=True)

    def _write(self, level: int, event: str, fields: dict[str, object]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={"fields": fields})


class LineFormatter(logging.Formatter):
    """A record as one line; of a traceback, every line indented."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created))
        component = record.name.removeprefix("weft.")
        fields = getattr(record, "fields", None)
        # an event of ours is a constant, a foreign message may hold anything
        event = record.getMessage() if fields is not None else escaped(record.getMessage(), 2_000).strip('"')
        line = f"{clock}.{int(record.msecs):03d} {record.levelname.lower()} {component} {event}"
        for key, value in (fields or {}).items():
            line += f" {key}={escaped(value)}"
        if record.exc_info:
            trace = self.formatException(record.exc_info)
            line += "".join(f"\n    {part.translate(_TRACE_ESCAPES)}" for part in trace.splitlines())
        return line


_TRACE_ESCAPES = {code: text for code, text in _ESCAPES.items() if code not in (0x22, 0x5C)}


def setup(level: str = "info", stream: TextIO | None = None) -> None:
    """Log everything from `level` up to `stream` (standard error if not given), other libraries from warning up."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("weft").setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):  # what clients send wrong is not worth a line each
        logging.getLogger(name).setLevel(logging.ERROR)
