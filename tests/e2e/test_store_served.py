"""A server that offers the store, as Ollama's and llama-server's clients use it, with a hub that
cuts connections: pull, chat, list, show, copy, unload, delete."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

import weft
from tests.e2e.server import HANG_S, Server
from tests.weights.hub_server import Hub, serving

NANO = Path(weft.__file__).parent / "bundled" / "weft-nano"
NAME = "org/nano"
WEIGHTS = "model.safetensors"
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "options": {"num_predict": 4}}


class Store(NamedTuple):
    hub: Hub
    server: Server
    http: httpx.Client
    models_dir: Path

    def chat(self, name: str, **more: Any) -> httpx.Response:
        body = {"model": name, "stream": False, **CHAT, **more}
        return self.http.post("/api/chat", json=body)

    def pull(self, name: str) -> list[dict[str, Any]]:
        lines = self.http.post("/api/pull", json={"model": name}).text.splitlines()
        return [json.loads(line) for line in lines]

    def delete(self, name: str) -> httpx.Response:
        return self.http.request("DELETE", "/api/delete", json={"model": name})

    def names(self, path: str = "/api/tags") -> set[str]:
        return {one["name"] for one in self.http.get(path).json()["models"]}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp("store")
    hub = Hub()
    files = {one.name: one.read_bytes() for one in NANO.iterdir() if one.is_file()}
    hub.repos[NAME] = files
    hub.repos["org/gated"] = {**files}
    hub.gated.add("org/gated")
    hub.repos["org/wrong"] = {**files, "config.json": b"{"}
    with pytest.MonkeyPatch.context() as patch, serving(hub):
        patch.setenv("HF_ENDPOINT", hub.endpoint)
        patch.setenv("HF_HUB_CACHE", str(folder / "hub"))
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
            patch.delenv(name, raising=False)
        server = Server("--models-store", "--models-dir", str(folder / "own"), "--memory", "4")
        try:
            with httpx.Client(base_url=server.url, timeout=HANG_S) as http:
                yield Store(hub, server, http, folder / "own")
        finally:
            server.stop()


def test_a_model_is_pulled_asked_copied_and_removed(store: Store) -> None:
    assert store.chat(NAME).status_code == 404
    store.hub.cut[WEIGHTS] = lambda number, data: data[: len(data) // 2] if number < 3 else data
    lines = store.pull(NAME)
    assert lines[-1] == {"status": "success"}
    progress = [one for one in lines if "completed" in one]
    assert all(0 <= one["completed"] <= one["total"] for one in progress)
    assert any(store.hub.ranges_of(WEIGHTS)), "it went on where it was cut off"

    answer = store.chat(f"{NAME}:latest").json()
    assert (answer["done"], answer["eval_count"]) == (True, 4)
    [loaded] = store.http.get("/api/ps").json()["models"]
    [listed] = [one for one in store.http.get("/api/tags").json()["models"] if one["name"] == NAME]
    size = len(store.hub.repos[NAME][WEIGHTS])
    assert (loaded["name"], listed["size"]) == (NAME, size)
    assert listed["digest"] == store.hub.etag(store.hub.repos[NAME][WEIGHTS])
    assert listed["details"]["family"] == "llama"
    shown = store.http.post("/api/show", json={"model": NAME}).json()
    assert shown["model_info"]["llama.block_count"] == 6

    copied = store.http.post("/api/copy", json={"source": NAME, "destination": "mine"})
    assert copied.status_code == 200
    assert {NAME, "mine", "weft-nano"} <= store.names()
    assert store.chat("mine").json()["message"] == answer["message"]

    assert store.delete(NAME).status_code == 200, "it is unloaded first, although a copy is not"
    assert NAME not in store.names() | store.names("/api/ps")
    assert store.chat(NAME).status_code == 404
    assert store.chat("mine").status_code == 200
    assert store.delete("mine").status_code == 200
    assert not any(store.models_dir.iterdir())
    assert store.delete("mine").status_code == 404


def test_what_cannot_be_pulled_copied_or_removed_is_said_in_one_line(store: Store) -> None:
    store.hub.refusals["api/models/org/gone"] = [(429, "1")]
    gone = store.pull("org/gone")
    assert any("429" in one["status"] for one in gone if "status" in one)
    gated = store.pull("org/gated")
    assert "terms" in gated[-1]["error"]
    for name in ("../../etc/passwd", "org/../x", "", "a\u0007b/c"):
        found = store.http.post("/api/pull", json={"model": name, "stream": False})
        assert found.status_code == 400, name
        assert "\n" not in found.json()["error"]
    for destination in ("../x", "a/b", "weft-nano", ".hidden"):
        body = {"source": "weft-nano", "destination": destination}
        assert store.http.post("/api/copy", json=body).status_code == 400, destination
    package = store.delete("weft-nano")
    assert (package.status_code, "installed package" in package.json()["error"]) == (400, True)
    assert store.chat("weft-nano").status_code == 200
    assert not [one for one in gone + gated if one.get("status") == "success"]


def test_a_pulled_model_that_is_damaged_hurts_nobody_and_can_be_removed(store: Store) -> None:
    assert store.pull("org/wrong")[-1] == {"status": "success"}
    wrong = store.chat("org/wrong")
    assert wrong.status_code == 500
    assert "'org/wrong' cannot be loaded" in wrong.json()["error"]
    assert store.chat("weft-nano").status_code == 200
    listed = {one["id"]: one["status"] for one in store.http.get("/v1/models").json()["data"]}
    assert (listed["org/wrong"]["value"], listed["org/wrong"]["failed"]) == ("failed", True)
    assert store.delete("org/wrong").status_code == 200
    assert "org/wrong" not in store.names()


def test_keep_alive_and_the_routes_of_llama_server_load_and_unload(store: Store) -> None:
    def state() -> Any:
        data = store.http.get("/models").json()["data"]
        return next(one["status"]["value"] for one in data if one["id"] == "weft-nano")

    for path, expected in (("load", "loaded"), ("unload", "unloaded")):
        found = store.http.post(f"/models/{path}", json={"model": "weft-nano"})
        assert (found.status_code, state()) == (200, expected)
    assert store.chat("weft-nano", keep_alive=0).status_code == 200
    while (now := state()) != "unloaded":
        assert now in ("loaded", "unloading")
    store.chat("weft-nano", keep_alive="10m")
    [loaded] = store.http.get("/api/ps").json()["models"]
    assert loaded["expires_at"] < "2100"
