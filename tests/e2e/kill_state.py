"""Kills a server with a state folder at random moments, with SIGKILL, while clients of two keys
store responses and go on with sessions, and looks that the next one has all that they were told.

    python -m tests.e2e.kill_state --kills 50 --seed 1
"""

from __future__ import annotations

import json
import random
import threading
import time
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.e2e.kill_cache import MODEL, end
from tests.e2e.kills import run_kills
from tests.e2e.server import HANG_S, Server

KEYS = {"ann": "key-of-ann", "bob": "key-of-bob"}
NUM_SESSIONS = 2  # of each key
NUM_CLIENTS = 2  # of each key that store responses
OUTPUT_LEN = 3
MAX_READ = 20  # responses that are read again after each start, besides the newest ones
GONE = (OSError, HTTPException, ValueError)  # the server was killed


@dataclass
class Session:
    """What a client knows of its session."""

    name: str
    is_open: bool = False
    num_told: int = 0  # tokens of all turns that were answered
    num_sent: int = 0  # tokens that the unanswered turn would add; 0: there is none


@dataclass
class Client:
    """One key, with what it was told."""

    key: str
    sessions: list[Session] = field(default_factory=list)
    responses: dict[str, Any] = field(default_factory=dict)  # by id, as they were answered

    def call(self, server: Server, method: str, path: str, **body: Any) -> tuple[int, Any]:
        url = urlsplit(server.url)
        assert url.hostname is not None
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        with closing(HTTPConnection(url.hostname, url.port, timeout=HANG_S)) as connection:
            connection.request(method, path, json.dumps(body) if body else None, headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read() or b"null")


def clients() -> list[Client]:
    found = []
    for name, key in KEYS.items():
        sessions = [Session(f"{name}-{number}") for number in range(NUM_SESSIONS)]
        found.append(Client(key, sessions))
    return found


def serve(folder: Path) -> Server:
    keys = folder / "keys"
    keys.write_text("".join(f"@{name} {key}\n" for name, key in KEYS.items()))
    keys.chmod(0o600)
    return Server(*MODEL, "--state-dir", str(folder / "state"), "--api-key-file", str(keys))


def turn(client: Client, server: Server, session: Session, num_tokens: int) -> int:
    """A turn of `num_tokens`. Returns the tokens before it."""
    session.num_sent = num_tokens + OUTPUT_LEN
    status, told = client.call(
        server,
        "POST",
        "/generate",
        input_ids=[20 + number for number in range(num_tokens)],
        session_params={"id": session.name},
        sampling_params={"temperature": 0, "max_new_tokens": OUTPUT_LEN, "ignore_eos": True},
    )
    assert status == 200, told
    num_before = int(told["meta_info"]["prompt_tokens"]) - num_tokens
    session.num_told = num_before + session.num_sent
    session.num_sent = 0
    return num_before


def check(server: Server, everybody: list[Client], rng: random.Random) -> int:
    """Compare what the server has with what the clients were told. Returns the number of things
    that were compared."""
    num_checked = 0
    for client in everybody:
        [other] = [one for one in everybody if one is not client]
        ids = list(client.responses)
        for id in {*ids[-MAX_READ:], *rng.sample(ids, min(len(ids), MAX_READ))}:
            status, told = client.call(server, "GET", f"/v1/responses/{id}")
            assert status == 200, id
            assert told == client.responses[id], id
            assert other.call(server, "GET", f"/v1/responses/{id}")[0] == 404
            num_checked += 1
        for session in client.sessions:
            if not session.is_open:
                continue
            told_before = session.num_told
            unanswered = session.num_sent
            num_before = turn(client, server, session, 1)
            # The turn that was not answered is there as a whole, or not at all.
            assert num_before in (told_before, told_before + unanswered), session
            params = {"id": session.name}
            status, _ = other.call(server, "POST", "/generate", text="x", session_params=params)
            assert status in (400, 404), status
            num_checked += 1
    return num_checked


def kill_at_random(folder: Path, rng: random.Random, everybody: list[Client]) -> int:
    """Serve for a while, compare, and kill the server with all its processes while it works.
    Returns how much was compared."""
    server = serve(folder)
    try:
        num_checked = check(server, everybody, rng)
        has_begun = threading.Semaphore(0)
        threads: list[threading.Thread] = []
        for client in everybody:
            stores = (client, server, has_begun)
            threads += [threading.Thread(target=_store, args=stores) for _ in range(NUM_CLIENTS)]
            for one in client.sessions:
                talks = (client, server, one, has_begun)
                threads.append(threading.Thread(target=_talk, args=talks))
        for thread in threads:
            thread.start()
        for _ in range(rng.randint(1, 4 * len(threads))):
            has_begun.acquire(timeout=HANG_S)
        time.sleep(rng.uniform(0, 0.05))
    finally:
        end(server)
    for thread in threads:
        thread.join()
    return num_checked


def _store(client: Client, server: Server, begun: threading.Semaphore) -> None:
    try:
        while True:
            status, told = client.call(
                server, "POST", "/v1/responses", input="Hi", max_output_tokens=OUTPUT_LEN
            )
            assert status == 200, told
            client.responses[told["id"]] = told
            begun.release()
    except GONE:
        begun.release()


def _talk(client: Client, server: Server, session: Session, begun: threading.Semaphore) -> None:
    try:
        if not session.is_open:
            status, told = client.call(server, "POST", "/open_session", session_id=session.name)
            # An opening that was not answered may have been carried out.
            assert status in (200, 400, 409), told
            session.is_open = True
        while session.num_told < 2_000:
            turn(client, server, session, 2)
            begun.release()
    except GONE:
        begun.release()


def run(folder: Path, num_kills: int, seed: int) -> int:
    """Returns how much was compared."""
    rng = random.Random(seed)
    everybody = clients()
    num_checked = 0
    for number in range(num_kills):
        num_checked += kill_at_random(folder, rng, everybody)
        num_stored = sum(len(client.responses) for client in everybody)
        print(f"kill {number + 1}: {num_checked:,} compared, {num_stored:,} responses", flush=True)
    server = serve(folder)
    num_checked += check(server, everybody, rng)
    end(server)
    return num_checked


def main() -> None:
    _, num = run_kills(__doc__, run, 50)
    print(f"{num:,} compared: all is there")


if __name__ == "__main__":
    main()
