"""Several models in one process with fake engines: which model answers, loads, ends, errors."""

from __future__ import annotations

import asyncio
import gc
import json
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.launch.several.inprocess import Server, serving, spec
from weft.batches import tries
from weft.client.adapters import NamedAdapter
from weft.residency.resident import Level
from weft.residency.rules import Rules
from weft.server.several import app as several_app

Work = Callable[[Server], Coroutine[Any, Any, None]]
ROOMY = Rules(1_000)


def run(work: Work, *specs: Any, **options: Any) -> None:
    async def main() -> None:
        async with serving(*specs, **options) as server:
            await work(server)

    asyncio.run(main())


def test_a_request_gets_the_model_that_it_names_in_every_api() -> None:
    async def work(server: Server) -> None:
        messages = [{"role": "user", "content": "x"}]
        for name in ("ab", "cd"):
            chat = {"model": name, "messages": messages, "max_tokens": 2}
            found = await server.http.post("/v1/chat/completions", json=chat)
            assert found.json()["choices"][0]["message"]["content"] == name
            found = await server.http.post("/v1/messages", json=chat)
            assert found.json()["content"][0]["text"] == name
            ollama = {"model": f"{name}:latest", "prompt": "x", "options": {"num_predict": 2}}
            found = await server.http.post("/api/generate", json={**ollama, "stream": False})
            assert (found.json()["response"], found.json()["model"]) == (name, name)
            responses = {"model": name, "input": "x", "max_output_tokens": 16}
            found = await server.http.post("/v1/responses", json=responses)
            assert found.json()["output"][0]["content"][0]["text"].startswith(name)
            native = {"text": "x", "sampling_params": {"max_new_tokens": 2}}
            found = await server.http.post(f"/generate?model={name}", json=native)
            assert found.json()["text"] == name
            azure = f"/openai/deployments/{name}/chat/completions"
            found = await server.http.post(azure, json={"messages": messages, "max_tokens": 2})
            assert found.json()["model"] == name

    run(work, spec("ab"), spec("cd"), rules=ROOMY)


def test_names_that_no_model_has_are_answered_with_the_names_that_there_are() -> None:
    async def work(server: Server) -> None:
        found = await server.complete("smal")
        assert found.status_code == 404
        assert found.json()["error"]["code"] == "model_not_found"
        assert "this server has 'small', 'large'; did you mean small?" in found.text
        assert (await server.complete("tiny")).json()["model"] == "small", "an alias"
        assert (await server.complete("")).json()["model"] == "small", "the default"
        listed = (await server.http.get("/v1/models")).json()["data"]
        states = {one["id"]: one["status"]["value"] for one in listed}
        assert states == {"small": "loaded", "large": "unloaded"}
        assert (await server.http.get("/v1/models/tiny")).json()["id"] == "small"

    run(work, spec("small", aliases=("tiny",)), spec("large"), rules=ROOMY)


def test_bodies_that_cannot_be_read_load_nothing() -> None:
    async def work(server: Server) -> None:
        headers = {"content-type": "application/json"}
        path = "/v1/completions"
        found = await server.http.post(path, content=b"{", headers=headers)
        assert (found.status_code, "not valid JSON" in found.text) == (400, True)
        found = await server.http.post(path, json={"model": 5, "prompt": "x"})
        assert (found.status_code, found.json()["error"]["param"]) == (400, "model")
        assert (await server.http.post("/nowhere", json={})).status_code == 404
        assert (await server.http.post("/v1/models", json={})).status_code == 405
        assert not server.house.facts.models

    run(work, spec("a"))


def test_a_model_makes_room_for_another_and_comes_back() -> None:
    async def work(server: Server) -> None:
        for name in ("a", "b", "a"):
            assert (await server.complete(name)).json()["choices"][0]["text"] == name * 3
        assert server.host("a").num_loads == 2
        assert server.house.level("b") is Level.ABSENT

    run(work, spec("a"), spec("b"), rules=Rules(100, stay_loads=0, least_stay_s=0))


def test_kv_of_an_idle_model_gives_way_first_and_comes_back() -> None:
    async def work(server: Server) -> None:
        await server.complete("a")
        await server.complete("b")
        assert server.house.level("a") is Level.SMALL
        listed = (await server.http.get("/models")).json()["data"]
        assert [one["status"]["value"] for one in listed] == ["sleeping", "loaded"]
        assert (await server.complete("a")).status_code == 200
        assert server.host("a").changes == ["shrink", "grow"]
        assert server.host("a").num_loads == 1

    run(work, spec("a"), spec("b"), rules=Rules(140))


def test_a_killed_engine_ends_its_requests_alone_and_is_loaded_again() -> None:
    async def work(server: Server) -> None:
        await server.complete("a")
        await server.complete("b")
        server.front("a").engine.hold = True
        server.front("b").engine.hold = True
        lost = asyncio.ensure_future(server.complete("a"))
        kept = asyncio.ensure_future(server.complete("b"))
        await server.until(lambda: server.front("a").engine.running)
        await server.until(lambda: server.front("b").engine.running)
        server.front("a").kill()
        answer = await lost
        assert (answer.status_code >= 500, "killed" in answer.text) == (True, True)
        assert (await server.complete("a")).status_code == 200
        assert server.host("a").num_loads == 2
        server.front("b").engine.hold = False
        server.front("b").engine.start()
        assert (await kept).json()["choices"][0]["text"] == "bbb"
        page = (await server.http.get("/metrics")).text
        assert 'weft:model_failures_total{model_name="a"} 1.0' in page

    run(work, spec("a"), spec("b"), rules=ROOMY)


def test_a_model_that_cannot_be_loaded_answers_with_the_reason_and_others_do_not_notice() -> None:
    async def work(server: Server) -> None:
        server.host("bad").fault = "its weights are made of wool"
        asked = [server.complete("bad"), server.complete("bad"), server.complete("good")]
        first, second, good = await asyncio.gather(*asked)
        for one in (first, second, await server.complete("bad")):
            assert one.status_code == 500
            assert "'bad' cannot be loaded: its weights are made of wool" in one.text
            assert one.json()["error"]["code"] == "model_load_failed"
        assert good.status_code == 200
        assert server.host("bad").num_loads == 1, "it is not tried again at once"
        [state] = [one for one in server.roster.status() if one.name == "bad"]
        assert (state.state, "wool" in state.reason) == ("failed", True)
        found = await server.http.post("/models/load", json={"model": "bad"})
        assert (found.status_code, server.host("bad").num_loads) == (500, 2)

    run(work, spec("bad"), spec("good"), rules=ROOMY)


def test_a_load_whose_process_is_killed_is_tried_once_more() -> None:
    async def work(server: Server) -> None:
        server.host("a").num_crashes = 1
        assert (await server.complete("a")).status_code == 200
        server.host("b").num_crashes = 2
        found = await server.complete("b")
        assert (found.status_code, "its process was killed" in found.text) == (503, True)
        assert (await server.complete("b")).status_code == 200, "the next request loads it"

    run(work, spec("a"), spec("b"), rules=ROOMY)


def test_a_request_that_waits_for_its_model_is_aborted_by_name_or_with_all() -> None:
    async def work(server: Server) -> None:
        server.host("a").gate = asyncio.Event()
        asked = [server.complete("a", rid=f"r{number}") for number in range(4)]
        answers = [asyncio.ensure_future(one) for one in asked]
        waiting = server.roster.waiting
        await server.until(lambda: len(waiting()) == 4)
        for path, body, left in (
            ("/abort_request", {"rid": "unknown"}, ["r0", "r1", "r2", "r3"]),
            ("/abort_request", {"rid": "r1"}, ["r0", "r2", "r3"]),
            ("/abort_requests", {"request_ids": ["r0", "r1"]}, ["r2", "r3"]),
        ):
            num_before = len(waiting())
            aborted = (await server.http.post(path, json=body)).json()["aborted"]
            assert aborted == num_before - len(left)
            assert [one.rid for one in waiting()] == left
        answers.pop().cancel()  # its client leaves
        await server.until(lambda: len(waiting()) == 1)
        for answer in answers[:2]:
            found = (await answer).json()["error"]
            assert found["code"] == "request_aborted"
            assert "while it waited for the model 'a' to be loaded" in found["message"]
        server.host("a").gate.set()
        assert (await answers[2]).status_code == 200
        server.host("b").gate = asyncio.Event()
        server.host("b").early_gate = asyncio.Event()
        for gate in (server.host("b").early_gate, server.host("b").gate):
            last = asyncio.ensure_future(server.complete("b"))
            await server.until(lambda: len(waiting()) == 1)
            aborted = await server.http.post("/abort_request", json={"abort_all": True})
            assert (aborted.json()["aborted"], len(waiting())) == (1, 0)
            if gate is server.host("b").early_gate:
                gate.set()
            assert (await last).status_code == 400
        gate.set()

    run(work, spec("a"), spec("b"), rules=ROOMY)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_a_line_of_a_batch_asks_three_times_for_a_model_that_cannot_be_loaded(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tries, "WAITS_S", (0.0,))
    body: dict[str, Any] = {"model": "bad", "prompt": "x", "max_tokens": 3}
    if path == "/v1/messages":
        body = {"model": "bad", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}

    async def work(server: Server) -> None:
        server.host("bad").num_crashes = 100
        asked: dict[str, Any]
        if path == "/v1/messages":
            asked = {"requests": [{"custom_id": "1", "params": body}]}
            batch = (await server.http.post("/v1/messages/batches", json=asked)).json()
        else:
            line = {"custom_id": "1", "method": "POST", "url": path, "body": body}
            file = {"file": ("lines.jsonl", json.dumps(line))}
            made = await server.http.post("/v1/files", files=file, data={"purpose": "batch"})
            asked = {"input_file_id": made.json()["id"], "endpoint": path}
            batch = (await server.http.post("/v1/batches", json=asked)).json()
        await server.until(lambda: server.batches.batches[batch["id"]].num_failed == 1)
        assert server.host("bad").num_loads == 6, "each time a killed process is tried again"

    run(work, spec("bad"), rules=ROOMY)


def test_a_fault_of_weft_in_a_load_is_told_and_nobody_waits_for_it() -> None:
    faults: list[object] = []

    async def work(server: Server) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: faults.append(context["exception"]))
        server.host("a").error = KeyError("engine")
        asked = [server.complete("a"), server.complete("b")]
        failed, good = await asyncio.gather(*asked)
        assert (failed.status_code, good.status_code) == (503, 200)
        assert "a fault of weft: KeyError('engine')" in failed.text
        server.host("a").error = None
        assert (await server.complete("a")).status_code == 200, "the next request loads it"
        gc.collect()

    run(work, spec("a"), spec("b"), rules=ROOMY)
    assert [str(one) for one in faults] == ["'engine'", "'engine'"], "each is in the log"


def test_a_model_that_is_too_large_is_refused() -> None:
    async def work(server: Server) -> None:
        found = await server.complete("a")
        assert found.status_code == 503
        assert "it needs 0.00 GB, and --memory is 0.00 GB" in found.text

    run(work, spec("a"), rules=Rules(50))


def test_requests_that_wait_are_shown_with_their_state() -> None:
    async def work(server: Server) -> None:
        gate = server.host("a").gate = asyncio.Event()
        waiting = asyncio.ensure_future(server.complete("a", request_id="mine"))
        await server.until(lambda: server.house.level("a") is Level.LOADING)
        found = (await server.http.get("/requests/cmpl-mine")).json()["requests"]
        assert [(one["state"], one["model"], one["position"]) for one in found] == [
            ("loading", "a", 0)
        ]
        assert "waits for the model 'a' to be loaded" in found[0]["text"][0]
        listed = (await server.http.get("/requests")).json()
        assert listed["queue"]["waiting_for_models"] == 1
        assert [one["rid"] for one in listed["requests"]] == ["mine"]
        gate.set()
        assert (await waiting).status_code == 200

    run(work, spec("a"))


def test_the_line_of_waiting_requests_is_bounded_and_so_is_its_time() -> None:
    async def work(server: Server) -> None:
        server.host("a").gate = asyncio.Event()
        first = asyncio.ensure_future(server.complete("a"))
        await server.until(lambda: server.house.line.num_waiting == 1)
        second = await server.complete("a")
        assert (second.status_code, second.headers["retry-after"]) == (503, "5")
        answer = await first
        assert (answer.status_code, "--load-wait-s" in answer.text) == (503, True)
        assert server.house.line.num_waiting == 0

    run(work, spec("a"), most_waiting=1, wait_s=0.2)


def test_a_stream_hears_comments_while_its_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several_app, "COMMENT_EVERY_S", 0.02)

    async def work(server: Server) -> None:
        server.host("a").load_s = 0.2
        found = await server.complete("a", stream=True)
        assert found.status_code == 200
        assert found.text.startswith(": 'a' is loading; 0 before it, about ")
        assert found.text.endswith("data: [DONE]\n\n")
        server.host("b").load_s = 0.2
        server.host("b").fault = "wool"
        body = {"model": "b", "max_tokens": 3, "stream": True, "messages": []}
        found = await server.http.post("/v1/messages", json=body)
        assert "event: error\ndata: " in found.text, "too late for a status"
        assert "wool" in found.text
        server.host("c").load_s = 0.2
        found = await server.complete("c", stream=True, temperature=-1)
        assert '"param":"temperature"' in found.text or "temperature" in found.text
        assert found.text.endswith("data: [DONE]\n\n")

    run(work, spec("a"), spec("b"), spec("c"), rules=ROOMY)


def test_a_client_that_leaves_waits_no_longer() -> None:
    async def work(server: Server) -> None:
        gate = server.host("a").gate = asyncio.Event()
        asked = asyncio.ensure_future(server.roster.use("a", "rid"))
        await server.until(lambda: server.house.line.num_waiting == 1)
        asked.cancel()
        await asyncio.wait({asked})
        assert server.house.line.num_waiting == 0
        gate.set()
        await server.until(lambda: server.house.level("a") is Level.READY)
        assert server.house.facts.models["a"].num_open == 0

    run(work, spec("a"))


def test_ollama_keeps_and_unloads_models() -> None:
    async def work(server: Server) -> None:
        body = {"model": "a", "prompt": "x", "stream": False, "options": {"num_predict": 1}}
        await server.http.post("/api/generate", json={**body, "keep_alive": "5m"})
        [shown] = (await server.http.get("/api/ps")).json()["models"]
        assert shown["name"] == "a"
        assert server.house.facts.models["a"].ttl_s == 300.0
        found = await server.http.post("/api/generate", json={"model": "a", "keep_alive": 0})
        assert '"done_reason":"unload"' in found.text
        assert server.house.level("a") is Level.ABSENT
        assert (await server.http.get("/api/ps")).json() == {"models": []}
        await server.http.post("/api/generate", json={**body, "keep_alive": "20ms"})
        await server.until(lambda: server.house.level("a") is Level.ABSENT)
        wrong = await server.http.post("/api/generate", json={**body, "keep_alive": "soon"})
        assert (wrong.status_code, "keep_alive is 'soon'" in wrong.text) == (400, True)
        show = (await server.http.post("/api/show", json={"model": "a"})).json()
        assert show["capabilities"] == ["completion"]
        assert server.house.level("a") is Level.ABSENT, "facts load nothing"

    run(work, spec("a"))


def test_an_operator_loads_and_unloads_and_administration_loads_nothing() -> None:
    async def work(server: Server) -> None:
        found = await server.http.post("/flush_cache?model=b")
        assert (found.status_code, found.json()["error"]["code"]) == (409, "model_not_loaded")
        assert (await server.http.post("/models/load", json={"model": "b"})).status_code == 200
        assert server.house.level("b") is Level.READY
        assert (await server.http.post("/flush_cache?model=b")).status_code == 200
        server.front("b").engine.hold = True
        open_one = asyncio.ensure_future(server.complete("b"))
        await server.until(lambda: server.front("b").engine.running)
        unloading = asyncio.ensure_future(server.roster.unload("b"))
        await asyncio.sleep(0.02)
        assert not unloading.done(), "a request is open"
        aborted = await server.http.post("/abort_request", json={"abort_all": True})
        assert aborted.json() == {"aborted": 1}
        await unloading
        await open_one
        assert server.house.level("b") is Level.ABSENT
        assert (await server.http.get("/health")).status_code == 200

    run(work, spec("a"), spec("b", pin=True))


def test_random_requests_with_loads_unloads_and_kills_are_all_answered() -> None:
    """Three models share the memory of two. Each answer is that of its model alone."""
    rng = random.Random(7)
    names = ("a", "b", "c")

    async def ask(server: Server, name: str, delay_s: float) -> tuple[int, str]:
        await asyncio.sleep(delay_s)
        found = await server.complete(name, max_tokens=5, stream=rng.random() < 0.3)
        if found.status_code == 200 and "error" not in found.text:
            text = found.text.count(name) >= 5 if "data:" in found.text else name * 5 in found.text
            assert text, found.text
        return found.status_code, found.text

    async def disturb(server: Server) -> None:
        for _ in range(30):
            await asyncio.sleep(0.05)
            name = rng.choice(names)
            host = server.host(name)
            if rng.random() < 0.5 and server.house.level(name) is Level.READY:
                assert host.front is not None
                host.front.kill()
            else:
                await server.roster.unload(name)

    async def watch(server: Server) -> None:
        while True:
            facts = server.house.facts
            assert facts.num_bytes <= facts.rules.budget_bytes
            loaded = [one for one in names if server.host(one).front is not None]
            assert len(loaded) <= 2
            await asyncio.sleep(0.001)

    async def work(server: Server) -> None:
        watching = asyncio.ensure_future(watch(server))
        disturbing = asyncio.ensure_future(disturb(server))
        asked = [ask(server, rng.choice(names), rng.uniform(0, 1.5)) for _ in range(300)]
        answers = await asyncio.gather(*asked)
        await disturbing
        assert not watching.done(), "the budget was exceeded"
        watching.cancel()
        assert len(answers) == 300
        for status, text in answers:
            assert status == 200 or "killed" in text or "send the request again" in text
        assert server.house.line.num_waiting == 0
        assert all(not one.num_open for one in server.house.facts.models.values())

    rules = Rules(170, patience_s=0.05, stay_loads=1, least_stay_s=0.02)
    run(work, *map(spec, names), rules=rules, most_waiting=1_000)


def test_a_drain_refuses_those_who_wait() -> None:
    async def work(server: Server) -> None:
        server.host("a").gate = asyncio.Event()
        waiting = asyncio.ensure_future(server.complete("a"))
        await server.until(lambda: server.house.line.num_waiting == 1)
        server.roster.readiness.drain()
        found = await waiting
        assert (found.status_code, "shutting down" in found.text) == (503, True)
        assert (await server.complete("a")).status_code == 503

    run(work, spec("a"))


def test_an_alias_is_listed_for_its_model_and_not_for_an_adapter_of_it() -> None:
    async def work(server: Server) -> None:
        await server.complete("a")
        front = server.host("a").front
        assert front is not None
        adapters = front.served.context.adapters
        adapters.by_name["sea"] = NamedAdapter("sea", "1", "sea", False, 0.0)
        listed = (await server.http.get("/v1/models")).json()["data"]
        assert {one["id"]: one["aliases"] for one in listed} == {"a": ["other"], "sea": []}

    run(work, spec("a", aliases=("other",)))


def test_adapters_lead_to_their_model_also_while_it_is_not_loaded() -> None:
    async def work(server: Server) -> None:
        server.host("b").adapter_names = {"sea"}
        server.host("b").offered_adapters = {"hills"}
        for name in ("sea", "b:sea", "hills"):
            await server.roster.unload("b")
            assert (server.roster.find(name), server.host("b").front) == ("b", None)
        assert (await server.complete("valleys")).status_code == 404

    run(work, spec("a"), spec("b"), rules=ROOMY)
