"""Engines of several models share the cores: each knows how many models have open requests."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from tests.launch.several.inprocess import Server, serving, spec
from weft.launch.active_models import ActiveModels
from weft.ops.cpp.library import load
from weft.residency.rules import Rules


def test_the_number_that_the_front_writes_is_what_engines_read(tmp_path: Path) -> None:
    front = ActiveModels(tmp_path / "active")
    engine = ActiveModels(front.path)
    assert engine.num() == 1, "nobody computes, so whoever begins is alone"
    front.set(3)
    assert (engine.num(), ActiveModels(front.path).num()) == (3, 3)


def test_a_model_is_active_while_it_has_open_requests() -> None:
    async def main() -> None:
        told: list[int] = []
        models = spec("a"), spec("b")
        async with serving(*models, rules=Rules(1_000), tell_active=told.append) as server:
            await hold(server)
            open_ones = [asyncio.ensure_future(server.complete(name)) for name in ("a", "a", "b")]
            await server.until(lambda: told == [1, 0, 1, 0, 1, 2])
            release(server, "a")
            await asyncio.gather(*open_ones[:2])
            await server.until(lambda: told[6:] == [1])
            release(server, "b")
            await open_ones[2]
            await server.until(lambda: told[6:] == [1, 0])

    async def hold(server: Server) -> None:
        for name in ("a", "b"):
            await server.complete(name)
            server.front(name).engine.hold = True

    def release(server: Server, name: str) -> None:
        server.front(name).engine.hold = False
        server.front(name).engine.start()

    asyncio.run(main())


def test_a_model_takes_its_part_of_the_threads() -> None:
    library = load("")
    before = library.num_threads, library.num_sharing
    try:
        library.num_threads = 8
        threads = []
        for num in (1, 2, 3, 20):
            library.num_sharing = partial(int, num)
            threads.append(library.threads)
        assert threads == [8, 4, 2, 1]
    finally:
        library.num_threads, library.num_sharing = before
