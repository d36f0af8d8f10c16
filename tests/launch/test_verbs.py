"""`weft generate` and `weft chat` with everything real but the model or the terminal."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Generator, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.launch.oracle_llm import oracle_llm
from tests.launch.server_process import ServerProcess
from tests.launch.tiny_model import write_tiny_model
from weft.cli import generate
from weft.cli import main as cli
from weft.cli.chat import LocalChatBackend, TerminalChat
from weft.cli.chat_backend import ChatError
from weft.cli.remote import RemoteChatBackend
from weft.client.aux_outputs import PromptToken
from weft.config.options import SettingsError
from weft.llm import LLM
from weft.messages.replies import TokenLogprobs
from weft.messages.sampling import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def llm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """The LLM that the verbs get."""
    llm, _ = oracle_llm(folder)
    monkeypatch.setattr(LLM, "of", lambda config: llm)
    return llm


def test_prompt_on_the_command_line_is_completed_on_standard_output(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", "--prompt", "Hi", "--max-tokens", "5", "--temperature", "0"]) == 0
    (output,) = llm.generate("Hi", SamplingParams(max_new_tokens=5, temperature=0))
    assert capsys.readouterr().out == output.text + "\n"


def test_prompt_as_a_message(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(
            ["generate", "--chat", "--prompt", "Hi", "--max-tokens", "5", "--temperature", "0"]
        )
        == 0
    )
    (output,) = llm.chat(
        [{"role": "user", "content": "Hi"}], SamplingParams(max_new_tokens=5, temperature=0)
    )
    assert capsys.readouterr().out == output.text + "\n"


def test_prompt_that_is_too_long_is_the_users_error(
    llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", "--prompt", "x" * 300]) == 2
    assert capsys.readouterr().err.startswith("weft: the prompt has 300 tokens")


def test_lines_are_completed_with_their_own_parameters(llm: LLM, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    target = tmp_path / "out.jsonl"
    lines: list[dict[str, Any]] = [
        {"id": "a", "prompt": "Hi", "max_tokens": 3},
        {"id": 7, "messages": [{"role": "user", "content": "Hi"}]},
        {"input_ids": [1, 2], "n": 2},
    ]
    source.write_text("\n\n".join(map(json.dumps, lines)))
    options = ["--max-tokens", "5", "--temperature", "0"]
    assert cli.main(["generate", "--input", str(source), "--output", str(target), *options]) == 0
    written = [json.loads(line) for line in target.read_text().splitlines()]
    assert sorted(
        (line["index"], line.get("id"), line["completion_tokens"]) for line in written
    ) == [
        (0, "a", 3),
        (1, 7, 5),
        (2, None, 5),
        (2, None, 5),
    ]


def test_lines_that_are_completed_are_not_asked_again(llm: LLM, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    words = ["generate", "--input", str(source), "--output", str(target), "--max-tokens", "3"]
    lines = [json.dumps({"id": str(number), "prompt": "Hi"}) for number in range(3)]
    source.write_text("\n".join([*lines[:2], "nonsense"]))
    assert cli.main(words) == 1
    first = target.read_text()
    assert first.count("\n") == 2
    assert "cannot be read" in (tmp_path / "out.jsonl.errors").read_text()
    # It was killed in the middle of a line, and its bad line is mended.
    target.write_text(first[:-9])
    source.write_text("\n".join(lines))
    assert cli.main(words) == 0
    written = [json.loads(line) for line in target.read_text().splitlines()]
    assert sorted(line["id"] for line in written) == ["0", "1", "2"]
    assert target.read_text().startswith(first[: first.index("\n")])
    assert not (tmp_path / "out.jsonl.errors").read_text()


def results_of(target: Path, *words: str) -> tuple[int, str]:
    """The exit status of a run that writes to `target`, and what is there then."""
    status = cli.main(["generate", "--prompt", "Hi", "--output", str(target), *words])
    return status, target.read_text()


@pytest.mark.parametrize(
    "words",
    [["no-such-model"], ["--max-tokens", "none"], ["--input", "none.jsonl"], ["--kv-tokens", "1"]],
    ids=" ".join,
)
def test_a_run_that_fails_leaves_the_results_of_an_earlier_one(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text("results of hours")
    model = [] if words == ["no-such-model"] else [str(folder)]
    status, kept = results_of(target, "--overwrite", *model, *words)
    assert status == 2
    assert kept == "results of hours"
    assert capsys.readouterr().err.startswith("weft: ")


def test_results_are_replaced_only_when_asked(
    llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.txt"
    target.touch()
    status, first = results_of(target, "--max-tokens", "5", "--temperature", "0")
    assert status == 0
    assert first
    assert results_of(target, "--max-tokens", "2") == (2, first)
    assert f"{target} already has {len(first.encode())} bytes; --overwrite" in (
        capsys.readouterr().err
    )
    status, second = results_of(target, "--max-tokens", "2", "--temperature", "0", "--overwrite")
    assert status == 0
    assert second != first


def test_the_file_of_prompts_is_never_the_file_of_results(
    llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = tmp_path / "prompts.jsonl"
    both.write_text('{"prompt": "x"}')
    (tmp_path / "link").symlink_to(both)
    words = ["generate", "--input", str(both), "--output", str(tmp_path / "link"), "--overwrite"]
    assert cli.main(words) == 2
    assert both.read_text() == '{"prompt": "x"}'
    assert "the same file" in capsys.readouterr().err


def test_a_line_may_name_tokens_by_texts(
    llm: LLM, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "x", "max_tokens": 1, "logit_bias": {"7": 100}}')
    assert cli.main(["generate", "--input", str(source)]) == 0
    assert json.loads(capsys.readouterr().out)["finish_reason"] == "length"


def test_a_line_has_the_numbers_that_it_asks_for(llm: LLM) -> None:
    (output,) = llm.generate("x", SamplingParams(max_new_tokens=1, temperature=0))
    asked = replace(
        output,
        token_ids=[7],
        logprobs=[TokenLogprobs(id=0, logprob=-1.0, top_ids=[9], top_logprobs=[-0.5])],
        prompt_logprobs=[PromptToken(token=5)],
    )
    line = generate._line(0, None, asked)
    assert line["logprobs"] == [{"token": 7, "logprob": -1.0, "top": [(9, -0.5)], "of_ids": []}]
    assert [one["token"] for one in line["prompt_logprobs"]] == [5]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("not json", "cannot be read"),
        ("[1]", "not a JSON object"),
        ("{}", "one of prompt, messages and input_ids"),
        ('{"prompt": "x", "input_ids": [1]}', "one of prompt, messages and input_ids"),
        ('{"prompt": 5}', "prompt is 5; a text is needed"),
        (
            '{"prompt": "x", "temprature": 1}',
            "there is no key 'temprature'; did you mean temperature?",
        ),
        ('{"prompt": "x", "temperature": 99}', "temperature is 99"),
        ('{"prompt": "x", "temperature": "hot"}', "temperature is 'hot'; a number is needed"),
        ('{"input_ids": [1, "x"]}', "input_ids[1] is 'x'; a whole number is needed"),
    ],
)
def test_bad_line_fails_alone(
    llm: LLM, capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str, error: str
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(f'{line}\n{{"prompt": "x", "max_tokens": 2}}\n')
    status = cli.main(["generate", "--input", str(source)])
    outputs = sorted(
        (json.loads(text) for text in capsys.readouterr().out.splitlines()),
        key=lambda out: out["index"],
    )
    assert outputs[1]["completion_tokens"] >= 1
    assert status == 1
    assert outputs[0]["finish_reason"] == "error"
    assert error in outputs[0]["error"]


class Echo:
    """Answers with the number of messages; "break" fails, "long" is interrupted after a piece."""

    name = "echo"

    def __init__(self) -> None:
        self.seen: list[list[dict[str, Any]]] = []

    def answer(self, messages: list[dict[str, Any]]) -> Generator[str, None, None]:
        self.seen.append([dict(message) for message in messages])
        if messages[-1]["content"] == "break":
            raise ChatError("broken")
        yield f"{len(messages)} "
        if messages[-1]["content"] == "long":
            raise KeyboardInterrupt
        yield "messages\x1b[2J"


def converse(monkeypatch: pytest.MonkeyPatch, *lines: str, system: str = "") -> Echo:
    echo = Echo()
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
    TerminalChat(echo, system).run()
    return echo


def roles(messages: list[dict[str, Any]]) -> str:
    return " ".join(message["role"][0] for message in messages)


def test_conversation_remembers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    echo = converse(monkeypatch, "one", "", "two", system="be kind")
    assert [roles(seen) for seen in echo.seen] == ["s u", "s u a u"]
    assert "2 messages" in capsys.readouterr().out


def test_answer_cannot_command_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    converse(monkeypatch, "one")
    assert "\x1b" not in capsys.readouterr().out


def test_clear_and_system_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    echo = converse(
        monkeypatch, "one", "/clear", "two", "/system be brief", "three", "/system", "four"
    )
    assert [roles(seen) for seen in echo.seen] == ["u", "u", "s u", "u"]
    assert echo.seen[2][0]["content"] == "be brief"


def test_interrupted_answer_stays_as_far_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    echo = converse(monkeypatch, "long", "two", "/exit", "never")
    assert [message["content"] for message in echo.seen[1]] == ["long", "1 ", "two"]
    assert len(echo.seen) == 2


def test_failed_answer_takes_its_question_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    echo = converse(monkeypatch, "break", "two")
    assert roles(echo.seen[1]) == "u"
    assert "[broken]" in capsys.readouterr().err


def test_local_chat_backend_streams_what_the_model_says(llm: LLM) -> None:
    params = SamplingParams(max_new_tokens=6, temperature=0)
    messages = [{"role": "user", "content": "Hi"}]
    (output,) = llm.chat(messages, params)
    assert "".join(LocalChatBackend(llm, params).answer(messages)) == output.text
    with pytest.raises(ChatError, match="context"):
        list(LocalChatBackend(llm, params).answer([{"role": "user", "content": "x" * 300}]))


def test_remote_chat_backend_streams_from_a_server(folder: Path) -> None:
    with ServerProcess(folder) as server:
        server.wait_ready()
        backend = RemoteChatBackend(f"http://127.0.0.1:{server.port}", "", {"max_tokens": 7})
        assert backend.name == "tiny"
        assert "".join(backend.answer([{"role": "user", "content": "Hi"}])) == "a" * 7
        with pytest.raises(ChatError, match="context"):
            list(backend.answer([{"role": "user", "content": "x" * 300}]))
        server.process.kill()
        server.process.wait()
        with pytest.raises(ChatError, match="connection"):
            list(backend.answer([{"role": "user", "content": "Hi"}]))


class LoadingServer(BaseHTTPRequestHandler):
    """A server whose statuses are listed; the last stays."""

    statuses: ClassVar[list[int]] = []

    def do_GET(self) -> None:
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        body = {"error": {"message": "a key is needed"}}
        if status == 200:
            body = {"data": [{"id": "tiny"}]}
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture
def loading() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), LoadingServer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_chat_waits_for_a_server_that_loads(
    loading: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("weft.cli.remote.LOOK_AGAIN_S", 0.001)
    LoadingServer.statuses = [503, 503, 200]
    assert RemoteChatBackend(loading, "", {}).name == "tiny"
    assert capsys.readouterr().err.count("is not ready yet; waiting") == 1


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (401, "refuses access: a key is needed; --api-key KEY or WEFT_API_KEY gives one"),
        (404, "lists no model: a key is needed"),
    ],
)
def test_a_chat_tells_why_a_server_refuses(loading: str, status: int, text: str) -> None:
    LoadingServer.statuses = [status]
    with pytest.raises(SettingsError, match=text):
        RemoteChatBackend(loading, "", {})
