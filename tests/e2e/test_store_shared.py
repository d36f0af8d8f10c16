"""Two servers on one store: they pull, load and remove the same model at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

import weft
from tests.e2e.server import HANG_S, Server, wait_until
from tests.weights.hub_server import Hub, serving

NANO = Path(weft.__file__).parent / "bundled" / "weft-nano"
NAME = "org/nano"
SAID = [{"role": "user", "content": "Hi"}]
CHAT = {"messages": SAID, "options": {"num_predict": 4, "seed": 1}}


class Shared(NamedTuple):
    hub: Hub
    servers: list[httpx.Client]

    def both(self, ask: Callable[[httpx.Client], httpx.Response]) -> list[httpx.Response]:
        """The answers of both servers, which are asked at once."""
        with ThreadPoolExecutor(len(self.servers)) as threads:
            return list(threads.map(ask, self.servers))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    folder = tmp_path_factory.mktemp("hub")
    hub = Hub()
    hub.repos[NAME] = {one.name: one.read_bytes() for one in NANO.iterdir() if one.is_file()}
    servers: list[Server] = []
    with pytest.MonkeyPatch.context() as patch, serving(hub):
        patch.setenv("HF_ENDPOINT", hub.endpoint)
        patch.setenv("HF_HUB_CACHE", str(folder))
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
            patch.delenv(name, raising=False)
        try:
            servers.append(Server("--models-store", "--memory", "2"))
            servers.append(Server("--models-store", "--memory", "2"))
            with ExitStack() as stack:
                clients = [httpx.Client(base_url=one.url, timeout=HANG_S) for one in servers]
                yield Shared(hub, [stack.enter_context(one) for one in clients])
        finally:
            for one in servers:
                one.stop()


def pull(http: httpx.Client) -> httpx.Response:
    return http.post("/api/pull", json={"model": NAME, "stream": False})


def chat(http: httpx.Client) -> httpx.Response:
    return http.post("/api/chat", json={"model": NAME, "stream": False, **CHAT})


def delete(http: httpx.Client) -> httpx.Response:
    return http.request("DELETE", "/api/delete", json={"model": NAME})


def load(http: httpx.Client) -> httpx.Response:
    return http.post("/models/load", json={"model": NAME})


def unload(http: httpx.Client) -> httpx.Response:
    return http.post("/models/unload", json={"model": NAME})


def offered(http: httpx.Client) -> set[str]:
    return {one["name"] for one in http.get("/api/tags").json()["models"]}


def error(answer: httpx.Response) -> Any:
    found = answer.json()["error"]
    assert "\n" not in found
    return found


def test_two_servers_pull_load_and_remove_one_model_at_once(shared: Shared) -> None:
    first, second = shared.servers
    assert [one.json() for one in shared.both(pull)] == [{"status": "success"}] * 2
    answers = shared.both(chat)
    assert {one.status_code for one in answers} == {200}
    assert len({one.json()["message"]["content"] for one in answers}) == 1

    refused = delete(first)
    assert refused.status_code == 400
    assert NAME in error(refused)
    assert chat(second).status_code == 200, "it keeps its files"

    shared.both(unload)
    removed = shared.both(delete)
    texts = [one.text for one in removed]
    assert sorted(one.status_code for one in removed) in ([200, 200], [200, 404]), texts
    for http in shared.servers:
        gone = chat(http)
        assert gone.status_code == 404, gone.text
        assert NAME not in offered(http)


def test_a_model_is_removed_while_the_other_server_pulls_or_loads_it(shared: Shared) -> None:
    first, second = shared.servers
    for work in (pull, chat):
        assert pull(first).json() == {"status": "success"}
        with ThreadPoolExecutor(1) as threads:
            working = threads.submit(work, second)
            removed = delete(first)
            answer = working.result()
        # One of them comes first. What each of them says is one line.
        for one in (removed, answer):
            if one.status_code != 200:
                assert one.status_code in (400, 404, 500, 503), one.text
                assert error(one)
        assert pull(first).json() == {"status": "success"}
        if work is pull:
            assert delete(second).status_code == 200
            continue
        # The other server looks at the store once a second.
        assert wait_until(lambda: NAME in offered(second))
        # Asked for, it is loaded at once, although a load has just failed.
        assert [one.text for one in shared.both(load) if one.status_code != 200] == []
        assert [one.text for one in shared.both(chat) if one.status_code != 200] == []
        shared.both(unload)
        assert delete(second).status_code == 200
