"""What clients and administrators do: one function for each, all of it drawn from the random
numbers they are given.

Every request goes through the ledger, with the ends that it may have.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from tests.soak import traffic
from tests.soak.audit import golden_answer, golden_body
from tests.soak.http import Exchange, call
from tests.soak.ledger import Wrong
from tests.soak.world import World

Behaviour = Callable[[World, random.Random], Awaitable[None]]
POLICIES = (
    "fcfs",
    "lpm",
    "dfs-weight",
    "shortest-prefill-first",
    "hrrn",
    "lof",
    "random",
    "priority",
    "fair",
)
QUESTIONS = (
    "/metrics",
    "/v1/loads",
    "/requests",
    "/server_info",
    "/health_generate",
    "/requests/soak-1",
    "/v1/models",
)
EOS = 2  # of the bundled model
LONG_LEN = 600  # tokens, of which a client that leaves sees a few
MALFORMED: tuple[tuple[str, bytes, int], ...] = (
    ("/v1/completions", b"", 400),
    ("/v1/completions", b'{"prompt": "x"', 400),
    ("/v1/completions", b'{"prompt": "\xff\xfe"}', 400),
    ("/v1/completions", b"[" * 20_000, 400),
    ("/v1/completions", b'{"prompt": "x", "temperature": 1e30}', 400),
    ("/v1/completions", b'{"prompt": "x", "n": 100000}', 400),
    ("/v1/completions", b'{"prompt": [999999999]}', 400),
    ("/v1/completions", b'{"prompt": "x", "max_tokens": 1000000}', 400),
    ("/v1/completions", b'{"prompt": "x", "model": "another"}', 404),
    ("/v1/chat/completions", b'{"messages": []}', 400),
    ("/v1/chat/completions", b'{"messages": [{"role": 7}]}', 400),
    ("/generate", b'{"text": "x", "input_ids": [1]}', 400),
    ("/generate", b'{"text": "x", "session_params": {"id": "never opened"}}', 404),
    ("/tokenize", b'{"prompt": 7}', 400),
    ("/set_policy", b'{"policy": "none"}', 400),
    ("/update_weights_from_disk", b'{"model_path": "../../etc"}', 400),
    ("/nothing", b"{}", 404),
)


async def ask(world: World, rng: random.Random) -> None:
    path, body = traffic.request(rng, world.name(), world.tokens(120))
    await world.ledger.account("ask", lambda: traffic.complete(world, path, body))


async def ask_for_much(world: World, rng: random.Random) -> None:
    """Outputs that are longer than the scheduler expects, so that KV memory does not suffice and it
    must retract."""
    path, body = traffic.request(rng, world.name(), world.tokens(300))
    fields = body.get("sampling_params", body)
    fields["max_new_tokens" if path == "/generate" else "max_tokens"] = world.tokens(300)
    fields["logit_bias"] = {
        str(EOS): -100
    }  # unlike `ignore_eos` it is not known beforehand to go on to the end
    fields.pop("ignore_eos", None)
    fields.pop("stop", None)
    await world.ledger.account("ask for much", lambda: traffic.complete(world, path, body))


async def burst(world: World, rng: random.Random) -> None:
    """Many at once; the queue may be full."""
    bodies = [
        traffic.request(rng, world.name(), world.tokens(30)) for _ in range(rng.randint(10, 60))
    ]
    work = [lambda one=one: traffic.complete(world, *one, may={"503"}) for one in bodies]
    await asyncio.gather(*(world.ledger.account("burst", one) for one in work))


async def leave(world: World, rng: random.Random) -> None:
    path, body = traffic.request(rng, world.name(), world.tokens(240))
    await world.ledger.account("leave", lambda: traffic.leave(world, rng, path, body))


async def leave_for_good(world: World, rng: random.Random) -> None:
    """Leave a long answer at its beginning: the engine must hear of it, and not generate the
    rest."""
    rid = world.name()
    fields = {"max_tokens": LONG_LEN, "ignore_eos": True, "temperature": 0}
    body = {"prompt": traffic.text(rng), "stream": True, "rid": rid} | fields

    async def go() -> str:
        async with Exchange(world.port, "POST", "/v1/completions", body) as exchange:
            if await exchange.head() != 200:
                return "not answered"
            async for _ in exchange.pieces():
                break
        return "left"

    if await world.ledger.account("leave for good", go) == "left":
        await world.ledger.account("was it ended", lambda: _must_have_ended(world, rid))


async def _must_have_ended(world: World, rid: str) -> str:
    """Wait for the engine to be done with a request whose client has left after its first token."""
    while True:
        status, answer = await call(world.port, "GET", f"/requests/{rid}")
        if status != 200:
            return f"error {status}"  # the engine cannot be asked now, or has forgotten the request
        told = json.loads(answer)["requests"][0]  # names begin anew with each phase
        if told["state"] == "finished":
            break
        await asyncio.sleep(0.2)
    if told["output_tokens"] >= LONG_LEN:
        raise Wrong(f"{rid} was generated to its end though its client had left")
    return "ended"


async def salted(world: World, rng: random.Random) -> None:
    """Who has a salt of its own finds nothing in the cache, whoever has asked the same before."""
    prompt = traffic.long_text(rng)

    async def ask(salt: str, may: int) -> str:
        body = {
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0,
            "rid": world.name(),
            "cache_salt": salt,
        }
        status, answer = await call(world.port, "POST", "/v1/completions", body)
        told = json.loads(answer)
        if status != 200:
            if str(status) not in world.may:
                raise Wrong(f"{status} {told}")
            return f"error {status}"
        found = told["usage"]["prompt_tokens_details"]["cached_tokens"]
        if found > may:
            raise Wrong(f"{found} tokens of another salt's prompt were found in the cache")
        return "complete"

    everything = len(prompt)
    await world.ledger.account("salted", lambda: ask("known", everything))
    await world.ledger.account("salted", lambda: ask(world.name(), 0))


async def read_slowly(world: World, rng: random.Random) -> None:
    path, body = traffic.request(rng, world.name(), world.tokens(900))
    body["stream"] = True
    await world.ledger.account("read slowly", lambda: traffic.read_slowly(world, rng, path, body))


async def abort_one(world: World, rng: random.Random) -> None:
    """Abort by name, at some moment; sometimes by a name that two have."""
    rid = world.name()
    bodies = [traffic.request(rng, rid, world.tokens(240)) for _ in range(rng.choice((1, 1, 2)))]
    work = [lambda one=one: traffic.complete(world, *one, may={"abort"}) for one in bodies]
    asked = [asyncio.ensure_future(world.ledger.account("abort one", one)) for one in work]
    await asyncio.sleep(rng.random() * 0.4)
    await control(world, "/abort_request", {"rid": rid})
    await asyncio.gather(*asked)


async def abort_all(world: World, rng: random.Random) -> None:
    await control(world, "/abort_request", {"abort_all": True})


async def malformed(world: World, rng: random.Random) -> None:
    path, body, expected = rng.choice(MALFORMED)

    async def send() -> str:
        async with Exchange(world.port, "POST", path, body) as exchange:
            status = await exchange.head()
            error = json.loads(await exchange.whole())["error"]
        if status != expected and str(status) not in world.may:
            raise Wrong(f"{body[:60]!r} is answered with {status} {error['message']}")
        return f"error {status}"

    await world.ledger.account("malformed", send)


async def too_long(world: World, rng: random.Random) -> None:
    body = {"prompt": " ".join(rng.choices(traffic.WORDS, k=6_000)), "max_tokens": 5}
    await world.ledger.account("too long", lambda: _must_be_refused(world, body))


async def _must_be_refused(world: World, body: dict[str, Any]) -> str:
    end = await traffic.complete(world, "/v1/completions", body, may={"400"})
    if not end.startswith("error"):
        raise Wrong("a prompt beyond the context was answered")
    return end


async def greedy(world: World, rng: random.Random) -> None:
    """Greedy text and its log probabilities do not depend on what else runs."""
    prompt = rng.choice(sorted(world.golden))
    body = golden_body(prompt) | {"rid": world.name()}

    async def send() -> str:
        async with Exchange(world.port, "POST", "/generate", body) as exchange:
            status = await exchange.head()
            answer = json.loads(await exchange.whole())
        if status != 200:
            if str(status) not in world.may:
                raise Wrong(f"{status} {answer['error']['message']}")
            return f"error {status}"
        if answer["meta_info"]["finish_reason"]["type"] == "abort" and "abort" in world.may:
            return "abort"
        if (found := golden_answer(answer)) != world.golden[prompt]:
            raise Wrong(
                f"greedy text or its log probabilities have changed: {found} instead of {world.golden[prompt]}"
            )
        return "complete"

    await world.ledger.account("greedy", send)


# Sessions


async def session(world: World, rng: random.Random) -> None:
    """Open one, append to it, branch off, replace, and close it, or walk away."""
    id = world.name()
    opened = await control(world, "/open_session", {"session_id": id, "capacity": 3_000}, may={400})
    if opened != "200":
        return
    turns: list[str] = []
    for _ in range(rng.randint(1, 5)):
        names = [world.name() for _ in range(rng.choice((1, 1, 1, 2)))]
        before = tuple(turns)
        work = [
            lambda name=name, before=before: _turn(world, rng, id, name, before) for name in names
        ]
        await asyncio.gather(*(world.ledger.account("turn", one) for one in work))
        turns += names
        if rng.random() < 0.1:
            await asyncio.sleep(rng.random())
    if rng.random() < 0.7:
        await control(world, "/close_session", {"session_id": id})


async def _turn(world: World, rng: random.Random, id: str, name: str, turns: Sequence[str]) -> str:
    params: dict[str, Any] = {"id": id}
    if turns and rng.random() < 0.6:
        params["rid"] = rng.choice(turns)
    if rng.random() < 0.2:
        params["replace"] = True
    if turns and rng.random() < 0.2:
        params["drop_previous_output"] = True
    fields = {"max_new_tokens": rng.randint(1, 40), "temperature": rng.choice((0, 1))}
    body = {
        "text": traffic.text(rng, 20),
        "rid": name,
        "session_params": params,
        "sampling_params": fields,
    }
    if rng.random() < 0.3:
        body["stream"] = True
    if rng.random() < 0.15:
        return await traffic.leave(world, rng, "/generate", body)
    return await traffic.complete(world, "/generate", body, may={"400", "404", "409", "abort"})


# Administration


async def control(
    world: World, path: str, body: object = None, *, may: Collection[int] = ()
) -> str:
    """A call that must answer 200, or one of `may`. Returns the status."""

    async def send() -> str:
        async with Exchange(
            world.port, "GET" if body is GET else "POST", path, None if body is GET else body
        ) as one:
            status = await one.head()
            answer = await one.whole()
        if status != 200 and status not in may and str(status) not in world.may:
            raise Wrong(f"{status} {answer[:300]!r}")
        return "done" if status == 200 else f"error {status}"

    end = await world.ledger.account(path.partition("?")[0], send)
    return "200" if end == "done" else end


GET = object()


async def look(world: World, rng: random.Random) -> None:
    path = rng.choice(QUESTIONS)
    await control(world, path, GET, may={404} if path.startswith("/requests/") else ())


async def flush(world: World, rng: random.Random) -> None:
    await control(world, f"/flush_cache?timeout={rng.choice((0, 0, 0.3))}", may={400})


async def set_policy(world: World, rng: random.Random) -> None:
    await control(world, "/set_policy", {"policy": rng.choice(POLICIES)})


async def set_state(world: World, rng: random.Random) -> None:
    """Fewer may run for a while."""
    async with world.exclusive:
        await control(
            world,
            "/set_internal_state",
            {"server_args": {"max_running_requests": rng.randint(1, 8)}},
        )
        await asyncio.sleep(rng.random())
        await control(world, "/set_internal_state", {"server_args": {"max_running_requests": 16}})


async def pause(world: World, rng: random.Random) -> None:
    async with world.exclusive:
        await control(
            world, "/pause_generation", {"mode": rng.choice(("abort", "retract", "in_place"))}
        )
        await asyncio.sleep(rng.random() * 0.5)
        await control(world, "/continue_generation")


async def block(world: World, rng: random.Random) -> None:
    async with world.exclusive:
        await control(world, "/block")
        await asyncio.sleep(rng.random() * 0.5)
        await control(world, "/unblock")


async def update_weights(world: World, rng: random.Random) -> None:
    """The same weights again: whoever is in the middle of it goes on with the same text."""
    body = {
        "model_path": world.model,
        "weight_version": world.name(),
        "abort_all_requests": rng.random() < 0.2,
    }
    async with world.exclusive:
        await control(world, "/update_weights_from_disk", body)


async def release_memory(world: World, rng: random.Random) -> None:
    """Refused while requests hold KV memory; new ones are refused as long as it is released."""
    async with world.exclusive:
        await control(world, "/release_memory_occupation", {}, may={400})
        await asyncio.sleep(rng.random() * 0.3)
        await control(world, "/resume_memory_occupation", {})


async def profile(world: World, rng: random.Random) -> None:
    async with world.exclusive:
        await control(world, "/start_profile", {"num_steps": rng.randint(1, 4)}, may={400})
        await asyncio.sleep(rng.random())
        await control(world, "/stop_profile", may={400})
