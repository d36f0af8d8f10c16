"""Whose a request is: keys have names, and what belongs to one is not there for another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.fake import HANG_S, MODEL, RunningServer, running
from tests.server.oracle_engine import SETTINGS, OracleEngine
from weft.config.engine import EngineConfig
from weft.config.keys import KeyDigests, digest, read_keys, share_sessions
from weft.config.options import SettingsError
from weft.config.server import ServerConfig
from weft.scheduler.settings import SessionLimits
from weft.server import response_store as stores
from weft.server.response_store import ResponseStore

ALICE, BOB, NEW, NAMELESS = "alice-secret", "bob-secret", "alice-second-secret", "nameless-secret"
KEYS = f"# ours\n@alice {ALICE}\n@bob   {BOB}\n@alice {NEW}\n{NAMELESS}\n"
CHAT = {"messages": [{"role": "user", "content": "x"}]}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "x"},
    "/v1/messages": {**CHAT, "model": MODEL, "max_tokens": 5},
    "/generate": {"text": "x"},
    "/api/chat": {**CHAT, "model": MODEL, "stream": False},
    "/api/generate": {"prompt": "x", "model": MODEL, "stream": False},
    "/invocations": {"prompt": "x"},
}
WITH_USER = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/invocations")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ServerConfig:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(KEYS)
    return ServerConfig(api_key_file=str(file), admin_api_key="admin-secret", drain_s=1.0)


@pytest.fixture(scope="module")
def keyed(config: ServerConfig) -> Iterator[RunningServer]:
    with running(config) as server:
        yield server


@pytest.fixture(scope="module")
def isolated(config: ServerConfig) -> Iterator[RunningServer]:
    with running(replace(config, isolate_cache_by_key=True, tenant_by="user")) as server:
        yield server


def client(server: RunningServer, key: str) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=HANG_S, headers={"x-api-key": key})


@pytest.mark.parametrize("path", ROUTES)
def test_the_tenant_of_a_request_is_the_name_of_its_key_whatever_it_says_of_its_user(
    keyed: RunningServer, path: str
) -> None:
    keyed.reset()
    nameless = "key-" + digest(NAMELESS).hex()[:8]
    names = {ALICE: "alice", NEW: "alice", BOB: "bob", NAMELESS: nameless}
    for key, name in names.items():
        for user in ("", "bob", "invented"):
            body = ROUTES[path] | ({"user": user} if path in WITH_USER else {})
            with client(keyed, key) as http:
                assert http.post(path, json=body).status_code == 200
            request = keyed.engine.seen[-1]
            assert request.tenant == name
            assert request.user == (user if path in WITH_USER else "")
            assert "secret" not in str(request)


def test_without_keys_all_are_one_tenant_whatever_they_say(
    server: RunningServer, http: httpx.Client
) -> None:
    for headers in ({}, {"x-api-key": "invented"}, {"authorization": "Bearer other"}):
        for user in ("", "invented"):
            body = {"prompt": "x", "user": user, "cache_salt": "s"}
            assert http.post("/v1/completions", json=body, headers=headers).status_code == 200
            assert server.engine.seen[-1].tenant == ""
            assert server.engine.seen[-1].cache_salt == "s"


def test_users_are_tenants_within_their_key_where_the_operator_says_so(
    isolated: RunningServer,
) -> None:
    isolated.reset()
    with client(isolated, ALICE) as http:
        for user, tenant in (("u1", "alice/u1"), ("bob/u1", "alice/bob/u1"), ("", "alice")):
            assert (
                http.post("/v1/completions", json={"prompt": "x", "user": user}).status_code == 200
            )
            assert isolated.engine.seen[-1].tenant == tenant


@pytest.mark.parametrize("path", [path for path in ROUTES if "/api/" not in path])
def test_isolated_keys_share_no_part_of_the_cache_whatever_salt_they_send(
    isolated: RunningServer, path: str
) -> None:
    isolated.reset()
    salts = {}
    for key in (ALICE, NEW, BOB, NAMELESS):
        for salt in ("", "s", "\x1e", "bob\x1e", "alice\x1es"):
            with client(isolated, key) as http:
                assert http.post(path, json=ROUTES[path] | {"cache_salt": salt}).status_code == 200
            salts[key, salt] = isolated.engine.seen[-1].cache_salt
    owner = {ALICE: "alice", NEW: "alice", BOB: "bob", NAMELESS: "nameless"}
    for one, part in salts.items():
        for other, same in salts.items():
            may_share = owner[one[0]] == owner[other[0]] and one[1] == other[1]
            assert (part == same) == may_share


def test_cached_tokens_tell_nothing_of_other_keys_where_they_are_isolated(
    keyed: RunningServer, isolated: RunningServer
) -> None:
    body = {
        "input_ids": list(range(20, 60)),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
    }
    for server, expected in ((keyed, 36), (isolated, 0)):
        before, server.engine = server.engine, OracleEngine(server)  # type: ignore[assignment]
        with client(server, ALICE) as alice, client(server, BOB) as bob:
            answers = [one.post("/generate", json=body).json() for one in (alice, bob, alice)]
        found = [answer["meta_info"]["cached_tokens"] for answer in answers]
        server.engine = before
        assert found == [0, expected, 36]


# Sessions


def say(http: httpx.Client, id: str) -> httpx.Response:
    sampling = {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}
    body = {"input_ids": [20, 21], "session_params": {"id": id}, "sampling_params": sampling}
    return http.post("/generate", json=body)


@pytest.fixture
def conversing(keyed: RunningServer) -> Iterator[RunningServer]:
    limits = SessionLimits(max_sessions=5, max_per_owner=3)
    before, keyed.engine = keyed.engine, OracleEngine(keyed, replace(SETTINGS, sessions=limits))  # type: ignore[assignment]
    yield keyed
    keyed.engine = before


def test_a_session_is_there_for_the_key_that_opened_it_alone(conversing: RunningServer) -> None:
    with (
        client(conversing, ALICE) as alice,
        client(conversing, BOB) as bob,
        client(conversing, NEW) as other_alice,
    ):
        assert alice.post("/open_session", json={"session_id": "s"}).json() == "s"
        assert say(alice, "s").status_code == 200
        foreign, unknown = say(bob, "s"), say(bob, "t")
        assert foreign.status_code == unknown.status_code == 404
        message = foreign.json()["error"]["message"]
        assert message == unknown.json()["error"]["message"].replace("'t'", "'s'")
        assert not bob.post("/close_session", json={"session_id": "s"}).json()["success"]
        assert bob.post("/open_session", json={"session_id": "s"}).json() == "s"  # his own
        first = say(bob, "s").json()["meta_info"]
        assert first["prompt_tokens"] == 2
        assert (
            say(other_alice, "s").json()["meta_info"]["prompt_tokens"] == 7
        )  # behind what alice has said
        assert bob.post("/close_session", json={"session_id": "s"}).json()["success"]
        assert say(alice, "s").status_code == 200


def test_one_key_cannot_take_all_sessions(conversing: RunningServer) -> None:
    with (
        client(conversing, ALICE) as alice,
        client(conversing, NEW) as second,
        client(conversing, BOB) as bob,
    ):
        opened = [one.post("/open_session", json={}).status_code for one in (alice, second, alice)]
        refused = second.post("/open_session", json={})
        assert opened == [200] * 3
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == (
            "3 sessions of this key are open, as many as --max-sessions-per-key allows"
        )
        assert bob.post("/open_session", json={}).status_code == 200


def test_several_keys_share_the_sessions_unless_it_is_said_how_many_each_may_have() -> None:
    many, one = KeyDigests(user=(digest("a"), digest("b"))), KeyDigests(user=(digest("a"),))
    same = KeyDigests(user=(digest("a"), digest("b")), names={digest("a"): "x", digest("b"): "x"})
    assert share_sessions(EngineConfig(), many).max_sessions_per_key == 64
    assert share_sessions(EngineConfig(max_sessions=2), many).max_sessions_per_key == 1
    assert share_sessions(EngineConfig(max_sessions_per_key=9), many).max_sessions_per_key == 9
    for digests in (KeyDigests(), one, same):
        assert share_sessions(EngineConfig(), digests).max_sessions_per_key == 0


# Stored responses


def test_a_stored_response_is_there_for_the_key_that_made_it_alone(keyed: RunningServer) -> None:
    keyed.reset()
    with (
        client(keyed, ALICE) as alice,
        client(keyed, BOB) as bob,
        client(keyed, NEW) as other_alice,
    ):
        id = alice.post("/v1/responses", json={"input": "x"}).json()["id"]
        for method, path in (
            ("GET", f"/v1/responses/{id}"),
            ("GET", f"/v1/responses/{id}/input_items"),
            ("DELETE", f"/v1/responses/{id}"),
            ("POST", f"/v1/responses/{id}/cancel"),
        ):
            assert bob.request(method, path).status_code == 404
        goes_on = {"input": "y", "previous_response_id": id}
        assert bob.post("/v1/responses", json=goes_on).status_code == 404
        assert bob.post("/v1/responses/input_tokens", json=goes_on).status_code == 404
        assert other_alice.post("/v1/responses", json=goes_on).status_code == 200
        assert alice.get(f"/v1/responses/{id}").json()["id"] == id
        assert alice.delete(f"/v1/responses/{id}").status_code == 200


def test_a_background_response_that_runs_is_not_there_for_another_key(keyed: RunningServer) -> None:
    keyed.reset()
    keyed.engine.hold = True
    with client(keyed, ALICE) as alice, client(keyed, BOB) as bob:
        id = alice.post("/v1/responses", json={"input": "x", "background": True}).json()["id"]
        assert bob.post(f"/v1/responses/{id}/cancel").status_code == 404
        missing = bob.post("/v1/responses", json={"input": "y", "previous_response_id": id})
        assert missing.status_code == 404
        assert alice.get(f"/v1/responses/{id}").json()["status"] == "in_progress"
        assert alice.delete(f"/v1/responses/{id}").status_code == 200


def test_the_client_with_most_responses_loses_its_oldest_when_the_store_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stores, "MAX_STORED", 10)
    store = ResponseStore(lambda: 0.0)
    store.put({"id": "bob"}, [], "bob")
    for number in range(50):
        store.put({"id": f"a{number}"}, [], "alice")
    assert store.get("bob", "bob") is not None
    assert [number for number in range(50) if store.get(f"a{number}", "alice")] == list(
        range(41, 50)
    )
    assert store.get("a49", "bob") is None
    monkeypatch.setattr(stores, "MAX_STORED_BYTES", 1_000)
    for number in range(50):
        store.put({"id": f"a{number}", "text": "x" * 200}, [], "alice")
    assert store.get("bob", "bob") is not None
    assert store.get("a49", "alice") is not None


# Names of keys


def test_a_line_of_a_file_may_name_its_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("@a.b-c_1\tfirst\n@second\nthird of three words\n@x  fourth one\n")
    digests, _ = read_keys(ServerConfig(api_key_file=str(file), api_key="given"))
    expected = {
        "given": "",
        "first": "a.b-c_1",
        "@second": "",
        "third of three words": "",
        "fourth one": "x",
    }
    assert digests.user == tuple(digest(key) for key in expected)
    for key, name in expected.items():
        assert digests.name(digest(key)) == (name or f"key-{digest(key).hex()[:8]}")


@pytest.mark.parametrize("line", ["@ key", "@a/b key", "@naïve key", "@" + "n" * 65 + " key"])
def test_an_invalid_name_of_a_key_is_refused_without_showing_the_key(
    tmp_path: Path, line: str
) -> None:
    file = tmp_path / "names"
    file.write_text(line + "\n")
    with pytest.raises(
        SettingsError, match=r"--api-key-file is .*names a key '.*'; 1 to 64 letters"
    ) as refused:
        read_keys(ServerConfig(api_key_file=str(file)))
    assert not str(refused.value).endswith("key")
