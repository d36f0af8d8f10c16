"""What outlives the server over HTTP: a copy of its folder, made the moment an answer is there, is
what a crash leaves."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.fake import HANG_S, RunningServer, eventually, running
from tests.server.oracle_engine import OracleEngine
from weft.cli.main import main
from weft.client.client import EngineClient
from weft.config.server import ServerConfig
from weft.messages.sessions import (
    CloseSession,
    CloseSessionReply,
    KeepSessionsReply,
    KeptSession,
    KeptTurn,
    SessionChange,
    SessionChanges,
)
from weft.server import response_store, stream
from weft.server.openai.responses.reply import ResponseReply
from weft.server.session_store import SessionStore
from weft.state.store import FILE, StateError, StateStore

KEYS = "@alice secret-a\n@bob secret-b\n@bob new-secret-b\n"


@contextmanager
def serving(folder: Path, **config: Any) -> Iterator[RunningServer]:
    """A server with an engine, and with the sessions of the folder."""
    with running(ServerConfig(drain_s=1.0, state_dir=str(folder), **config)) as server:
        server.engine = OracleEngine(server)  # type: ignore[assignment]
        keeper = server.client.session_keeper
        assert keeper is not None
        server.wait_for(keeper.restore(server.client))
        yield server


def client(server: RunningServer, key: str = "") -> httpx.Client:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(base_url=server.url, timeout=HANG_S, headers=headers)


def respond(http: httpx.Client, text: str, **fields: Any) -> dict[str, Any]:
    body = {"input": text, "max_output_tokens": 4, **fields}
    answer = http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any]
    if fields.get("stream"):
        last = answer.text.strip().rpartition("data: ")[2]
        told = json.loads(last)["response"]
        return told
    told = answer.json()
    return told


def generate(http: httpx.Client, ids: list[int], session: dict[str, Any], rid: str = "") -> Any:
    sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    body = {"input_ids": ids, "session_params": session, "sampling_params": sampling}
    if rid:
        body["rid"] = rid
    answer = http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


class Crash:
    """Copies of a folder as it is at some moments."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num = 0

    def now(self) -> Path:
        self._num += 1
        copy = self._folder.with_name(f"{self._folder.name}-{self._num}")
        shutil.copytree(self._folder, copy)
        return copy


@pytest.mark.parametrize("stream", [False, True])
def test_an_acknowledged_response_survives_a_crash(tmp_path: Path, stream: bool) -> None:
    crash = Crash(tmp_path / "state")
    with serving(tmp_path / "state") as server, client(server) as http:
        first = respond(http, "Hi", metadata={"a": "b"}, stream=stream)
        told = crash.now()
        second = respond(http, "More", previous_response_id=first["id"], stream=stream)
        both = crash.now()
        assert http.delete(f"/v1/responses/{first['id']}").status_code == 200
        deleted = crash.now()
        prompts = len(server.engine.seen)
    with serving(told) as server, client(server) as http:
        assert http.get(f"/v1/responses/{first['id']}").json() == first
        assert http.get(f"/v1/responses/{second['id']}").status_code == 404
        # The conversation goes on with the same tokens.
        again = respond(http, "More", previous_response_id=first["id"])
        assert again["usage"]["input_tokens"] == second["usage"]["input_tokens"]
        assert again["output"][-1]["content"] == second["output"][-1]["content"]
    with serving(both) as server, client(server) as http:
        items = http.get(f"/v1/responses/{second['id']}/input_items").json()["data"]
        assert items[0]["content"][0]["text"] == "More"
    with serving(deleted) as server, client(server) as http:
        assert http.get(f"/v1/responses/{first['id']}").status_code == 404
        assert http.get(f"/v1/responses/{second['id']}").json() == second
    assert prompts == 2


def test_a_response_that_was_generated_at_the_crash_has_failed(tmp_path: Path) -> None:
    crash = Crash(tmp_path / "state")
    with serving(tmp_path / "state") as server, client(server) as http:
        server.engine.is_held = True  # type: ignore[attr-defined]
        queued = respond(http, "Hi", background=True, max_output_tokens=200)
        after = crash.now()
        server.engine.is_held = False  # type: ignore[attr-defined]
        assert http.delete(f"/v1/responses/{queued['id']}").status_code == 200
    for _ in range(2):  # it stays so
        with serving(after) as server, client(server) as http:
            found = http.get(f"/v1/responses/{queued['id']}").json()
            assert found["status"] == "failed"
            assert found["error"]["message"] == response_store.RESTARTED


def test_a_conversation_goes_on_after_a_crash(tmp_path: Path) -> None:
    crash = Crash(tmp_path / "state")
    with serving(tmp_path / "state") as server, client(server) as http:
        opened = {"session_id": "s", "capacity": 500, "timeout": 60}
        assert http.post("/open_session", json=opened).json() == "s"
        empty = crash.now()
        first = generate(http, list(range(20, 30)), {"id": "s"}, "first")
        told = crash.now()
        expected = generate(http, [40, 41], {"id": "s"}, "second")
        http.post("/close_session", json={"session_id": "s"})
        closed = crash.now()
    with serving(empty) as server, client(server) as http:
        assert generate(http, list(range(20, 30)), {"id": "s"})["output_ids"] == first["output_ids"]
    with serving(told) as server, client(server) as http:
        again = http.post("/open_session", json=opened)
        assert "is open already" in again.text
        found = generate(http, [40, 41], {"id": "s"}, "second")
        assert found["output_ids"] == expected["output_ids"]
        assert found["meta_info"]["prompt_tokens"] == 18
        branch = generate(http, [50], {"id": "s", "rid": "first", "offset": -1, "replace": True})
        assert branch["meta_info"]["prompt_tokens"] == 16
        replaced = Crash(told).now()
    with serving(replaced) as server, client(server) as http:
        body = {"input_ids": [1], "session_params": {"id": "s", "rid": "second"}}
        assert "has no turn 'second'" in http.post("/generate", json=body).text
    with serving(closed) as server, client(server) as http:
        body = {"input_ids": [1], "session_params": {"id": "s"}}
        assert http.post("/generate", json=body).status_code == 404


def test_after_a_restart_sessions_and_responses_belong_to_the_name_of_their_key(
    tmp_path: Path,
) -> None:
    (tmp_path / "keys").write_text(KEYS)
    keys = {"api_key_file": str(tmp_path / "keys"), "admin_api_key": "secret-admin"}
    with (
        serving(tmp_path / "state", **keys) as server,
        client(server, "secret-a") as alice,
        client(server, "secret-b") as bob,
    ):
        mine = respond(alice, "of alice")["id"]
        for http, first in ((alice, 20), (bob, 60)):
            http.post("/open_session", json={"session_id": "s"})
            generate(http, [first, first + 1], {"id": "s"})
    with (
        serving(tmp_path / "state", **keys) as server,
        client(server, "secret-a") as alice,
        client(server, "new-secret-b") as bob,
    ):
        assert bob.get(f"/v1/responses/{mine}").status_code == 404
        assert alice.get(f"/v1/responses/{mine}").status_code == 200
        for http in (alice, bob):
            assert generate(http, [5], {"id": "s"})["meta_info"]["prompt_tokens"] == 9
        assert alice.get("/state").status_code == 403


def test_limits_and_expiry_hold_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1_000.0]
    state = StateStore(tmp_path, clock=lambda: now[0])
    store = response_store.ResponseStore(lambda: now[0], state)
    for number in range(6):
        store.put({"id": f"r{number}"}, [{"role": "user", "content": "ä"}], "alice", [{"n": 1}])
        now[0] += 100
    store.put({"id": "bob"}, [], "bob")
    store.put({"id": "r0"}, [], "alice")  # the newest now
    state.close()

    monkeypatch.setattr(response_store, "MAX_STORED", 4)
    state = StateStore(tmp_path, clock=lambda: now[0])
    store = response_store.ResponseStore(lambda: now[0], state)
    found = [name for name in ("r0", "r1", "r2", "r3", "r4", "r5") if store.get(name, "alice")]
    assert found == ["r0", "r4", "r5"]
    assert store.get("bob", "bob") is not None
    assert store.get("bob", "alice") is None
    one = store.get("r5", "alice")
    assert one is not None
    assert one.history == [{"role": "user", "content": "ä"}]
    assert one.items == [{"n": 1}]
    state.close()

    now[0] += response_store.STORED_S - 50
    state = StateStore(tmp_path, clock=lambda: now[0])
    assert len({part.name for part in state.read("response")}) == 4, (
        "what went is gone on disk, too"
    )
    store = response_store.ResponseStore(lambda: now[0], state)
    assert store.get("r5", "alice") is None
    assert store.get("r0", "alice") is not None
    state.close()


def test_a_session_of_another_tokenizer_waits_and_is_no_prompt(tmp_path: Path) -> None:
    with serving(tmp_path) as server, client(server) as http:
        http.post("/open_session", json={"session_id": "s"})
        generate(http, [20, 21], {"id": "s"})
        server.engine = OracleEngine(server)  # type: ignore[assignment]
        keeper = server.client.session_keeper
        assert isinstance(keeper, SessionStore)
        keeper._tokenizer = "another"
        server.wait_for(keeper.restore(server.client))
        body = {"input_ids": [1], "session_params": {"id": "s"}}
        assert http.post("/generate", json=body).status_code == 404
    with serving(tmp_path) as server, client(server) as http:
        assert generate(http, [5], {"id": "s"})["meta_info"]["prompt_tokens"] == 9


@pytest.mark.parametrize("stream", [False, True])
def test_no_answer_says_that_it_is_stored_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    real = StateStore._commit
    full = [False]

    def commit(self: StateStore, writes: Any) -> None:
        if full[0]:
            raise sqlite3.OperationalError("database or disk is full")
        real(self, writes)

    monkeypatch.setattr(StateStore, "_commit", commit)
    monkeypatch.setattr("weft.state.store.RETRY_S", 0.01)
    with serving(tmp_path) as server, client(server) as http:
        http.post("/open_session", json={"session_id": "s"})
        full[0] = True
        body = {"input": "Hi", "max_output_tokens": 4, "stream": stream}
        answer = http.post("/v1/responses", json=body)
        assert "could not be stored" in answer.text
        assert "response.incomplete" not in answer.text
        assert str(tmp_path) not in answer.text
        if not stream:
            assert answer.status_code == 503
        of_session = http.post(
            "/generate", json={"input_ids": [20], "session_params": {"id": "s"}, "stream": stream}
        )
        assert "could not be stored" in of_session.text
        # Others are not concerned.
        unstored = http.post("/v1/responses", json={**body, "store": False})
        assert unstored.status_code == 200
        assert "could not be stored" not in unstored.text
        cleared = http.post("/state/clear", json={})
        assert cleared.status_code == 503
        assert "still on the disk" in cleared.text
        full[0] = False
        assert respond(http, "Hi")["status"] == "incomplete"


def test_the_event_loop_does_not_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a commit takes long, other requests are answered, and the one that is stored is not."""
    real = StateStore._commit
    gate = threading.Event()
    begun = threading.Event()

    def commit(self: StateStore, writes: Any) -> None:
        begun.set()
        assert gate.wait(HANG_S)
        real(self, writes)

    with serving(tmp_path) as server, client(server) as http:
        monkeypatch.setattr(StateStore, "_commit", commit)
        answers: list[dict[str, Any]] = []
        stored = threading.Thread(target=lambda: answers.append(respond(http, "Hi")))
        stored.start()
        assert begun.wait(HANG_S)
        with client(server) as other:
            plain = other.post("/v1/completions", json={"prompt": "x", "max_tokens": 4})
            assert plain.status_code == 200
        assert not answers
        gate.set()
        stored.join(HANG_S)
        assert answers[0]["status"] == "incomplete"


def test_a_long_response_is_stored_by_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread writes its body; the store belongs to the loop."""
    monkeypatch.setattr(stream, "INLINE_VALUES", 0)
    places: list[tuple[str, str]] = []

    def note(cls: type[Any], name: str) -> None:
        real = getattr(cls, name)

        def call(self: Any, *arguments: Any) -> Any:
            places.append((name, threading.current_thread().name))
            return real(self, *arguments)

        monkeypatch.setattr(cls, name, call)

    note(ResponseReply, "full_body")
    note(StateStore, "settled")
    note(StateStore, "put")
    with serving(tmp_path) as server, client(server) as http:
        told = respond(http, "Hi")
        assert http.get(f"/v1/responses/{told['id']}").json() == told
    names = [name for name, _ in places]
    assert names == ["full_body", "put", "settled", "settled"]
    [writer, put, *settled] = [thread for _, thread in places]
    assert writer != put
    assert {put} == set(settled)


def test_a_background_response_is_told_as_queued_though_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = StateStore.settled

    async def settled(self: StateStore) -> None:
        while self._num_put < 2:  # at the begin and at the end
            await asyncio.sleep(0)
        await real(self)

    monkeypatch.setattr(StateStore, "settled", settled)
    with serving(tmp_path) as server, client(server) as http:
        queued = respond(http, "Hi", background=True)
        assert queued["status"] == "queued"
        assert queued["output"] == []
        assert queued["usage"] is None
        found = http.get(f"/v1/responses/{queued['id']}").json()
        assert found["status"] == "incomplete"


def test_a_background_response_that_is_not_stored_is_not_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commit(self: StateStore, writes: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with serving(tmp_path) as server, client(server) as http:
        server.engine.is_held = True  # type: ignore[attr-defined]
        monkeypatch.setattr(StateStore, "_commit", commit)
        body = {"input": "Hi", "background": True, "max_output_tokens": 400}
        assert http.post("/v1/responses", json=body).status_code == 503
        assert eventually(lambda: not server.engine.engine.has_work)  # type: ignore[attr-defined]
        [request] = server.engine.seen
        assert http.get(f"/v1/responses/{request.rid}").status_code == 404
        server.engine.is_held = False  # type: ignore[attr-defined]


def test_nothing_begins_that_cannot_be_stored_when_too_much_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path) as server, client(server) as http:
        state = server.client.session_keeper._state  # type: ignore[union-attr]
        state._is_full = True
        refused = http.post("/v1/responses", json={"input": "Hi"})
        assert refused.status_code == 503
        assert "could not be stored" in refused.text
        assert http.post("/open_session", json={"session_id": "s"}).status_code == 503
        assert not server.engine.seen
        unstored = http.post("/v1/responses", json={"input": "Hi", "store": False})
        assert unstored.status_code == 200
        state._is_full = False
        respond(http, "Hi")


def test_a_stored_response_is_sent_without_its_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path) as server, client(server) as http:
        told = respond(http, "Hi")

        def decode(self: response_store.Stored) -> Any:
            raise AssertionError("nobody asked for it")

        for part in ("response", "history", "items"):
            monkeypatch.setattr(response_store.Stored, part, property(decode))
        url = f"/v1/responses/{told['id']}"
        assert http.get(url).json() == told
        assert http.post(f"{url}/cancel").status_code == 400
        assert http.delete(url).status_code == 200


def test_a_change_of_a_session_is_one_change_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash between two of them would leave a session without its turns."""
    sent: list[Any] = []
    monkeypatch.setattr(StateStore, "_send", lambda self, *of: sent.append(of))
    state = StateStore(tmp_path)
    store = SessionStore(state, "tokenizer")
    turn = KeptTurn(name="new", prompt_len=1, tokens=b"1234")
    session = KeptSession(id="s", capacity=10, timeout_s=0.0, last="new", turns=[turn])
    for is_new in (True, False):
        change = SessionChange(session=session, is_new=is_new, forgotten=["old"])
        store.note(SessionChanges(changes=[change]))
    assert len(sent) == 2
    state.close()


def test_models_keep_sessions_of_one_id_apart(tmp_path: Path) -> None:
    async def kept() -> None:
        state = StateStore(tmp_path)
        engines = {}
        for model in ("small", "large"):
            engines[model] = Keeper()
            session = KeptSession(id="s", owner="alice", capacity=len(model), timeout_s=0.0)
            change = SessionChange(session=session, is_new=True)
            SessionStore(state, "tokenizer", model).note(SessionChanges(changes=[change]))
        for model, engine in engines.items():
            await SessionStore(state, "tokenizer", model).restore(engine)
            assert [(one.id, one.capacity) for one in engine.kept] == [("s", len(model))]
        alone = Keeper()
        await SessionStore(state, "tokenizer").restore(alone)
        assert alone.kept == []
        assert await SessionStore(state, "tokenizer", "large").prune(alone, 0.0) == 2
        assert alone.closed == ["s"]
        assert [one.name for one in await state.read_later("session")] == ["large\\s"]
        state.close()

    asyncio.run(kept())


class Keeper(EngineClient):
    """An engine that keeps what it is given, and says of all sessions that it has closed them."""

    def __init__(self) -> None:
        self.kept: list[KeptSession] = []
        self.closed: list[str] = []

    async def call(self, message: Any, *more: Any) -> Any:
        if isinstance(message, CloseSession):
            self.closed.append(message.session_id)
            return CloseSessionReply(success=True, message="")
        self.kept += message.sessions
        return KeepSessionsReply()


def test_what_expires_goes_from_an_idle_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_store, "EXPIRY_SLACK_S", 0.001)
    now = [1_000.0]

    async def idle(store: response_store.ResponseStore, state: StateStore) -> None:
        del store
        now[0] += response_store.STORED_S + 1
        while await state.read_later("response"):
            await asyncio.sleep(0)

    async def stored() -> None:
        monkeypatch.setattr(response_store, "STORED_S", 0.001)
        state = StateStore(tmp_path, clock=lambda: now[0])
        store = response_store.ResponseStore(lambda: now[0], state)
        store.put({"id": "a"}, [])
        await asyncio.wait_for(idle(store, state), 60)
        assert store._timer is None, "nothing is stored, and nothing waits"
        state.close()

    asyncio.run(stored())


# weft ctl state


def ctl(server: RunningServer, *words: str) -> int:
    return main(["ctl", "state", *words, "--url", server.url, "--json"])


def test_the_state_is_shown_pruned_and_cleared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*words: str) -> dict[str, Any]:
        assert ctl(server, *words) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    with serving(tmp_path) as server, client(server) as http:
        shown = {"folder": str(tmp_path), "format": 1, "kinds": [], "fault": ""}
        assert told("show") == shown
        ids = [respond(http, "Hi")["id"] for _ in range(3)]
        http.post("/open_session", json={"session_id": "s"})
        generate(http, [20], {"id": "s"})
        responses, sessions = told("show")["kinds"]
        assert responses["kind"] == "response"
        assert responses["records"] == 3
        assert responses["bytes"] > 1_000
        assert sessions["kind"] == "session"
        assert sessions["records"] == 1
        assert 0 <= responses["newest_s"] <= responses["oldest_s"] < HANG_S
        assert told("prune", "3600") == {"responses": 0, "sessions": 0}
        assert told("clear") == {"responses": 3, "sessions": 1}
        assert told("show")["kinds"] == []
        assert http.get(f"/v1/responses/{ids[0]}").status_code == 404
        services = server.engine.engine.services  # type: ignore[attr-defined]
        assert eventually(lambda: len(services.sessions.feature) == 0)


def test_a_server_without_a_folder_stores_nothing_and_says_so(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ctl(server, "show") == 1
    assert "was started without --state-dir" in capsys.readouterr().err


@pytest.mark.parametrize("is_locked", [True, False])
def test_a_folder_that_cannot_be_used_ends_the_start(tmp_path: Path, is_locked: bool) -> None:
    other = StateStore(tmp_path)
    if not is_locked:
        other.close()
        connection = sqlite3.connect(tmp_path / FILE)
        connection.execute("PRAGMA user_version = 99")
        connection.close()
    with (
        pytest.raises(StateError, match=r"in use by another server|of a newer weft"),
        running(ServerConfig(state_dir=str(tmp_path))),
    ):
        pass
    other.close()
