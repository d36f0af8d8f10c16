"""Many clients that come, leave and abort at random; afterwards nothing of them is left."""

from __future__ import annotations

import asyncio
import random

import httpx

from tests.server.fake import HANG_S, RunningServer, eventually

NUM_CLIENTS = 150


def test_nothing_is_left_after_an_abort_storm(server: RunningServer) -> None:
    rng = random.Random(7)
    server.engine.script = lambda ids: [97] * 300
    server.engine.step_s = 0.002

    async def client(http: httpx.AsyncClient, number: int) -> str:
        await asyncio.sleep(rng.random() * 0.5)
        body = {"prompt": "x", "n": rng.randint(1, 3), "max_tokens": 300, "rid": f"storm-{number}"}
        kind = rng.choice(["leave", "abort", "stay", "leave early"])
        if kind == "stay":
            answer = await http.post("/v1/completions", json={**body, "max_tokens": 5})
            assert len(answer.json()["choices"]) == body["n"]
        elif kind == "leave early":
            try:
                await http.post("/v1/completions", json=body, timeout=rng.random() * 0.1)
            except httpx.TimeoutException:
                return kind
        else:
            async with http.stream(
                "POST", "/v1/completions", json={**body, "stream": True}
            ) as answer:
                async for _ in answer.aiter_bytes():
                    if kind == "leave":
                        break
                    if rng.random() < 0.05:
                        await http.post("/abort_request", json={"rid": body["rid"]})
        return kind

    async def storm() -> list[str]:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=server.url, timeout=HANG_S, limits=limits) as http:
            return await asyncio.gather(*(client(http, number) for number in range(NUM_CLIENTS)))

    kinds = asyncio.run(storm())
    assert len(set(kinds)) == 4
    assert eventually(lambda: not server.engine.running)
    assert eventually(lambda: server.client.num_open == 0)
    assert server.client.deliveries.open.is_empty
    assert not len(server.client.calls)
    assert len(server.engine.seen) >= NUM_CLIENTS
    server.reset()
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, timeout=HANG_S).json()[
        "choices"
    ][0]["text"]
