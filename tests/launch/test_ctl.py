"""`weft ctl`: what it sends and prints, how it ends; and that it and docs/guides/control.md know
every control request."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.server.fake import running
from weft.cli import main as cli
from weft.cli.ctl.command import arguments_of
from weft.cli.ctl.table import COMMANDS
from weft.cli.readable import readable
from weft.config.server import ServerConfig
from weft.messages import codec
from weft.messages.calls import ControlRequest
from weft.messages.requests import GenerateRequest
from weft.server.admin.models import ModelBody
from weft.server.app import OPERATIONS

DOCUMENT = Path(__file__).parents[2] / "docs" / "guides" / "control.md"
WITHOUT_MESSAGE = {"GET /state"}  # answered by the front
WITHOUT_COMMAND = {"GET /events"}  # what a page in a browser listens to, without an end


class Listener:
    """A server that keeps what it is asked, and answers what it is told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        self.keys: list[str | None] = []
        self.kinds: list[str | None] = []
        self.status, self.answer = 200, b"{}"
        self.kind = "application/json"
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                outer.asked.append((self.command, self.path, json.loads(body) if body else None))
                outer.keys.append(self.headers.get("authorization"))
                outer.kinds.append(self.headers.get("content-type"))
                self.send_response(outer.status)
                self.send_header("content-type", outer.kind)
                self.send_header("content-length", str(len(outer.answer)))
                self.end_headers()
                self.wfile.write(outer.answer)

            do_POST = do_GET
            do_DELETE = do_GET

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def say(self, answer: Any, status: int = 200) -> None:
        self.answer, self.status = json.dumps(answer).encode(), status

    def ctl(self, *words: str) -> int:
        return cli.main(["ctl", *words, "--url", self.url])


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    for name in ("WEFT_URL", "WEFT_ADMIN_API_KEY", "WEFT_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    listener = Listener()
    yield listener
    listener.close()


REQUESTS = [
    ("flush-cache", "POST", "/flush_cache", {}),
    ("flush-cache --timeout 2.5", "POST", "/flush_cache?timeout=2.5", {}),
    ("cache show", "GET", "/cache", None),
    ("cache clear", "POST", "/cache/clear", {}),
    ("cache save --timeout 3", "POST", "/cache/save?timeout=3.0", {}),
    (
        "cache pin text --ttl 60 --name system --tenant a --cache-salt b",
        "POST",
        "/cache/pin",
        {"prompt": "text", "ttl_s": 60.0, "name": "system", "tenant": "a", "cache_salt": "b"},
    ),
    (
        'cache pin --messages [{"role":"user","content":"a"}]',
        "POST",
        "/cache/pin",
        {"messages": [{"role": "user", "content": "a"}]},
    ),
    ("cache unpin system", "DELETE", "/cache/pin/system", {}),
    ("cache prefix 7", "GET", "/cache/prefix?node=7", None),
    (
        "cache forget text --keep 64 --cache-salt b",
        "POST",
        "/cache/forget",
        {"prompt": "text", "keep": 64, "cache_salt": "b"},
    ),
    ("models load small", "POST", "/models/load", {"model": "small"}),
    ("models unload small", "POST", "/models/unload", {"model": "small"}),
    ("flush-cache --model small", "POST", "/flush_cache?model=small", {}),
    ("cache prefix 7 --model a/b", "GET", "/cache/prefix?node=7&model=a%2Fb", None),
    ("abort my-request", "POST", "/abort_request", {"rid": "my-request"}),
    ("abort --all", "POST", "/abort_request", {"abort_all": True}),
    ("pause", "POST", "/pause_generation", {}),
    ("pause --mode retract", "POST", "/pause_generation", {"mode": "retract"}),
    ("continue", "POST", "/continue_generation", {}),
    ("block", "POST", "/block", {}),
    ("unblock", "POST", "/unblock", {}),
    ("unblock --ramp-s 30", "POST", "/unblock?ramp_s=30.0", {}),
    ("set-policy lpm", "POST", "/set_policy", {"policy": "lpm"}),
    ("audit", "POST", "/audit", {}),
    ("experts start", "POST", "/start_expert_distribution_record", {}),
    ("experts stop", "POST", "/stop_expert_distribution_record", {}),
    ("state get", "GET", "/get_internal_state", None),
    ("state show", "GET", "/state", None),
    ("state prune 3600", "POST", "/state/prune", {"older_than_s": 3600.0}),
    ("state clear", "POST", "/state/clear", {}),
    (
        "state set max_running_requests=8 schedule_policy=lpm mixed_chunk=true schedule_conservativeness=0.5",
        "POST",
        "/set_internal_state",
        {
            "server_args": {
                "max_running_requests": 8,
                "schedule_policy": "lpm",
                "mixed_chunk": True,
                "schedule_conservativeness": 0.5,
            }
        },
    ),
    ("profile start", "POST", "/start_profile", {}),
    (
        "profile start --num-steps 5 --activities CPU,GPU --with-stack --output-dir a --prefix b",
        "POST",
        "/start_profile",
        {
            "num_steps": 5,
            "activities": ["CPU", "GPU"],
            "with_stack": True,
            "output_dir": "a",
            "profile_prefix": "b",
        },
    ),
    ("slow-down 0.5", "POST", "/slow_down", {"forward_sleep_time": 0.5}),
    ("slow-down off", "POST", "/slow_down", {"forward_sleep_time": None}),
    ("freeze-gc", "POST", "/freeze_gc", {}),
    ("logging --log-requests on", "POST", "/configure_logging", {"log_requests": True}),
    ("logging --log-requests off", "POST", "/configure_logging", {"log_requests": False}),
    ("logging --log-level debug", "POST", "/configure_logging", {"log_level": "debug"}),
    ("loads", "GET", "/v1/loads", None),
    ("requests --limit 5", "GET", "/requests?limit=5", None),
    ("rpc echo", "POST", "/rpc", {"method": "echo"}),
    ('rpc echo --params {"a":[1]}', "POST", "/rpc", {"method": "echo", "params": {"a": [1]}}),
    (
        "sessions open s --capacity 9 --timeout 60",
        "POST",
        "/open_session",
        {"session_id": "s", "capacity": 9, "timeout": 60.0},
    ),
    ("sessions open", "POST", "/open_session", {}),
    ("sessions close s", "POST", "/close_session", {"session_id": "s"}),
    (
        "adapters load sql a/b --pinned",
        "POST",
        "/load_lora_adapter",
        {"lora_name": "sql", "lora_path": "a/b", "pinned": True},
    ),
    ("adapters unload sql", "POST", "/unload_lora_adapter", {"lora_name": "sql"}),
    ("weights update a/b", "POST", "/update_weights_from_disk", {"model_path": "a/b"}),
    (
        "weights update a --weight-version v2 --abort-all",
        "POST",
        "/update_weights_from_disk",
        {"model_path": "a", "weight_version": "v2", "abort_all_requests": True},
    ),
    (
        "weights join host 4000 1 2 --backend gloo",
        "POST",
        "/init_weights_update_group",
        {
            "master_address": "host",
            "master_port": 4000,
            "rank_offset": 1,
            "world_size": 2,
            "backend": "gloo",
        },
    ),
    (
        "weights receive a,b float32,bfloat16 [[2,3],[4]]",
        "POST",
        "/update_weights_from_distributed",
        {"names": ["a", "b"], "dtypes": ["float32", "bfloat16"], "shapes": [[2, 3], [4]]},
    ),
    ("weights leave --group-name g", "POST", "/destroy_weights_update_group", {"group_name": "g"}),
    (
        "weights get w --truncate-size 3",
        "POST",
        "/get_weights_by_name",
        {"name": "w", "truncate_size": 3},
    ),
    (
        "memory release weights kv_cache",
        "POST",
        "/release_memory_occupation",
        {"tags": ["weights", "kv_cache"]},
    ),
    ("memory resume", "POST", "/resume_memory_occupation", {}),
]


@pytest.mark.parametrize(
    ("line", "method", "path", "body"), REQUESTS, ids=[line[0] for line in REQUESTS]
)
def test_a_command_is_one_request(
    listener: Listener, line: str, method: str, path: str, body: Any
) -> None:
    assert listener.ctl(*line.split()) == 0
    assert listener.asked == [(method, path, body)]


def test_stories_are_asked_for_by_name_and_printed_as_they_read(
    listener: Listener, capsys: pytest.CaptureFixture[str]
) -> None:
    one = {
        "id": 3,
        "rid": "a/b c",
        "state": "waiting",
        "position": 14,
        "prompt_tokens": 3_100,
        "cached_tokens": 0,
        "output_tokens": 0,
        "retractions": 0,
        "text": ["0.2 s  step 812-930, 118 times: waits: no KV memory"],
    }
    listener.say({"requests": [one]})
    assert listener.ctl("explain", "a/b c") == 0
    assert listener.asked == [("GET", "/requests/a%2Fb%20c", None)]
    out = capsys.readouterr().out
    assert "a/b c (request 3): waiting, 14 before it\n" in out
    assert "\n  0.2 s  step 812-930, 118 times: waits: no KV memory\n" in out


def test_a_file_is_sent_as_it_is(
    listener: Listener, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "w").write_bytes(b'{"raw": 1}')
    assert (
        listener.ctl(
            "weights", "send", str(tmp_path / "w"), "--weight-version", "v2", "--abort-all"
        )
        == 0
    )
    path = "/update_weights_from_tensor?weight_version=v2&abort_all_requests=true"
    assert listener.asked == [("POST", path, {"raw": 1})]
    assert listener.kinds == ["application/octet-stream"]
    assert listener.ctl("weights", "send", str(tmp_path / "none")) == 2
    assert "a safetensors file here" in capsys.readouterr().err


def test_weights_version_prints_only_the_version(
    listener: Listener, capsys: pytest.CaptureFixture[str]
) -> None:
    listener.say({"weight_version": "v2", "vocab_size": 9})
    assert listener.ctl("weights", "version") == 0
    assert capsys.readouterr().out == "v2\n"


def test_the_table_of_a_profile_is_printed_as_it_is(
    listener: Listener, capsys: pytest.CaptureFixture[str]
) -> None:
    listener.say({"num_steps": 3, "trace": None, "table": "Name      Calls\naten::mm      9"})
    assert listener.ctl("profile", "stop") == 0
    assert capsys.readouterr().out == (
        "3 steps recorded; trace: none (no --profile-dir)\nName      Calls\naten::mm      9\n"
    )


def test_the_key_comes_from_the_option_or_the_environment(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener.ctl("audit")
    monkeypatch.setenv("WEFT_API_KEY", "user")
    listener.ctl("audit")
    monkeypatch.setenv("WEFT_ADMIN_API_KEY", "admin")
    listener.ctl("audit")
    listener.ctl("audit", "--admin-key", "given")
    cli.main(["ps", "--json", "--url", listener.url, "--admin-key", "given"])
    assert listener.keys == [None, "Bearer user", "Bearer admin", *2 * ["Bearer given"]]


def test_a_refusal_of_the_server_ends_with_1_and_its_reason(
    listener: Listener, capsys: pytest.CaptureFixture[str]
) -> None:
    listener.say({"error": {"message": "3 requests are running"}}, 400)
    assert listener.ctl("flush-cache") == 1
    listener.say({"error": {"message": "Not Found"}}, 404)
    assert listener.ctl("sessions", "open") == 1
    listener.say({"error": {"message": "the model 'x' does not exist"}}, 404)
    assert listener.ctl("models", "load", "x") == 1
    listener.say({"error": {"message": "the key is wrong"}}, 401)
    assert listener.ctl("requests") == 1
    assert capsys.readouterr() == (
        "",
        "weft: 3 requests are running\nweft: this server has no POST /open_session (Not Found)\n"
        "weft: the model 'x' does not exist\n"
        "weft: the key is wrong; --admin-key KEY or WEFT_ADMIN_API_KEY gives one\n",
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("flush", "weft ctl: there is no command 'flush'; did you mean flush-cache?"),
        ("state", "one of state get, state set, state show, state prune, state clear is expected"),
        ("state set", "NAME=VALUE"),
        ("state set x", "name=value is 'x'"),
        ("set-policy", "POLICY"),
        ("flush-cache --timeout soon", "--timeout is 'soon'; expected is: seconds"),
        ("slow-down fast", "seconds is 'fast'; expected is: a number of seconds, or off"),
        ("state prune nan", "older_than_s is 'nan'; expected is: seconds since their last use"),
        ("state prune 1e400", "older_than_s is '1e400'; expected is: seconds since their last use"),
        ("logging --log-requests maybe", "--log-requests is 'maybe'"),
        ("audit now", "now"),
        ("audit --speed 3", "--speed"),
        ("rpc echo --params {", "--params is '{'"),
    ],
)
def test_invalid_arguments_end_with_2_and_are_not_sent(
    listener: Listener, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    assert listener.ctl(*line.split()) == 2
    assert listener.asked == []
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_an_address_where_no_server_is_ends_with_2(
    capsys: pytest.CaptureFixture[str], listener: Listener
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        assert (
            cli.main(["ctl", "loads", "--url", f"http://127.0.0.1:{nobody.getsockname()[1]}"]) == 2
        )
    assert cli.main(["ctl", "loads", "--url", "ftp://x"]) == 2
    listener.answer = b"<html>"
    assert listener.ctl("loads") == 2
    listener.answer = b'{"data": ["models of another server"]}'
    assert listener.ctl("models", "loaded") == 2
    errors = capsys.readouterr().err.splitlines()
    assert "no server answers at" in errors[0]
    assert "--url is 'ftp://x'" in errors[1]
    assert "is not a weft server" in errors[2]
    assert errors[3] == errors[2]


def test_help_lists_every_command_and_explains_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ctl", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {verb.words} " in out for verb in COMMANDS)
    for verb in COMMANDS:
        assert cli.main(["ctl", *verb.words.split(), "--help"]) == 0
        out = capsys.readouterr().out
        assert verb.help in out
        assert all(argument.help in " ".join(out.split()) for argument in arguments_of(verb))
    assert cli.main(["ctl", "models", "--help"]) == 0
    assert "weft ctl models unload " in capsys.readouterr().out


def test_answers_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    answer = {
        "free": 5,
        "is_full": False,
        "chunked_rid": None,
        "usage": 0.25,
        "faults": ["page 7 is owned by nobody", "page \x1b[31m8"],
        "none_at_all": [],
        "queue": {"waiting": 1_500},
        "requests": [{"rid": "a", "age_s": 1.5}, {"rid": "long-name", "age_s": 22.25}],
    }
    assert list(readable(answer)) == [
        "free         5",
        "is_full      no",
        "chunked_rid  -",
        "usage        0.25",
        "faults",
        "  page 7 is owned by nobody",
        "  page ?[31m8",
        "none_at_all: none",
        "queue",
        "  waiting  1500",
        "requests",
        "  rid        age_s",
        "  a          1.5",
        "  long-name  22.25",
    ]


def test_a_real_server_is_controlled(
    capsys: pytest.CaptureFixture[str], listener: Listener
) -> None:
    with running(ServerConfig(drain_s=1.0, admin_api_key="secret")) as server:

        def ctl(*words: str) -> tuple[int, str, str]:
            status = cli.main(["ctl", *words, "--url", server.url, "--admin-key", "secret"])
            return status, *capsys.readouterr()

        assert ctl("flush-cache", "--timeout", "1") == (0, "Cache flushed.\n", "")
        server.engine.busy = True
        assert ctl("flush-cache") == (1, "", "weft: busy\n")
        assert ctl("abort", "--all") == (0, "aborted  0\n", "")
        assert ctl("abort")[0] == 1
        status, out, _ = ctl("loads", "--json")
        assert (status, json.loads(out)["loads"][0]["max_total_num_tokens"]) == (0, 8_000)
        assert cli.main(["ctl", "audit", "--url", server.url, "--admin-key", "wrong"]) == 1


# Nothing is forgotten


def table() -> list[list[str]]:
    """The rows of the table of control requests: message, method and route, command, effect,
    answers."""
    lines = [
        line
        for line in DOCUMENT.read_text("utf-8").splitlines()
        if line.startswith(("| `", "| – | `"))
    ]
    rows = [[cell.strip().strip("`") for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in rows if len(row) == 5]


def routes_of_administration() -> set[str]:
    """But for those that are there under the name of another server, too, and Ollama's on the store
    of models, where `weft pull`, `cp` and `rm` do it without a server."""
    admin = [one for one in OPERATIONS if one.access == "admin"]
    own = [one for one in admin if not re.search(r"\((vLLM|Ollama)\)", one.summary)]
    return {f"{one.method} {re.sub(r':path}', '}', one.path)}" for one in own}


def test_every_control_request_is_in_the_table_and_has_a_command() -> None:
    assert len(table()) >= 18
    assert not routes_of_administration() - {row[1] for row in table()}
    commands = {f"{verb.method} {verb.route}" for verb in COMMANDS}
    assert routes_of_administration() - commands == WITHOUT_COMMAND


def test_every_row_of_the_table_is_true() -> None:
    commands = {verb.words: f"{verb.method} {verb.route}" for verb in COMMANDS}
    routes = {f"{one.method} {re.sub(r':path}', '}', one.path)}" for one in OPERATIONS}
    known = {kind.__name__ for kind in codec.REQUESTS.values()}
    known |= {ControlRequest.__name__, GenerateRequest.__name__, ModelBody.__name__}
    for message, route, command, effect, answers in table():
        assert route in routes
        if command == "–":
            assert route in WITHOUT_COMMAND
        else:
            assert commands[command] == route
        assert message in known or (message == "–" and route in WITHOUT_MESSAGE)
        assert effect
        assert answers


def test_commands_have_names_of_their_own() -> None:
    assert len({verb.words for verb in COMMANDS}) == len(COMMANDS)
    tried = {
        verb.words for verb in COMMANDS for line, *_ in REQUESTS if line.startswith(verb.words)
    }
    assert {verb.words for verb in COMMANDS} - tried == {
        "cache tree",
        "experts dump",
        "experts show",
        "explain",
        "models list",
        "models loaded",
        "profile stop",
        "why",
        "weights send",
        "weights version",
    }
