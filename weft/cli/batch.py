"""The verb `batch`: answer the lines of a file by a running server, in the background.

    weft batch run requests.jsonl --output answers.jsonl

Lines are those of OpenAI's batches, or plain ones with `messages`, `prompt` or `input`; a plain
line without a `custom_id` is called by its number. How lines are read and written, over any number
of runs: `batches/file_run.py`.
"""

from __future__ import annotations

import http.client
import json
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from weft.batches.file_run import EndedLine, FileRun, Job, ResultFiles, num_lines
from weft.batches.forms.openai import OPENAI, PATHS, check_line
from weft.batches.forms.protocol import BadLine, LineRequest, RouteAnswer
from weft.batches.line_file import lines_of
from weft.batches.tries import Tries
from weft.cli.ctl.run import DEFAULT_URL
from weft.cli.remote import ANSWER_TIMEOUT_S, RemoteServer, served_models
from weft.config.options import Command, SettingsError, asked_help, did_you_mean, option
from weft.json_types import JsonObject

ABOUT = "Answer the lines of a file by a running server, in the background."
# The routes of plain lines, by the field that says what is asked.
PLAIN = {"messages": PATHS[0], "prompt": PATHS[1], "input": PATHS[2]}


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
    kind = RequestLines()
    results = ResultFiles(Path(options.output), kind)
    run = FileRun(lines_of(source), num_lines(source), kind, results)
    return run.run(Asking(options, server, model).answers)


class RequestLines:
    """Lines of requests, and their results in the form of OpenAI's batches."""

    def read(self, line: bytes, number: int) -> LineRequest:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as exc:
            raise BadLine(f"this line cannot be read: {exc}") from exc
        if not isinstance(fields, dict):
            raise BadLine("this line is no JSON object")
        if "body" in fields:
            path = fields.get("url") or PATHS[0]
            if path not in PATHS:
                allowed = ", ".join(PATHS)
                raise BadLine(f"url is {path!r}; allowed: {allowed}", fields.get("custom_id"))
            return OPENAI.work(line, path)
        custom_id = str(fields.pop("custom_id", f"line-{number}"))
        asked = [name for name in PLAIN if name in fields]
        if len(asked) != 1:
            raise BadLine("one of body, messages, prompt and input is expected", custom_id)
        check_line(custom_id, fields)
        return LineRequest(custom_id, PLAIN[asked[0]], fields)

    def name(self, work: LineRequest, number: int) -> str:
        return work.custom_id

    def name_of(self, result: JsonObject) -> str | None:
        name = result.get("custom_id")
        return name if isinstance(name, str) and "response" in result else None

    def bad(self, number: int, error: BadLine) -> JsonObject:
        return OPENAI.ended(f"line-{number}", error.custom_id, "invalid", str(error)).fields


def _code_of(answer: JsonObject) -> str:
    """The code of the error in the answer to a request; "" if it has none."""
    error = answer.get("error")
    if not isinstance(error, dict):
        return ""
    return str(error.get("code"))


class Asking:
    """Asks the server from threads, `open_lines` at once. `model`: of lines that name none."""

    def __init__(self, options: BatchOptions, server: RemoteServer, model: str) -> None:
        self._options = options
        self._server = server
        self._model = model
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._ended: SimpleQueue[EndedLine] = SimpleQueue()
        self._is_stopped = threading.Event()

    def answers(self, jobs: Iterator[Job]) -> Iterator[EndedLine]:
        """The results of all jobs, as they come. Left early, no thread asks for more."""
        most = self._options.open_lines
        threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(most)]
        for thread in threads:
            thread.start()
        num_open = 0
        try:
            for job in jobs:
                self._jobs.put(job)
                num_open += 1
                while num_open >= 2 * most:
                    num_open -= 1
                    yield self._ended.get()
            while num_open:
                num_open -= 1
                yield self._ended.get()
        finally:
            self._is_stopped.set()
            for _ in threads:
                self._jobs.put(None)

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
            self._ended.put(EndedLine([written.fields], written.is_error))

    def _answer(self, connection: http.client.HTTPConnection, work: LineRequest) -> RouteAnswer:
        body = {"model": self._model, **work.body}
        if not self._options.online:
            body["service_tier"] = "flex"
        encoded = json.dumps(body).encode()
        tries = Tries()
        while True:
            answer = self._once(connection, work.path, encoded)
            wait_s = tries.wait_s(answer.status, answer.code)
            if wait_s is None or self._is_stopped.is_set():
                return answer
            self._is_stopped.wait(wait_s)

    def _once(self, connection: http.client.HTTPConnection, path: str, body: bytes) -> RouteAnswer:
        try:
            path = self._server.path + path
            connection.request("POST", path, body, self._server.headers)
            response = connection.getresponse()
            fields = json.loads(response.read())
            if not isinstance(fields, dict):
                raise ValueError("the answer is no JSON object")
            rid = response.getheader("x-request-id", "")
            return RouteAnswer(response.status, fields, rid, _code_of(fields))
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as exc:
            connection.close()  # the next request opens it again
            message = f"the connection to {self._server.address} broke: {exc}"
            return RouteAnswer(502, {"error": {"message": message}}, "")
