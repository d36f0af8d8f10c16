"""`weft batch run`: each line of a file gets one answer, over any number of runs."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.server.fake import HANG_S, RunningServer, running
from weft.batches.file_run import ResultFiles
from weft.batches.line_file import LineFile
from weft.cli.batch import Asking, BatchOptions, RequestLines
from weft.cli.main import main
from weft.cli.remote import RemoteServer
from weft.config.options import SettingsError

NUM_LINES = 60
RUN = "import sys; from weft.cli.main import main; main(sys.argv[1:])"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running() as found:
        yield found


def write_lines(path: Path, num: int = NUM_LINES) -> None:
    lines: list[object] = []
    for index in range(num):
        messages = [{"role": "user", "content": f"{index}"}]
        match index % 3:
            case 0:
                body = {"messages": messages, "max_tokens": 3}
                lines.append({"custom_id": f"c{index}", "method": "POST", "body": body})
            case 1:
                lines.append({"custom_id": f"c{index}", "messages": messages, "max_tokens": 3})
            case _:
                lines.append({"prompt": f"{index}", "max_tokens": 3})
    path.write_text("\n".join(map(json.dumps, lines)))


def ids(path: Path) -> Counter[str]:
    return Counter(json.loads(line)["custom_id"] for line in path.read_text().splitlines())


def expected(num: int = NUM_LINES) -> Counter[str]:
    return Counter(f"line-{i}" if i % 3 == 2 else f"c{i}" for i in range(num))


def test_lines_of_both_kinds_are_answered_in_the_background(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in"
    output = tmp_path / "out"
    write_lines(source)
    server.reset()
    arguments = ["batch", "run", str(source), "--url", server.url, "--output"]
    assert main([*arguments, str(output)]) == 0
    assert ids(output) == expected()
    assert all(one.background for one in server.engine.seen)
    assert "60 of 60 lines" in capsys.readouterr().err
    # Nothing is asked again.
    assert main([*arguments, str(output)]) == 0
    assert len(server.engine.seen) == NUM_LINES
    assert "a second" not in capsys.readouterr().err
    assert ids(output) == expected()
    assert main([*arguments, str(tmp_path / "again"), "--online", "on"]) == 0
    assert not server.engine.seen[-1].background


def test_lines_that_cannot_be_answered_are_apart_and_tried_again(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in"
    output = tmp_path / "out"
    good = {"custom_id": "good", "prompt": "a", "max_tokens": 2}
    wrong = {"custom_id": "wrong", "prompt": "a", "max_tokens": -7}
    source.write_text("\n".join([json.dumps(good), "nonsense", json.dumps(wrong), "[]"]))
    arguments = ["batch", "run", str(source), "--output", str(output), "--url", server.url]
    for _ in range(2):
        assert main(arguments) == 1
        assert ids(output) == Counter(["good"])
        errors = (tmp_path / "out.errors").read_text().splitlines()
        assert len(errors) == 3
        assert sum("max_tokens" in line for line in errors) == 1
        assert f"3 failed; why is in {output}.errors" in capsys.readouterr().err


def test_lines_that_ask_for_nothing_that_can_be_written_are_told_so(
    server: RunningServer, tmp_path: Path
) -> None:
    source = tmp_path / "in"
    output = tmp_path / "out"
    stream = {"custom_id": "s", "prompt": "a", "stream": True}
    source.write_text("\n".join([json.dumps(stream), "[" * 100_000]))
    server.reset()
    assert main(["batch", "run", str(source), "--output", str(output), "--url", server.url]) == 1
    errors = (tmp_path / "out.errors").read_text()
    assert "stream is true" in errors
    assert "cannot be read" in errors
    assert not server.engine.seen


@pytest.mark.parametrize("text", ["notes\n", "no line at all", '{"other": 1}\n'])
def test_a_file_with_anything_else_than_results_stays_as_it_is(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    source = tmp_path / "in"
    output = tmp_path / "out"
    write_lines(source)
    output.write_text(text)
    assert main(["batch", "run", str(source), "--output", str(output), "--url", server.url]) == 2
    assert output.read_text() == text
    assert "results" in capsys.readouterr().err


def test_a_run_that_is_killed_goes_on(server: RunningServer, tmp_path: Path) -> None:
    source = tmp_path / "in"
    output = tmp_path / "out"
    num_lines = 300
    write_lines(source, num_lines)
    rng = random.Random(3)
    words = ["batch", "run", str(source), "--output", str(output), "--url", server.url]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(4):
        size = output.stat().st_size if output.exists() else 0
        command = [sys.executable, "-c", RUN, *words, "--open-lines", "4"]
        process = subprocess.Popen(command, env=environment)
        deadline = time.monotonic() + HANG_S
        grown = size + rng.randrange(2_000, 20_000)
        while process.poll() is None and time.monotonic() < deadline:
            if output.exists() and output.stat().st_size > grown:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.001)
        process.wait(HANG_S)
    assert main(words) == 0
    assert ids(output) == expected(num_lines)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["runn", "x"], "weft batch has the command run"),
        (["run", "nowhere", "--output", "x"], "nowhere is no file"),
        (["run", "nowhere"], "needs FILE and --output FILE"),
    ],
)
def test_what_cannot_be_run_is_one_line(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["batch", *words]) == 2
    assert why in capsys.readouterr().err


def test_results_need_a_file_in_which_a_run_can_go_on() -> None:
    with pytest.raises(SettingsError, match="--output is /dev/null: no regular file"):
        ResultFiles(Path(os.devnull), RequestLines())


@pytest.mark.parametrize("body", [b"[]", b"[" * 100_000])
def test_an_answer_that_is_no_object_fails_its_line(body: bytes) -> None:
    response = SimpleNamespace(status=200, read=lambda: body)
    connection: Any = SimpleNamespace(
        request=lambda *_: None, getresponse=lambda: response, close=lambda: None
    )
    asking = Asking(BatchOptions(), RemoteServer("127.0.0.1:1"), "m")
    assert asking._once(connection, "/v1/completions", b"{}").status == 502


def test_two_runs_never_write_to_one_file(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in"
    write_lines(source)
    other = LineFile(tmp_path / "out")
    arguments = ["batch", "run", str(source), "--output", str(tmp_path / "out")]
    assert main([*arguments, "--url", server.url]) == 2
    assert "another run writes to it" in capsys.readouterr().err
    other.close()
