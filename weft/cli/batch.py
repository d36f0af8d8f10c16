"""The verb `batch`: answer the lines of a file by a running server, in the background.

    weft batch run requests.jsonl --output answers.jsonl

Lines are those of OpenAI's batches, or plain ones with `messages`, `prompt` or `input`; a plain
line without a `custom_id` is called by its number. Answers are appended line by line, so a run
that was stopped in any way goes on where it was: what is in the file is not asked again. Lines that
could not be answered are in FILE.errors, and the next run tries them again.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from weft.batches.forms.openai import OPENAI, PATHS
from weft.batches.forms.protocol import BadLine, LineRequest, RouteAnswer
from weft.batches.line_file import LineFile, lines_of
from weft.batches.tries import Tries
from weft.cli.ctl.run import DEFAULT_URL
from weft.cli.remote import ANSWER_TIMEOUT_S, RemoteServer, served_models
from weft.config.options import Command, SettingsError, asked_help, did_you_mean, option
from weft.json_types import JsonObject

ABOUT = "Answer the lines of a file by a running server, in the background."
SHOWN_EVERY_S = 0.5
# The routes of plain lines, by the field that says what is asked.
PLAIN = {"messages": PATHS[0], "prompt": PATHS[1], "input": PATHS[2]}
STOPPED = 130  # exit status, as of an interrupted program


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    file: str = option("", "file of JSON lines with requests", group="batch", everyday=True)
    output: str = option("", "file to which answers are appended", group="batch", everyday=True)
    url: str = option(DEFAULT_URL, "server to ask", group="batch", everyday=True)
    api_key: str = option(
        "", "key for the server (better: WEFT_API_KEY)", group="batch", everyday=True
    )
    open_lines: int = option(
        64, "lines that are asked at once", group="batch", everyday=True, low=1, high=1_024
    )
    online: bool = option(
        False,
        "ask as other requests do; else lines get what other requests leave",
        group="batch",
        everyday=True,
    )


class Job(NamedTuple):
    number: int  # of the line, from 0
    work: LineRequest


class EndedLine(NamedTuple):
    line: JsonObject
    is_error: bool


def batch(argv: Sequence[str]) -> int:
    """Run the verb. Returns the exit status: 1 if a line could not be answered, 130 if it was
    stopped."""
    command = Command("weft batch run", ABOUT, BatchOptions, positional="file")
    words = list(argv)
    section = asked_help(words)
    if section is not None:
        print(command.help(section))
        return 0
    if not words or words[0] != "run":
        word = words[0] if words else ""
        hint = did_you_mean(word, ["run"]) if word else ""
        raise SettingsError(f"weft batch has the command run{hint}: weft batch run FILE")
    options = command.read(words[1:], os.environ).make(BatchOptions)
    for name in ("file", "output"):
        if not getattr(options, name):
            raise SettingsError("weft batch run needs FILE and --output FILE")
    source = Path(options.file)
    if not source.is_file():
        raise SettingsError(f"{source} is no file")
    if Path(options.output).exists() and source.samefile(options.output):
        raise SettingsError(f"FILE and --output are the same file, {source}")
    server = RemoteServer(options.url, options.api_key)
    model = served_models(server)[0].name
    return BatchOfFile(options, server, model).run()


class BatchOfFile:
    """The lines of one file. Answers come from threads, and one thread writes them."""

    def __init__(self, options: BatchOptions, server: RemoteServer, model: str) -> None:
        """Raises SettingsError if the files of answers cannot be written."""
        self._options = options
        self._server = server
        self._model = model  # of lines that name none
        self._source = Path(options.file)
        output = Path(options.output)
        errors = output.with_name(output.name + ".errors")
        try:
            self._output = LineFile(output)
            errors.unlink(missing_ok=True)  # these lines are tried again
            self._errors = LineFile(errors)
            self._done = {_custom_id(line) for line in lines_of(output)}
            self._num_lines = sum(1 for _ in lines_of(self._source))
        except BlockingIOError as exc:
            raise SettingsError(f"--output is {output}: another run writes to it") from exc
        except OSError as exc:
            raise SettingsError(f"--output is {output}: {exc.strerror}") from exc
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._ended: SimpleQueue[EndedLine] = SimpleQueue()
        self._is_stopped = threading.Event()
        self._num_found = len(self._done)
        self._num_failed = 0
        self._began_s = time.monotonic()

    def run(self) -> int:
        num_open = 0
        threads = [
            threading.Thread(target=self._ask, daemon=True) for _ in range(self._options.open_lines)
        ]
        for thread in threads:
            thread.start()
        num_ended = 0
        shown_s = 0.0
        try:
            for job in self._jobs_of_file():
                self._jobs.put(job)
                num_open += 1
                while num_open >= 2 * self._options.open_lines:
                    num_open -= 1
                    num_ended += self._write(self._ended.get())
                    shown_s = self._show(num_ended, shown_s)
            while num_open:
                num_open -= 1
                num_ended += self._write(self._ended.get())
                shown_s = self._show(num_ended, shown_s)
        except KeyboardInterrupt:
            self._is_stopped.set()
            self._report(num_ended, "stopped; the same command goes on")
            return STOPPED
        finally:
            self._is_stopped.set()
            for _ in threads:
                self._jobs.put(None)
            for file in (self._output, self._errors):
                file.flush()
                file.close()
        self._report(num_ended, "")
        return 1 if self._num_failed else 0

    def _jobs_of_file(self) -> Iterator[Job]:
        """The lines that are to be asked. What is no request is an error line at once."""
        taken: set[str] = set()
        for index, line in enumerate(lines_of(self._source)):
            try:
                work = _work(line, index)
                if work.custom_id in taken:
                    raise BadLine("custom_id is that of an earlier line", work.custom_id)
            except BadLine as exc:
                written = OPENAI.ended(f"line-{index}", exc.custom_id, "invalid", str(exc))
                self._write(EndedLine(written.fields, is_error=True))
                continue
            taken.add(work.custom_id)
            if work.custom_id not in self._done:
                yield Job(index, work)

    # ---- the threads

    def _ask(self) -> None:
        connection = self._server.connect(ANSWER_TIMEOUT_S)
        while True:
            job = self._jobs.get()
            if job is None or self._is_stopped.is_set():
                connection.close()
                return
            answer = self._answer(connection, job.work)
            written = OPENAI.answered(f"line-{job.number}", job.work.custom_id, answer)
            self._ended.put(EndedLine(written.fields, written.is_error))

    def _answer(self, connection: http.client.HTTPConnection, work: LineRequest) -> RouteAnswer:
        body = {"model": self._model, **work.body}
        if not self._options.online:
            body["service_tier"] = "flex"
        encoded = json.dumps(body).encode()
        tries = Tries()
        while True:
            answer = self._once(connection, work.path, encoded)
            wait_s = tries.wait_s(answer.status)
            if wait_s is None or self._is_stopped.is_set():
                return answer
            self._is_stopped.wait(wait_s)

    def _once(self, connection: http.client.HTTPConnection, path: str, body: bytes) -> RouteAnswer:
        try:
            path = self._server.path + path
            connection.request("POST", path, body, self._server.headers)
            response = connection.getresponse()
            fields = json.loads(response.read())
            return RouteAnswer(response.status, fields, response.getheader("x-request-id", ""))
        except (OSError, http.client.HTTPException, ValueError) as exc:
            connection.close()  # the next request opens it again
            message = f"the connection to {self._server.address} broke: {exc}"
            return RouteAnswer(502, {"error": {"message": message}}, "")

    # ---- results

    def _write(self, ended: EndedLine) -> int:
        """Append a result. Returns 1. Raises SettingsError if the disk takes nothing."""
        file = self._errors if ended.is_error else self._output
        try:
            file.append([json.dumps(ended.line, ensure_ascii=False).encode()])
        except OSError as exc:
            raise SettingsError(f"{file.path} could not be written: {exc.strerror}") from exc
        self._num_failed += ended.is_error
        return 1

    def _show(self, num_ended: int, shown_s: float) -> float:
        now = time.monotonic()
        if now < shown_s + SHOWN_EVERY_S or not sys.stderr.isatty():
            return shown_s
        sys.stderr.write(f"\r\x1b[2K{self._text(num_ended)}")
        sys.stderr.flush()
        return now

    def _report(self, num_ended: int, words: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[2K")
        text = self._text(num_ended)
        print(f"{text}; {words}" if words else text, file=sys.stderr)

    def _text(self, num_ended: int) -> str:
        elapsed_s = max(time.monotonic() - self._began_s, 1e-9)
        rate = num_ended / elapsed_s
        num_there = self._num_found + num_ended
        left_s = (self._num_lines - num_there) / rate if rate else 0.0
        text = f"{num_there:,} of {self._num_lines:,} lines, {rate:,.1f} a second"
        if left_s > 1:
            text += f", about {left_s:,.0f} s left"
        if self._num_failed:
            text += f", {self._num_failed:,} failed"
        return text


def _work(line: bytes, index: int) -> LineRequest:
    """What a line asks. Raises BadLine."""
    try:
        fields = json.loads(line)
    except ValueError as exc:
        raise BadLine(f"this line cannot be read: {exc}") from exc
    if not isinstance(fields, dict):
        raise BadLine("this line is no JSON object")
    if "body" in fields:
        path = fields.get("url") or PATHS[0]
        if path not in PATHS:
            raise BadLine(f"url is {path!r}; allowed: {', '.join(PATHS)}", fields.get("custom_id"))
        return OPENAI.work(line, path)
    custom_id = str(fields.pop("custom_id", f"line-{index}"))
    asked = [name for name in PLAIN if name in fields]
    if len(asked) != 1:
        raise BadLine("one of body, messages, prompt and input is expected", custom_id)
    return LineRequest(custom_id, PLAIN[asked[0]], fields)


def _custom_id(line: bytes) -> str:
    with suppress(ValueError, AttributeError):
        return str(json.loads(line).get("custom_id"))
    return ""
