"""The lines of one file, answered over any number of runs.

    file of lines -> jobs -> whoever answers -> lines of results, appended -> file of results

A result is a whole line, written when its line is answered, so a run that was stopped in any way
goes on where it was: what is in the file of results is not asked again. Lines that could not be
answered are in a file of errors beside it, and the next run tries them again. This module does not
know who answers: a server (`weft batch run`), or a model in this process (`weft generate`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from weft.batches.forms.protocol import BadLine
from weft.batches.line_file import LineFile, lines_of
from weft.config.options import SettingsError
from weft.json_types import JsonObject
from weft.observe.progress import Progress

STOPPED = 130  # exit status, as of an interrupted program


class Job(NamedTuple):
    number: int  # of the line, from 0
    work: Any  # what its kind reads


class EndedLine(NamedTuple):
    """The results of one line, which are written together."""

    lines: list[JsonObject]
    is_error: bool
    num_tokens: int = 0


class LineKind(Protocol):
    """How lines are read, and how their results are known again."""

    def read(self, line: bytes, number: int) -> Any:
        """What a line asks for. Raises BadLine."""
        ...

    def name(self, work: Any, number: int) -> str:
        """By which its results are known."""
        ...

    def name_of(self, result: JsonObject) -> str | None:
        """The name of the line of which this is a result; None: it is no result."""
        ...

    def bad(self, number: int, error: BadLine) -> JsonObject:
        """The result of a line that asks for nothing."""
        ...


Answer = Callable[[Iterator[Job]], Iterator[EndedLine]]


class Results(Protocol):
    """Where results go."""

    done: set[str]  # names of lines whose results are there
    errors: str  # where those of failed lines are; "": among the others

    def write(self, ended: EndedLine) -> None: ...

    def close(self) -> None: ...


class ResultFiles:
    """A file of results, and one of errors beside it."""

    def __init__(self, output: Path, kind: LineKind) -> None:
        """Raises SettingsError if they cannot be written, or hold something else."""
        if output.exists() and not output.is_file():
            raise SettingsError(
                f"--output is {output}: no regular file, so no run could go on in it"
            )
        try:
            self.done = _names_in(output, kind) if output.exists() else set()
            self._output = LineFile(output)
        except BlockingIOError as exc:
            raise SettingsError(f"--output is {output}: another run writes to it") from exc
        except OSError as exc:
            raise SettingsError(f"--output is {output}: {exc.strerror}") from exc
        errors = output.with_name(output.name + ".errors")
        self.errors = str(errors)
        try:
            errors.unlink(missing_ok=True)  # these lines are tried again
            self._errors = LineFile(errors)
        except OSError as exc:
            raise SettingsError(f"{errors} cannot be written: {exc.strerror or exc}") from exc

    def write(self, ended: EndedLine) -> None:
        """Raises SettingsError if the disk takes nothing."""
        file = self._errors if ended.is_error else self._output
        lines = [json.dumps(line, ensure_ascii=False).encode() for line in ended.lines]
        try:
            file.append(lines)
        except OSError as exc:
            raise SettingsError(f"{file.path} could not be written: {exc.strerror}") from exc

    def close(self) -> None:
        for file in (self._output, self._errors):
            file.flush()
            file.close()


class FileRun:
    """One run over a file of lines. `num_lines` 0: not known."""

    def __init__(
        self, lines: Iterator[bytes], num_lines: int, kind: LineKind, results: Results
    ) -> None:
        self._lines = lines
        self._kind = kind
        self._results = results
        self._progress = Progress(num_lines, num_before=len(results.done), of="line")

    def run(self, answer: Answer) -> int:
        """Returns the exit status: 1 if a line could not be answered, 130 if it was stopped."""
        try:
            for ended in answer(self._jobs()):
                self._end(ended)
        except KeyboardInterrupt:
            self._progress.close("stopped; the same command goes on")
            return STOPPED
        finally:
            self._results.close()
        if not self._progress.num_failed:
            self._progress.close()
            return 0
        errors = self._results.errors
        self._progress.close(f"why is in {errors}" if errors else "")
        return 1

    def _jobs(self) -> Iterator[Job]:
        """The lines that are to be answered. What asks for nothing ends at once."""
        taken: set[str] = set()
        for number, line in enumerate(self._lines):
            try:
                work = self._kind.read(line, number)
                name = self._kind.name(work, number)
                if name in taken:
                    raise BadLine("custom_id is that of an earlier line", name)
            except BadLine as exc:
                self._end(EndedLine([self._kind.bad(number, exc)], is_error=True))
                continue
            taken.add(name)
            if name not in self._results.done:
                yield Job(number, work)

    def _end(self, ended: EndedLine) -> None:
        self._results.write(ended)
        self._progress.add(ended.num_tokens, failed=ended.is_error)


def num_lines(path: Path) -> int:
    return sum(1 for _ in lines_of(path))


def _names_in(output: Path, kind: LineKind) -> set[str]:
    """The names of the lines whose results are in a file. Raises SettingsError if it holds
    something else, which would be lost or mixed up with results."""
    names: set[str] = set()
    text = output.read_bytes()
    *whole, rest = text.split(b"\n")
    for number, line in enumerate(whole, 1):
        if not line.strip():
            continue
        name = _name_in(line, kind)
        if name is None:
            raise SettingsError(
                f"{output} has other lines than results, the first is line {number}"
            )
        names.add(name)
    # A run that was killed has left the beginning of a result, which is cut off.
    if rest and not rest.startswith(b'{"'):
        raise SettingsError(f"{output} has no results; another --output keeps what it has")
    return names


def _name_in(line: bytes, kind: LineKind) -> str | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return kind.name_of(found) if isinstance(found, dict) else None
