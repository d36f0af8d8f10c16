"""The front before several servers: where requests go, and what becomes of answers that break
off."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest

from tests.relay.scripted import PROMPT, ScriptedServer, Serving, Stage, serving, staged
from tests.server.fake import HANG_S, eventually
from weft.config.options import Command, SettingsError
from weft.config.relay import RelayConfig, ServerAddress, relay_servers
from weft.relay.pool import RelayPool
from weft.route.policy import RoutedRequest
from weft.server.context import Readiness
from weft.server.limits import refusal_of

BODY = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0.5}


class Pair:
    """A prefill and a decode server, and the front."""

    def __init__(self, stack: ExitStack) -> None:
        self.prefill = ScriptedServer()
        self.decode = ScriptedServer()
        self.decode.pieces = [b'{"text": "an answer"}']
        self.servers = stack.enter_context(serving(self.prefill, self.decode))
        self.stage: Stage = stack.enter_context(
            staged(prefill=self.servers[:1], decode=self.servers[1:])
        )

    def ask(self, path: str = "/v1/completions", **body: object) -> httpx.Response:
        return httpx.post(self.stage.url + path, json=BODY | body, timeout=HANG_S)

    def number(self, name: str) -> float:
        for line in httpx.get(self.stage.url + "/metrics").text.splitlines():
            if line.startswith(f"weft:{name} "):
                return float(line.rpartition(" ")[2])
        raise AssertionError(name)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack)


def test_a_prompt_goes_to_a_prefill_server_and_then_to_a_decode_server(pair: Pair) -> None:
    content = b'{"prompt": "%b", "temperature": 0.50, "stream": true}' % PROMPT.encode()
    headers = {"content-type": "application/json", "authorization": "Bearer k"}
    answer = httpx.post(pair.stage.url + "/generate?a=1", content=content, headers=headers)
    assert answer.json() == {"text": "an answer"}
    (first,) = pair.prefill.bodies
    (second,) = pair.decode.bodies
    assert first == {"prompt": PROMPT, "temperature": 0.5, "stream": False} | {
        "bootstrap_room": second["bootstrap_room"]
    }
    assert second["stream"]
    assert second["bootstrap_host"] == "127.0.0.1"
    assert second["bootstrap_port"] == 7
    assert b'"temperature":0.50' in pair.decode.raw[0]
    for server in (pair.prefill, pair.decode):
        assert server.targets == ["/generate?a=1"]
        assert server.heads[0]["authorization"] == "Bearer k"
        assert server.heads[0]["x-request-id"] == answer.headers["x-request-id"]
        assert server.heads[0]["x-forwarded-for"] == "127.0.0.1"


@pytest.mark.parametrize("fault", ["refused", "lost", "no_server"])
def test_without_a_prefill_server_the_decode_server_gets_the_whole_request(
    pair: Pair, fault: str
) -> None:
    if fault == "refused":
        pair.prefill.status = 503
    elif fault == "lost":
        pair.prefill.pieces = [None]
    else:
        pair.servers[0].stop()
    assert pair.ask().status_code == 200
    assert pair.decode.bodies == [BODY]
    assert pair.number(f'route_alone_total{{reason="{fault}"}}') == 1


def test_a_prefill_server_that_takes_too_long_is_not_waited_for() -> None:
    with ExitStack() as stack:
        servers = stack.enter_context(serving(ScriptedServer(), ScriptedServer()))
        stage = stack.enter_context(
            staged(prefill=servers[:1], decode=servers[1:], prefill_wait_s=0.1)
        )
        prefill = servers[0].app
        prefill.go.clear()
        assert httpx.post(stage.url + "/generate", json=BODY).status_code == 200
        assert eventually(lambda: prefill.num_left == 1)
        assert servers[1].app.bodies == [BODY]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "short"}),
        ("/v1/completions", {"echo": True}),
        ("/generate", {"session_params": {"id": "s"}}),
        ("/v1/messages", {}),
        ("/tokenize", {}),
    ],
)
def test_what_is_not_handed_over_goes_to_the_decode_server_alone(
    pair: Pair, path: str, body: dict[str, object]
) -> None:
    assert pair.ask(path, **body).status_code == 200
    assert pair.decode.bodies == [BODY | body]
    assert not pair.prefill.bodies


@pytest.mark.parametrize("name", ["model", "lora_path"])
def test_the_prompt_of_an_adapter_goes_to_a_prefill_server_first(pair: Pair, name: str) -> None:
    assert pair.ask(**{name: "sea"}).status_code == 200
    assert [body[name] for body in pair.prefill.bodies + pair.decode.bodies] == ["sea", "sea"]
    assert pair.decode.bodies[0]["bootstrap_port"] == 7


OWN_ROOMS = {
    "bootstrap_host": "10.0.0.9",
    "bootstrap_port": 99,
    "bootstrap_room": 5,
    "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.9"},
}


@pytest.mark.pairs
@pytest.mark.parametrize("name", [*OWN_ROOMS, "all"])
@pytest.mark.parametrize("prompt", ["short", PROMPT])
@pytest.mark.parametrize("path", ["/v1/completions", "/generate", "/v1/messages"])
def test_the_room_of_a_client_goes_no_further(
    pair: Pair, path: str, prompt: str, name: str
) -> None:
    own = OWN_ROOMS if name == "all" else {name: OWN_ROOMS[name]}
    assert pair.ask(path, prompt=prompt, **own).status_code == 200
    (last,) = pair.decode.bodies
    for body in (*pair.prefill.bodies, last):
        rooms = {key: value for key, value in body.items() if key in OWN_ROOMS}
        assert rooms.pop("bootstrap_room", 0) != 5
        assert rooms in ({}, {"bootstrap_host": "127.0.0.1", "bootstrap_port": 7})


def test_a_room_that_is_written_twice_or_in_escapes_goes_no_further(pair: Pair) -> None:
    content = (
        b'{"prompt": "a", "bootstrap_room": null, "bootstrap\\u005froom": 5, "bootstrap_room": 6}'
    )
    assert httpx.post(pair.stage.url + "/generate", content=content).status_code == 200
    assert pair.decode.bodies == [{"prompt": "a"}]


def test_a_body_that_is_nested_too_deeply_to_be_read_goes_no_further(pair: Pair) -> None:
    depth = 1_000_000
    content = b'{"prompt": "a", "bootstrap_room": 5, "x": ' + b"[" * depth + b"]" * depth + b"}"
    answer = httpx.post(pair.stage.url + "/generate", content=content)
    assert answer.status_code == 400
    assert "nested too deeply" in answer.text
    assert not pair.decode.targets


def test_a_stream_is_passed_on_piece_by_piece(pair: Pair) -> None:
    pair.decode.kind = "text/event-stream"
    pair.decode.pieces = [b"data: 1\n\n", b"data: 2\n\n"]
    pair.decode.go.clear()
    with httpx.stream("POST", pair.stage.url + "/generate", json=BODY, timeout=HANG_S) as answer:
        pieces = answer.iter_raw()
        assert next(pieces) == b"data: 1\n\n"
        pair.decode.go.set()
        assert b"".join(pieces) == b"data: 2\n\n"


def test_a_stream_that_breaks_off_ends_with_an_error_and_other_answers_with_the_connection(
    pair: Pair,
) -> None:
    pair.decode.kind = "text/event-stream"
    pair.decode.pieces = [b"data: 1\n\n", None]
    assert '"code":502' in pair.ask(stream=True).text
    pair.decode.kind = "application/json"
    with pytest.raises(httpx.RemoteProtocolError):
        pair.ask()
    pair.decode.pieces = [None]
    assert pair.ask().status_code == 502
    assert pair.number('route_broken_total{role="decode"}') == 3


OTHER_PROTOCOL = b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


@pytest.mark.parametrize(
    ("wire", "reason"),
    [
        (OTHER_PROTOCOL, "it answers with status 101"),
        (b"HTTP/1.1 999 Odd\r\ncontent-length: 2\r\n\r\n{}", "it answers with status 999"),
        (b"HTTP/1.1 000 Odd\r\ncontent-length: 2\r\n\r\n{}", "it answers with status 0"),
        (OK + OK, "it answers twice"),
    ],
)
def test_an_answer_that_cannot_be_passed_on_is_a_502(wire: bytes, reason: str) -> None:
    with ExitStack() as stack:
        (server,) = stack.enter_context(serving(ScriptedServer()))
        stage = stack.enter_context(staged(worker=[server], watch_s=3_600.0))
        server.app.wire = wire
        answer = httpx.post(stage.url + "/generate", json=BODY, timeout=HANG_S)
        assert answer.status_code == 502
        assert answer.json()["error"]["message"].endswith(reason)


def test_a_probe_that_another_protocol_answers_takes_the_server_out_until_it_is_back() -> None:
    with ExitStack() as stack:
        (server,) = stack.enter_context(serving(ScriptedServer()))
        stage = stack.enter_context(staged(worker=[server]))
        server.app.wire = OTHER_PROTOCOL
        assert stage.is_up("worker", 0)
        server.app.wire = b""
        assert stage.is_up("worker", 1)


def test_when_the_client_leaves_the_server_hears_of_it(pair: Pair) -> None:
    pair.decode.pieces = [b"data: 1\n\n", b"data: 2\n\n"]
    pair.decode.go.clear()
    with httpx.stream("POST", pair.stage.url + "/generate", json=BODY, timeout=HANG_S) as answer:
        next(answer.iter_raw())
    assert eventually(lambda: pair.decode.num_left == 1)


def test_without_a_decode_server_there_is_503_until_it_comes_back(pair: Pair) -> None:
    pair.decode.is_ready = False
    assert pair.stage.is_up("decode", 0)
    answer = pair.ask()
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert "no decode server is ready" in answer.json()["error"]["message"]
    assert httpx.get(pair.stage.url + "/health").status_code == 503
    pair.decode.is_ready = True
    assert pair.stage.is_up("decode", 1)
    assert httpx.get(pair.stage.url + "/health").status_code == 200
    assert pair.ask().status_code == 200


def test_a_request_that_finds_no_server_asks_at_once_whether_one_is_back() -> None:
    with ExitStack() as stack:
        (server,) = stack.enter_context(serving(ScriptedServer()))
        stage = stack.enter_context(staged(worker=[server], watch_s=3_600.0))
        server.stop()
        assert httpx.post(stage.url + "/generate", json=BODY, timeout=HANG_S).status_code == 503
        back = Serving(ScriptedServer(), server.port)
        stack.callback(back.stop)
        with ThreadPoolExecutor(8) as pool:
            asked = [
                pool.submit(httpx.post, stage.url + "/generate", json=BODY, timeout=HANG_S)
                for _ in range(8)
            ]
        assert [one.result().status_code for one in asked] == [200] * 8
        assert len(back.app.bodies) == 8


def test_a_request_waits_for_a_server_that_says_nothing_no_longer_than_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weft.relay.pool.LOOK_AGAIN_S", 0.01)
    with ExitStack() as stack:
        (server,) = stack.enter_context(serving(ScriptedServer()))
        stage = stack.enter_context(staged(worker=[server], watch_s=3_600.0))
        (pool,) = stage.relay.pools
        pool.servers[0].set_state("it was not ready")
        server.app.is_silent = True
        stack.callback(setattr, server.app, "is_silent", False)
        assert httpx.post(stage.url + "/generate", json=BODY, timeout=HANG_S).status_code == 503


@pytest.mark.parametrize(
    ("path", "beginning"),
    [("/generate", b'data: {"error":'), ("/v1/messages", b'event: error\ndata: {"type":"error"')],
)
def test_answers_of_a_server_that_gives_no_sign_of_life_end(
    monkeypatch: pytest.MonkeyPatch, path: str, beginning: bytes
) -> None:
    with ExitStack() as stack:
        (server,) = stack.enter_context(serving(ScriptedServer()))
        app = server.app
        app.pieces = [b"data: 1\n\n", b"data: 2\n\n"]
        app.kind = "text/event-stream"
        stage = stack.enter_context(staged(worker=[server]))
        app.go.clear()
        stack.callback(setattr, app, "is_silent", False)
        with httpx.stream("POST", stage.url + path, json=BODY, timeout=HANG_S) as answer:
            pieces = answer.iter_raw()
            assert next(pieces) == b"data: 1\n\n"
            monkeypatch.setattr("weft.relay.pool.PROBE_TIMEOUT_S", 0.01)
            app.is_silent = True
            rest = b"".join(pieces)
            assert beginning in rest
            assert b"ended in the middle of the answer" in rest


def test_a_prefill_server_that_cannot_be_reached_leaves_prompts_to_the_others() -> None:
    with ExitStack() as stack:
        servers = stack.enter_context(serving(*(ScriptedServer() for _ in range(3))))
        stage = stack.enter_context(
            staged(
                prefill=servers[:2],
                decode=servers[2:],
                watch_s=3_600.0,
                load_balance_method="round_robin",
            )
        )
        servers[0].stop()
        for _ in range(3):
            httpx.post(stage.url + "/generate", json=BODY, timeout=HANG_S)
        assert len(servers[1].app.bodies) == 3
        assert all("bootstrap_room" in body for body in servers[2].app.bodies)


def test_what_a_server_that_ends_has_not_begun_goes_to_another() -> None:
    ends, stays = ScriptedServer(), ScriptedServer()
    readiness = Readiness()
    readiness.drain()
    refusal = refusal_of(readiness)
    ends.status = refusal.status
    ends.headers = [
        (name.encode(), value.encode()) for name, value in (refusal.headers or {}).items()
    ]
    with (
        serving(ends, stays) as servers,
        staged(worker=servers, watch_s=3_600.0, load_balance_method="round_robin") as stage,
    ):
        for _ in range(3):
            assert httpx.post(stage.url + "/generate", json=BODY, timeout=HANG_S).status_code == 200
        assert (len(ends.bodies), len(stays.bodies)) == (1, 3)
        stays.status, stays.headers = ends.status, ends.headers
        answer = httpx.post(stage.url + "/generate", json=BODY, timeout=HANG_S)
        assert answer.status_code == 503
        assert "no worker server is ready" in answer.json()["error"]["message"]
        # Without this word of the server, it may have begun.
        stays.headers = []
        answer = httpx.post(stage.url + "/generate", json=BODY, timeout=HANG_S)
        assert answer.json() == {}


def test_a_server_is_probed_by_the_name_that_its_url_has() -> None:
    with serving(ScriptedServer()) as (server,), staged(worker=[server]):
        assert server.app.asked_as == {f"127.0.0.1:{server.port}"}
    (worker,) = relay_servers(read("--worker", "http://[::1]:9/")).workers
    assert (worker.host, worker.authority) == ("::1", "[::1]:9")


def test_of_a_server_that_comes_back_no_prompt_is_taken_to_be_cached() -> None:
    async def come_back(url: str) -> None:
        pool = RelayPool("worker", [ServerAddress(url, "127.0.0.1")], "cache_aware", 10_000)
        await pool.look_again()
        pool.choose(1, RoutedRequest(b"a prompt" * 100), pool.up)
        (books,) = pool.router.engines
        await pool.look_again()
        assert len(books.index) > 0
        pool.servers[0].set_state("it cannot be reached")
        await pool.look_again()
        assert pool.num_up == 1
        assert len(books.index) == 0

    with serving(ScriptedServer()) as (server,):
        asyncio.run(come_back(server.url))


def test_administration_is_not_passed_on(pair: Pair) -> None:
    answer = httpx.post(pair.stage.url + "/flush_cache")
    assert answer.status_code == 403
    assert "this front does not answer" in answer.json()["error"]["message"]
    assert not pair.decode.targets


def test_a_body_that_is_no_json_is_the_servers_to_judge(pair: Pair) -> None:
    pair.decode.status = 400
    answer = httpx.post(pair.stage.url + "/generate", content=b"[1, 2]")
    assert answer.status_code == 400
    assert pair.decode.raw == [b"[1, 2]"]


class Several:
    """Workers, and the front."""

    def __init__(self, stack: ExitStack, num: int) -> None:
        self.workers = [ScriptedServer() for _ in range(num)]
        self.servers: list[Serving] = stack.enter_context(serving(*self.workers))
        self.stage: Stage = stack.enter_context(staged(worker=self.servers))

    def counts(self) -> list[int]:
        return [len(one.bodies) for one in self.workers]


@pytest.fixture
def several() -> Iterator[Several]:
    with ExitStack() as stack:
        yield Several(stack, 3)


def test_requests_with_a_common_prompt_go_to_one_worker_and_others_elsewhere(
    several: Several,
) -> None:
    for number in range(6):
        for _ in range(2):
            messages = [{"role": "user", "content": f"{number} {PROMPT * 3}"}]
            httpx.post(several.stage.url + "/v1/chat/completions", json={"messages": messages})
    assert several.counts() == [4, 4, 4]


def test_a_worker_that_cannot_be_reached_gets_nothing_and_no_request_fails(
    several: Several,
) -> None:
    several.servers[0].stop()
    for number in range(9):
        answer = httpx.post(several.stage.url + "/generate", json={"text": f"{number}"})
        assert answer.status_code == 200
    assert several.counts()[0] == 0
    assert sum(several.counts()) == 9


def test_requests_of_a_session_and_what_is_kept_of_a_key_go_to_one_worker(
    several: Several,
) -> None:
    opened = httpx.post(several.stage.url + "/open_session", json={"capacity": 7})
    assert opened.status_code == 200
    (server,) = [one for one in several.workers if one.bodies]
    name = server.bodies[0]["session_id"]
    for _ in range(5):
        body = {"text": "a", "session_params": {"id": name}}
        httpx.post(several.stage.url + "/generate", json=body)
    assert len(server.bodies) == 6
    before = several.counts()
    headers = {"authorization": "Bearer k"}
    httpx.post(several.stage.url + "/v1/responses", json={"input": "a"}, headers=headers)
    httpx.get(several.stage.url + "/v1/responses/resp_1", headers=headers)
    httpx.post(several.stage.url + "/v1/files", json={"a": 1}, headers=headers)
    httpx.post(several.stage.url + "/v1/batches", json={"input_file_id": "a"}, headers=headers)
    httpx.get(several.stage.url + "/v1/messages/batches", headers=headers)
    after = several.counts()
    assert sorted(new - old for new, old in zip(after, before, strict=True)) == [0, 0, 5]


def test_a_kept_connection_that_was_closed_is_not_used() -> None:
    worker = ScriptedServer()
    with ExitStack() as stack:
        first = Serving(worker)
        stage = stack.enter_context(staged(worker=[first]))
        assert httpx.post(stage.url + "/generate", json=BODY).status_code == 200
        first.stop()
        again = Serving(worker, first.port)
        stack.callback(again.stop)
        assert stage.is_up("worker", 1)
        assert httpx.post(stage.url + "/generate", json=BODY).status_code == 200
    assert len(worker.bodies) == 2


@pytest.mark.parametrize(("method", "num_sent"), [("POST", 1), ("GET", 2)])
def test_what_a_server_drops_on_a_kept_connection_is_sent_once_more_if_it_changes_nothing(
    method: str, num_sent: int
) -> None:
    worker = ScriptedServer()
    with ExitStack() as stack:
        first = Serving(worker)
        stack.callback(first.stop)
        stage = stack.enter_context(staged(worker=[first]))
        assert httpx.post(stage.url + "/generate", json=BODY).status_code == 200
        worker.pieces = [None]
        assert httpx.request(method, stage.url + "/v1/responses/a").status_code == 502
    assert len(worker.bodies) == 1 + num_sent


# The command line


def read(*argv: str) -> RelayConfig:
    return Command("weft route", "", RelayConfig).read(argv, {}).make(RelayConfig)


def test_servers_stand_side_by_side_and_prefill_servers_have_their_ports_behind_them() -> None:
    config = read(
        *("--prefill", "http://a:1", "9001", "http://b:1/", "--prefill", "http://c:1"),
        *("--decode", "https://d", "http://e:2"),
    )
    servers = relay_servers(config)
    assert servers.prefill == (
        ServerAddress("http://a:1", "a", 9001),
        ServerAddress("http://b:1", "b"),
        ServerAddress("http://c:1", "c"),
    )
    assert [one.url for one in servers.decode] == ["https://d", "http://e:2"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "no server is named"),
        (("--prefill", "http://a:1"), "--prefill needs --decode"),
        (("--worker", "http://a:1", "--decode", "http://b:1"), "--worker excludes"),
        (("--worker", "a:1"), "--worker: 'a:1' is not a URL"),
        (("--worker", "http://a:b"), "is not a URL"),
        (("--worker", "http://a..b:1"), "is not a URL"),
        (("--worker", "http://u:p@a:1"), "requests bring their keys"),
        (("--worker", "http://a:1", "http://a:1/"), "given twice"),
        (("--decode", "http://a:1", "8998"), "--decode: 8998 is not a URL"),
        (("--decode", "http://d:1", "--prefill", "http://a:1", "99999"), "99999 is not a URL"),
    ],
)
def test_servers_that_make_no_sense_are_refused(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        relay_servers(read(*argv))


class DifferentModels:
    """Two workers with a model each, the second also with an adapter, and the front."""

    def __init__(self, stack: ExitStack, key: str = "") -> None:
        self.workers = [ScriptedServer(), ScriptedServer()]
        self.workers[0].models = ["a"]
        self.workers[1].models = ["b", "b-adapter"]
        for worker in self.workers:
            worker.key = key
        self.servers = stack.enter_context(serving(*self.workers))
        self.stage = stack.enter_context(staged(worker=self.servers))
        self.url = self.stage.url

    def ask(self, headers: dict[str, str] | None = None, **body: object) -> httpx.Response:
        url = self.url + "/v1/completions"
        return httpx.post(url, json=BODY | body, headers=headers, timeout=HANG_S)

    @property
    def counts(self) -> list[int]:
        return [len(worker.bodies) for worker in self.workers]


@pytest.mark.parametrize("key", ["", "k"])
def test_requests_go_to_the_workers_that_have_their_model(key: str) -> None:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with ExitStack() as stack:
        front = DifferentModels(stack, key)
        for model in ("a", "b", "b-adapter", "a"):
            assert front.ask(headers, model=model).status_code == 200
        assert front.counts == [2, 2]
        listed = httpx.get(front.url + "/v1/models", headers=headers).json()
        assert [card["id"] for card in listed["data"]] == ["a", "b", "b-adapter"]
        if key:
            assert httpx.get(front.url + "/v1/models").status_code == 401


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {"model": "b:latest"}),
        ("/api/show", {"name": "b:latest"}),
        ("/api/show", {"name": "b"}),
        ("/openai/deployments/b/chat/completions", {"messages": []}),
        ("/tokenize?model=b", {"prompt": "x"}),
        ("/v1/completions?model=a", {"model": "b"}),
    ],
)
def test_a_model_is_named_as_a_server_reads_it(path: str, body: dict[str, object]) -> None:
    with ExitStack() as stack:
        front = DifferentModels(stack)
        answer = httpx.post(front.url + path, json=body, timeout=HANG_S)
        assert answer.status_code == 200, answer.text
        assert front.counts == [0, 1]
        assert front.workers[1].bodies == [body], "the server gets what the client wrote"


def test_a_form_goes_to_the_worker_that_has_the_model_it_names() -> None:
    with ExitStack() as stack:
        front = DifferentModels(stack)
        for model, counts in (("b", [0, 1]), ("a", [1, 1])):
            httpx.post(
                front.url + "/v1/audio/transcriptions",
                data={"model": model},
                files={"file": ("sound.wav", b"RIFF")},
                timeout=HANG_S,
            )
            assert front.counts == counts


def test_only_names_of_ollamas_clients_have_a_tag() -> None:
    with ExitStack() as stack:
        front = DifferentModels(stack)
        answer = front.ask(model="b:latest")
        assert answer.status_code == 404
        assert front.counts == [0, 0]


def test_a_model_that_no_worker_has_is_refused_with_the_list_of_models() -> None:
    with ExitStack() as stack:
        front = DifferentModels(stack)
        answer = front.ask(model="c")
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"
        assert "'c' does not exist; the servers have 'a', 'b', 'b-adapter'" in answer.text
        unnamed = front.ask()
        assert unnamed.status_code == 400
        assert "different models; name one of 'a', 'b', 'b-adapter'" in unnamed.text
        assert front.counts == [0, 0]
        front.workers[0].models = ["a", "c"]  # an adapter is loaded
        assert front.ask(model="c").status_code == 200
        assert front.counts == [1, 0]


def test_a_model_whose_only_worker_is_out_is_not_sent_to_another() -> None:
    with ExitStack() as stack:
        front = DifferentModels(stack)
        assert front.ask(model="a").status_code == 200
        front.servers[0].stop()
        answer = front.ask(model="a")
        assert answer.status_code == 503
        assert "no server with the model 'a' is ready" in answer.text
        assert front.counts == [1, 0]


def test_a_model_may_be_that_of_a_worker_which_has_not_been_asked_yet() -> None:
    with ExitStack() as stack:
        front = DifferentModels(stack)
        front.workers[0].status = 404
        front.workers[1].is_ready = False
        assert front.stage.is_up("worker", 1)
        assert front.ask(model="a").status_code == 404
        answer = front.ask(model="b")
        assert answer.status_code == 503
        assert "'b'; servers that have not listed theirs yet: 1" in answer.text
        front.workers[1].is_ready = True
        assert front.stage.is_up("worker", 2)
        assert front.ask(model="b").status_code == 200
        assert front.ask(model="c").status_code == 404


def test_workers_with_one_model_take_requests_that_name_none_or_an_unknown_one() -> None:
    with ExitStack() as stack:
        front = DifferentModels(stack)
        front.workers[1].models = ["a", "an-adapter"]
        assert front.ask().status_code == 200
        assert front.ask(model="of the server's own rules").status_code == 200
        assert front.ask(model="an-adapter").status_code == 200
        assert sum(front.counts) == 3
        assert {"model": "an-adapter"}.items() <= front.workers[1].bodies[-1].items()


def test_a_server_is_told_which_other_one_had_more_of_the_prompt() -> None:
    servers = [ScriptedServer(), ScriptedServer()]
    body = {"prompt": "The same words again. " * 40, "max_tokens": 1}
    with serving(*servers) as workers, staged(worker=workers) as stage:
        httpx.post(f"{stage.url}/v1/completions", json=body)
        (first,) = [rank for rank, server in enumerate(servers) if server.bodies]
        router = stage.relay.targets.router
        others = [RoutedRequest(bytes([number]) * 4_000) for number in range(1, 5)]
        for number, other in enumerate(others):  # it has a lot to do
            router.open(900 + number, other, [first])
        forged = {"x-weft-elsewhere": "anything"}
        httpx.post(f"{stage.url}/v1/completions", json=body, headers=forged)
        head = servers[1 - first].heads[0]
        assert head["x-weft-elsewhere"].startswith(f"{workers[first].url} had about ")
        assert head["x-weft-elsewhere"].endswith(" tokens more of its prompt")
        assert "x-weft-elsewhere" not in servers[first].heads[0]
        told = httpx.get(f"{stage.url}/metrics").text
        assert "weft:route_elsewhere_total 1.0" in told
