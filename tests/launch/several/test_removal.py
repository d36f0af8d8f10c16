"""`DELETE /api/delete` on a server with several models: what is served is unloaded first, and
nobody gets it any more; what the settings name stays."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx

from tests.launch.several.inprocess import Server, serving, spec
from tests.server.fake_catalog import FakeCatalog
from weft.launch.several.specs import ModelSpec
from weft.residency.resident import Level
from weft.residency.rules import Rules
from weft.server.catalog import CatalogError


class Folder(FakeCatalog):
    """A catalog whose removals are seen by the server's look at its folder."""

    def __init__(self, *specs: ModelSpec) -> None:
        super().__init__()
        self.specs = {one.name: one for one in specs}

    def look(self) -> Sequence[ModelSpec]:
        return list(self.specs.values())

    def delete(self, name: str) -> None:
        self.calls.append(("delete", name))
        if self.fails:
            raise CatalogError(self.fails)
        del self.specs[name]


def of_folder(name: str) -> ModelSpec:
    return spec(name, in_folder=True)


def run(work: Any, *specs: ModelSpec) -> None:
    async def main() -> None:
        folder = Folder(*(one for one in specs if one.in_folder))
        async with serving(*specs, rules=Rules(1_000), catalog=folder, look=folder.look) as server:
            await work(server, folder)

    asyncio.run(main())


async def delete(server: Server, name: str) -> httpx.Response:
    return await server.http.request("DELETE", "/api/delete", json={"model": name})


def test_a_served_model_is_unloaded_after_its_open_requests_and_then_removed() -> None:
    async def work(server: Server, folder: Folder) -> None:
        await server.complete("a")
        server.front("a").engine.hold = True
        open_one = asyncio.ensure_future(server.complete("a"))
        await server.until(lambda: server.front("a").engine.running)
        removing = asyncio.ensure_future(delete(server, "a:latest"))
        await server.until(lambda: server.house.names.own("a") is None)
        late = await server.complete("a")
        assert (late.status_code, "'b'" in late.text) == (404, True)
        listed = (await server.http.get("/v1/models")).json()["data"]
        assert "b" in {one["id"] for one in listed}
        assert not folder.calls, "a request is open"
        server.front("a").engine.hold = False
        server.front("a").engine.start()
        assert (await open_one).json()["choices"][0]["text"] == "aaa"
        assert ((await removing).status_code, folder.calls) == (200, [("delete", "a")])
        assert "a" not in server.house.hosts
        assert (await server.complete("a")).status_code == 404
        assert (await server.complete("b")).status_code == 200

    run(work, of_folder("a"), of_folder("b"))


def test_requests_that_wait_for_a_model_end_when_it_is_removed() -> None:
    async def work(server: Server, folder: Folder) -> None:
        gate = server.host("a").gate = asyncio.Event()
        waiting = asyncio.ensure_future(server.complete("a"))
        await server.until(lambda: server.house.level("a") is Level.LOADING)
        removing = asyncio.ensure_future(delete(server, "a"))
        answer = await waiting
        assert (answer.status_code, "is being removed" in answer.text) == (404, True)
        gate.set()
        assert (await removing).status_code == 200
        assert server.house.line.num_waiting == 0

    run(work, of_folder("a"), of_folder("b"))


def test_a_model_that_could_not_be_removed_is_offered_again() -> None:
    async def work(server: Server, folder: Folder) -> None:
        await server.complete("a")
        folder.fails = "a cannot be removed: the disk is read-only"
        found = await delete(server, "a")
        assert (found.status_code, "read-only" in found.text) == (400, True)
        assert (await server.complete("a")).status_code == 200
        assert server.house.level("a") is Level.READY

    run(work, of_folder("a"))


def test_a_model_of_the_settings_stays() -> None:
    async def work(server: Server, folder: Folder) -> None:
        await server.complete("a")
        for name in ("a", "alias"):
            found = await delete(server, name)
            assert found.status_code == 409
            assert "'a' is named by the settings of this server" in found.json()["error"]
        assert not folder.calls
        assert server.house.level("a") is Level.READY

    run(work, spec("a", aliases=("alias",)))
