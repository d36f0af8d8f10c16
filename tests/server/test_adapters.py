"""Adapters over HTTP: routes that load and unload them, and every API that names one, with a real
model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import weft
from tests.nano_adapters import NANO, make_adapter
from tests.server.real_engine import RealServer, serving
from weft.config.options import SettingsError

PROMPT = "Once upon a time there was a little"
ASKED = {"max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for number in range(4):
        make_adapter(folder / f"a{number}", number)
    return folder


@pytest.fixture(scope="module")
def loading(root: Path) -> Iterator[RealServer]:
    with serving(
        NANO,
        context_length=256,
        kv_tokens=4_096,
        weights_root=str(root),
        enable_lora=True,
        max_loras_per_batch=2,
        max_loaded_loras=2,
    ) as server:
        yield server


@pytest.fixture
def server(loading: RealServer) -> Iterator[RealServer]:
    yield loading
    unload_all(loading)


def unload_all(server: RealServer) -> None:
    for one in server.get("/v1/models").json()["data"]:
        if one["id"] != "tiny":
            answer = server.post("/unload_lora_adapter", lora_name=one["id"])
            assert answer.status_code == 200, answer.text
    server.post("/flush_cache")
    server.seen.clear()


def load(server: RealServer, name: str, path: str = "", **others: Any) -> httpx.Response:
    return server.post("/load_lora_adapter", lora_name=name, lora_path=path or name, **others)


def text(server: RealServer, model: str = "tiny", **others: Any) -> str:
    answer = server.post("/v1/completions", prompt=PROMPT, model=model, **ASKED, **others)
    assert answer.status_code == 200, answer.text
    said: str = answer.json()["choices"][0]["text"]
    return said


def test_an_adapter_is_loaded_named_in_every_way_and_unloaded(server: RealServer) -> None:
    base = text(server)
    answer = load(server, "a0")
    assert answer.status_code == 200
    assert answer.json() == {
        "success": True,
        "error_message": "",
        "loaded_adapters": {"a0": "a0"},
    }
    own = text(server, "a0")
    assert own != base
    assert own == text(server, "tiny:a0") == text(server, lora_path="a0")
    assert own == text(server, "little:a0"), "an alias of the model"
    assert text(server) == base
    [first, second] = server.get("/v1/models").json()["data"]
    assert first["id"] == "tiny"
    assert first["parent"] is None
    assert second["id"] == "a0"
    assert second["parent"] == "tiny"
    assert second["root"] == "a0"
    assert server.get("/v1/models/a0").json()["parent"] == "tiny"
    answer = server.post("/unload_lora_adapter", lora_name="a0")
    assert answer.json()["loaded_adapters"] == {}
    assert server.post("/v1/completions", prompt=PROMPT, model="a0").status_code == 404


def test_every_api_knows_adapters(server: RealServer) -> None:
    load(server, "a0")
    messages = [{"role": "user", "content": "Tell me a story."}]
    native = {"max_new_tokens": 12, "temperature": 0}

    def said(path: str, **body: Any) -> str:
        answer = server.post(path, **body)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        if path == "/generate":
            return str(found["text"])
        if path == "/v1/messages":
            return str(found["content"])
        if path == "/v1/responses":
            return str([item.get("content") for item in found["output"]])
        if path.startswith("/api/"):
            return str(found.get("message", found.get("response")))
        return str(found["choices"][0]["message"]["content"])

    for path, body in {
        "/v1/chat/completions": {"messages": messages, **ASKED},
        "/v1/messages": {"messages": messages, **ASKED},
        "/v1/responses": {"input": "Tell me a story.", "max_output_tokens": 12, "temperature": 0},
        "/api/chat": {
            "messages": messages,
            "stream": False,
            "options": {"num_predict": 12, "temperature": 0},
        },
        "/api/generate": {
            "prompt": PROMPT,
            "stream": False,
            "options": {"num_predict": 12, "temperature": 0},
        },
    }.items():
        tag = ":latest" if path.startswith("/api/") else ""
        assert said(path, model=f"a0{tag}", **body) != said(path, model="tiny", **body), path
    base = said("/generate", text=PROMPT, sampling_params=native)
    own = said("/generate", text=PROMPT, sampling_params=native, lora_path="a0")
    assert base != own
    both = server.post(
        "/generate", text=[PROMPT] * 3, sampling_params=native, lora_path=["a0", None, "a0"]
    ).json()
    assert [one["text"] for one in both] == [own, base, own]
    answer = server.post("/v1/chat/completions", model="a0", messages=messages, n=2, **ASKED)
    assert answer.json()["model"] == "a0"
    contents = {choice["message"]["content"] for choice in answer.json()["choices"]}
    assert len(contents) == 1
    labels = {"query": PROMPT, "items": [" girl"], "label_token_ids": [5, 6]}
    scores = [
        server.post("/v1/score", model=model, **labels).json()["scores"] for model in ("tiny", "a0")
    ]
    assert scores[0] != scores[1]


def test_an_answer_names_the_adapter_that_gave_it(server: RealServer) -> None:
    load(server, "a0")
    messages = [{"role": "user", "content": "Hi"}]
    short = {"max_tokens": 1}
    few = {"stream": False, "options": {"num_predict": 1}}
    for path, body in {
        "/v1/completions": {"prompt": "a", **short},
        "/v1/chat/completions": {"messages": messages, **short},
        "/v1/messages": {"messages": messages, **short},
        "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
        "/v1/score": {"query": "a", "items": ["b"], "label_token_ids": [5, 6]},
        "/api/chat": {"messages": messages, **few},
        "/api/generate": {"prompt": "a", **few},
    }.items():
        for model, named in (("a0", "a0"), ("tiny:a0", "a0"), ("tiny", "tiny")):
            answer = server.post(path, model=model, **body)
            assert answer.json()["model"] == named, (path, answer.text)
        if not path.startswith("/api/"):
            assert server.post(path, lora_path="a0", **body).json()["model"] == "a0", path
    listed = server.get("/api/tags").json()["models"]
    assert [one["name"] for one in listed] == ["tiny", "a0"]


@pytest.mark.parametrize("name", ["tiny", "tiny:a0", "little", "little:a0", "default"])
def test_no_adapter_stands_under_a_name_of_the_model(server: RealServer, name: str) -> None:
    before = text(server)
    answer = load(server, name, "a0")
    assert answer.status_code == 400
    assert f"an adapter cannot have the name '{name}'" in answer.json()["error_message"]
    assert text(server) == before


def test_prefixes_are_found_again_within_an_adapter_alone(server: RealServer) -> None:
    load(server, "a0")
    prompt = list(range(10, 90))

    def cached(model: str) -> int:
        answer = server.post("/v1/completions", prompt=prompt, model=model, **ASKED).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached(model) for model in ("a0", "tiny", "a0", "tiny")] == [0, 0, 79, 79]


def test_other_weights_under_the_same_name_change_answers_at_once(
    server: RealServer, root: Path
) -> None:
    make_adapter(root / "changing", 20)
    load(server, "x", "changing")
    before = text(server, "x")
    make_adapter(root / "changing", 21)
    assert text(server, "x") == before
    refused = load(server, "x", "changing")
    assert refused.status_code == 400
    assert "'x' is loaded already" in refused.json()["error_message"]
    answer = server.post(
        "/v1/load_lora_adapter", lora_name="x", lora_path="changing", load_inplace=True
    )
    assert answer.text == "Success: LoRA adapter 'x' added successfully."
    assert text(server, "x") != before
    make_adapter(root / "changing", 20)
    assert load(server, "x", "changing", load_inplace=True).status_code == 200
    assert text(server, "x") == before
    answer = server.post("/v1/unload_lora_adapter", lora_name="x")
    assert answer.text == "Success: LoRA adapter 'x' removed successfully."


def test_a_session_and_log_probabilities_go_with_an_adapter(server: RealServer) -> None:
    load(server, "a0")
    assert server.post("/open_session", session_id="s", capacity_of_str_len=200).status_code == 200
    said = []
    for path in ("a0", "a0", None):
        answer = server.post(
            "/generate",
            text=PROMPT,
            sampling_params={"max_new_tokens": 6, "temperature": 0},
            session_params={"id": "s"},
            lora_path=path,
            return_logprob=True,
            logprob_start_len=0,
        )
        assert answer.status_code == 200, answer.text
        said.append(answer.json())
    alone = server.post(
        "/generate",
        text=PROMPT,
        sampling_params={"max_new_tokens": 6, "temperature": 0},
        lora_path="a0",
    )
    assert said[0]["text"] == alone.json()["text"]


def test_names_that_stand_for_nothing_are_refused_with_those_that_there_are(
    server: RealServer,
) -> None:
    load(server, "a0")
    for body in ({"model": "b"}, {"model": "tiny:b"}, {"lora_path": "b"}):
        answer = server.post("/v1/completions", prompt=PROMPT, **body)
        assert answer.status_code == 404, body
        assert "'a0'" in answer.json()["error"]["message"]
    answer = server.post("/generate", text=[PROMPT] * 2, lora_path=["a0"])
    assert answer.status_code == 400
    assert server.get("/v1/models/b").status_code == 404
    answer = server.post("/unload_lora_adapter", lora_name="b")
    assert (answer.status_code, answer.json()["success"]) == (400, False)
    assert answer.json()["error"] | {"message": ""} == {
        "message": "",
        "type": "invalid_request_error",
        "param": "lora_name",
        "code": 400,
    }
    assert server.post("/v1/unload_lora_adapter", lora_name="b").status_code == 404


def test_an_adapter_that_cannot_be_loaded_is_named_and_changes_nothing(
    server: RealServer, root: Path, tmp_path: Path
) -> None:
    load(server, "a0")
    load(server, "a1")
    outside = make_adapter(tmp_path / "outside", 1)
    (root / "link").unlink(missing_ok=True)
    (root / "link").symlink_to(outside)
    make_adapter(root / "large", 1, rank=80, endings=("q_proj",))
    empty = make_adapter(root / "empty", 1)
    (empty / "adapter_model.safetensors").write_bytes(b"")
    for path, named in {
        str(outside): "--weights-root",
        "../outside": "--weights-root",
        "link": "--weights-root",
        "nowhere": "nowhere",
        "large": "80",
        "empty": "adapter_model.safetensors",
    }.items():
        answer = load(server, "new", path)
        assert answer.status_code == 400, path
        told = answer.json()
        assert named in told["error_message"], told
        assert told["error"]["param"] == "lora_path"
        assert "\n" not in told["error_message"]
        assert str(root) not in told["error_message"]
        assert told["loaded_adapters"] == {"a0": "a0", "a1": "a1"}
    server.post("/unload_lora_adapter", lora_name="a1")
    named = load(server, "bad\nname", "a1")
    assert (named.status_code, named.json()["error"]["param"]) == (400, "lora_name")
    assert load(server, "p", "a1", pinned=True).status_code == 200
    answer = load(server, "q", "a2", pinned=True)
    assert "--max-loras-per-batch" in answer.json()["error_message"]


def test_the_one_not_used_for_longest_makes_room_and_its_name_goes(server: RealServer) -> None:
    load(server, "a2")
    alone = text(server, "a2")
    server.post("/unload_lora_adapter", lora_name="a2")
    load(server, "a0")
    load(server, "a1")
    text(server, "a0")
    assert load(server, "a2").json()["loaded_adapters"] == {"a0": "a0", "a2": "a2"}
    server.post("/flush_cache")
    assert text(server, "a2") == alone
    answer = server.post("/v1/completions", prompt=PROMPT, model="a1")
    assert answer.status_code == 404
    load(server, "again", "a0")
    server.post("/unload_lora_adapter", lora_name="a0")
    assert text(server, "again")


def test_unloading_waits_for_a_running_stream(server: RealServer) -> None:
    load(server, "a0")
    whole = text(server, "a0", ignore_eos=True)

    async def race() -> tuple[httpx.Response, list[str]]:
        ended: list[str] = []

        async def run() -> httpx.Response:
            answer = await server.http.post(
                "/v1/completions",
                json={"prompt": PROMPT, "model": "a0", "ignore_eos": True, **ASKED},
            )
            ended.append("answer")
            return answer

        async def unload() -> None:
            await server.http.post("/unload_lora_adapter", json={"lora_name": "a0"})
            ended.append("unloaded")

        running = asyncio.ensure_future(run())
        while server.client.num_open == 0:
            await asyncio.sleep(0)
        unloading = asyncio.ensure_future(unload())
        await asyncio.sleep(0.01)
        refused = await server.http.post("/v1/completions", json={"prompt": PROMPT, "model": "a0"})
        assert refused.status_code == 404
        await unloading
        return await running, ended

    answer, ended = server.wait(race())
    assert answer.json()["choices"][0]["text"] == whole
    assert ended == ["answer", "unloaded"]


def test_a_server_without_adapters_says_which_option_takes_them() -> None:
    with serving(NANO, context_length=64, kv_tokens=512) as server:
        answer = load(server, "a0")
        assert answer.status_code == 400
        assert "--enable-lora" in answer.json()["error_message"]
        answer = server.post("/v1/completions", prompt="a", lora_path="a0")
        assert answer.status_code == 404


def test_only_some_modules_may_be_changed_if_the_settings_say_so(root: Path) -> None:
    make_adapter(root / "qv", 5, endings=("q_proj", "v_proj"))
    with serving(
        NANO,
        context_length=64,
        kv_tokens=512,
        weights_root=str(root),
        enable_lora=True,
        lora_target_modules="q_proj,v_proj",
    ) as server:
        assert load(server, "qv").status_code == 200
        answer = load(server, "a0")
        assert "--lora-target-modules" in answer.json()["error_message"]


@pytest.fixture(scope="module")
def offered(root: Path) -> Iterator[RealServer]:
    with serving(
        NANO,
        context_length=256,
        kv_tokens=4_096,
        weights_root=str(root / "a0"),
        lora_dir=str(root),
        max_loaded_loras=2,
    ) as server:
        yield server


@pytest.fixture
def offering(offered: RealServer) -> Iterator[RealServer]:
    yield offered
    unload_all(offered)


def test_an_adapter_that_is_offered_is_loaded_when_a_request_first_names_it(
    offering: RealServer,
) -> None:
    base = text(offering)
    own = text(offering, "a1")
    assert own != base
    assert own == text(offering, "tiny:a1") == text(offering, lora_path="a1")
    [_, listed] = offering.get("/v1/models").json()["data"]
    assert listed["id"] == "a1"
    assert listed["root"] == "a1"
    answer = offering.post("/generate", text=[PROMPT, PROMPT], lora_path=["a2", None])
    assert answer.status_code == 200
    assert {one["id"] for one in offering.get("/v1/models").json()["data"]} == {"tiny", "a1", "a2"}
    # A third makes room, and the first comes back.
    text(offering, "a3")
    assert text(offering, "a1") == own


def test_requests_at_once_that_name_an_offered_adapter_load_it_once(offering: RealServer) -> None:
    async def ask() -> list[httpx.Response]:
        body = {"prompt": PROMPT, "model": "a1", **ASKED}
        asked = [offering.http.post("/v1/completions", json=body) for _ in range(4)]
        return await asyncio.gather(*asked)

    answers = offering.wait(ask())
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
    assert sum(type(message).__name__ == "LoadLoraAdapter" for message in offering.seen) == 1


def test_the_tag_of_ollama_names_an_offered_adapter_too(offering: RealServer) -> None:
    asked = {"prompt": PROMPT, "stream": False, "options": {"num_predict": 1}}
    answer = offering.post("/api/generate", model="a1:latest", **asked)
    assert answer.status_code == 200
    assert answer.json()["model"] == "a1"
    unknown = offering.post("/api/generate", model="none:latest", **asked)
    assert unknown.status_code == 404


@pytest.mark.parametrize("name", ["..", ".", "a0/../a1", "/etc", "none", "a\0b", "x" * 5_000])
def test_nothing_but_the_folders_of_the_folder_is_offered(offering: RealServer, name: str) -> None:
    answer = offering.post("/v1/completions", prompt=PROMPT, model=name, **ASKED)
    assert answer.status_code in (400, 404)
    assert "error" in answer.json()


def test_an_offered_adapter_that_cannot_be_read_says_so(
    offering: RealServer, root: Path, tmp_path: Path
) -> None:
    broken = make_adapter(root / "broken", 1)
    (broken / "adapter_model.safetensors").write_bytes(b"nothing")
    outside = make_adapter(tmp_path / "outside", 1)
    (root / "leads_out").symlink_to(outside)
    answer = offering.post("/v1/completions", prompt=PROMPT, model="broken", **ASKED)
    assert answer.status_code == 400
    assert "the adapter 'broken' cannot be loaded" in answer.json()["error"]["message"]
    assert (
        offering.post("/v1/completions", prompt=PROMPT, model="leads_out", **ASKED).status_code
        == 404
    )
    assert text(offering, "a1")


def test_an_offered_adapter_without_room_is_refused_for_now(
    offering: RealServer, root: Path
) -> None:
    for name in ("a1", "a2"):
        assert load(offering, name, str(root / name), pinned=True).status_code == 200
    answer = offering.post("/v1/completions", prompt=PROMPT, model="a3", **ASKED)
    assert answer.status_code == 503
    assert "all are pinned or in use" in answer.json()["error"]["message"]
    assert int(answer.headers["retry-after"]) > 0
    assert text(offering, "a1") != text(offering, "a2")


def test_a_program_names_offered_adapters_too(root: Path) -> None:
    llm = weft.LLM(str(NANO), threads=1, context_length=256, kv_tokens=2_048, lora_dir=str(root))
    params = weft.SamplingParams(max_new_tokens=8, temperature=0)
    [own] = llm.generate([PROMPT], params, adapter="a1")
    [base] = llm.generate([PROMPT], params)
    assert own.text != base.text
    with pytest.raises(ValueError, match="'none' does not exist"):
        llm.generate([PROMPT], params, adapter="none")


def test_a_folder_of_adapters_that_is_not_there_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="which is not a folder"):
        weft.LLM(str(NANO), lora_dir=str(tmp_path / "none"))
