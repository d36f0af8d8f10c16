"""Models of all kinds beside each other on one real server: text with adapters and sessions, on one
engine and on two, vectors, scores, pictures, sounds; with a journal for each load."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import save_file

import weft
from tests.e2e.media_models import MODELS, MediaModel
from tests.e2e.media_parts import picture, sound
from tests.e2e.server import HANG_S, Server
from tests.models import speaking
from tests.models.pooled import PooledReference, make_pooled
from weft.cli.main import main

NANO = Path(weft.__file__).parent / "bundled" / "weft-nano"
PROMPT = "Once upon a time there was a small town by the sea, and in it"
COUNT = 12
PAUSE_S = 0.05  # between two looks at what takes seconds
NAMES = {"nano", "twin", "vectors", "scores", "eyes", "ears"}


class House(NamedTuple):
    """The server, and what its models are."""

    server: Server
    http: httpx.Client
    folder: Path
    vectors: PooledReference
    eyes: MediaModel
    ears: MediaModel

    def ok(self, path: str, **body: Any) -> Any:
        found = self.http.post(path, json=body)
        assert found.status_code == 200, found.text
        return found.json()

    def text(self, model: str, prompt: str = PROMPT, **more: Any) -> str:
        more = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True, **more}
        found = self.ok("/v1/completions", model=model, prompt=prompt, **more)
        return str(found["choices"][0]["text"])

    def state(self, model: str) -> str:
        listed = self.http.get("/models").json()["data"]
        return str(next(one["status"]["value"] for one in listed if one["id"] == model))


def write_adapter(folder: Path, seed: int) -> None:
    """An adapter of the bundled model that changes what it says."""
    config = json.loads((NANO / "config.json").read_text())
    rank, size = 4, config["hidden_size"]
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, size, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(size, rank, generator=generator)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    asked = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(asked))


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("several")
    torch.set_num_threads(1)
    write_adapter(folder / "adapters" / "sea", 1)
    vectors = make_pooled("bert-mean", folder / "vectors")
    make_pooled("bert-pair", folder / "scores")
    eyes = MODELS["smolvlm"](folder / "eyes")
    ears = MODELS["qwen2-audio"](folder / "ears")
    config = folder / "weft.toml"
    config.write_text(
        f"""
        memory = 8
        models_max = 8
        journal = "{folder}/journals"
        state_dir = "{folder}/state"
        kv_tokens = 2048
        hang_after_s = 2
        hang_timeout_s = 2

        [models.nano]
        path = "{NANO}"
        enable_lora = true
        max_lora_rank = 8
        lora_dir = "{folder}/adapters"

        [models.twin]
        path = "{NANO}"
        dp_size = 2
        on_start = false

        [models.vectors]
        path = "{vectors.folder}"
        on_start = false

        [models.scores]
        path = "{folder}/scores"
        on_start = false

        [models.eyes]
        path = "{eyes.folder}"
        dtype = "float32"
        on_start = false

        [models.ears]
        path = "{ears.folder}"
        dtype = "float32"
        on_start = false
        """
    )
    small = ("--threads", "1", "--max-running-requests", "8")
    server = Server("--config", str(config), small=small)
    try:
        with httpx.Client(base_url=server.url, timeout=HANG_S) as http:
            yield House(server, http, folder, vectors, eyes, ears)
    finally:
        server.stop()


def test_an_adapter_belongs_to_its_model_and_comes_back_with_it(house: House) -> None:
    plain = house.text("nano")
    adapted = house.text("sea")
    assert adapted not in (plain, house.text("twin"))
    assert house.text("nano:sea") == adapted
    cards = {one["id"]: one for one in house.http.get("/v1/models").json()["data"]}
    assert cards["sea"]["parent"] == "nano"
    house.ok("/models/unload", model="nano")
    assert house.state("nano") == "unloaded"
    assert house.text("nano:sea") == adapted
    assert house.text("nano") == plain
    wrong = house.http.post("/v1/completions", json={"model": "twin:sea", "prompt": "x"})
    assert wrong.status_code == 404


def test_two_engines_answer_for_one_model_and_one_that_is_killed_is_replaced(house: House) -> None:
    plain = house.text("nano")
    house.ok("/models/load", model="twin")
    until_both_are_up(house)
    assert [house.text("twin", routed_dp_rank=rank) for rank in (0, 1)] == [plain, plain]
    loads = [one for one in house.http.get("/v1/loads").json()["loads"] if one["model"] == "twin"]
    assert sorted(one["dp_rank"] for one in loads) == [0, 1]
    killed = next(one for one in house.server.find_engines() if has_journal_of("twin", one))
    killed.kill()
    while not numbers(house, "engine_restarts_total"):
        assert house.text("nano") == plain, "it does not notice"
        time.sleep(PAUSE_S)
    until_both_are_up(house)
    assert [house.text("twin", routed_dp_rank=rank) for rank in (0, 1)] == [plain, plain]


def test_an_engine_that_is_stopped_is_replaced_and_others_do_not_notice(house: House) -> None:
    plain = house.text("nano")
    house.ok("/models/load", model="vectors")
    engines = house.server.find_engines()
    stopped = next(one for one in engines if has_journal_of("vectors", one))
    stopped.suspend()
    asked = {"model": "vectors", "input": [[2, 8, 9]]}
    answer = house.http.post("/v1/embeddings", json=asked)
    assert answer.status_code == 503
    assert "no sign of life" in answer.text
    while house.state("vectors") == "loaded":
        assert house.text("nano") == plain
        time.sleep(PAUSE_S)
    (found,) = house.ok("/v1/embeddings", **asked)["data"]
    assert np.allclose(found["embedding"], house.vectors.vector([2, 8, 9]), atol=2e-2)
    assert not stopped.is_running()
    assert house.text("nano") == plain


def has_journal_of(model: str, engine: psutil.Process) -> bool:
    return any(f"/journals/{model}/" in one.path for one in engine.open_files())


def numbers(house: House, name: str) -> float:
    """The sum of a metric over the engines of the model `twin`."""
    lines = house.http.get("/metrics").text.splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith(f"weft:{name}{{") and 'model_name="twin"' in line
    )


def until_both_are_up(house: House) -> None:
    while numbers(house, "engine_up") < 2:
        time.sleep(PAUSE_S)


def test_a_batch_asks_several_models_and_lines_for_others_have_errors(house: House) -> None:
    """Models are loaded for it; one that is unloaded, and an adapter that is removed meanwhile,
    cost only the lines that name what is not there any more."""
    models = ["nano", "twin", "nano:sea", "gone", "nano:gone", "vectors"]
    lines: list[dict[str, Any]] = []
    for index in range(60):
        body: dict[str, Any] = {
            "model": models[index % len(models)],
            "prompt": PROMPT,
            "max_tokens": 4,
        }
        body |= {"ignore_eos": True, "temperature": 0}
        lines.append({"custom_id": f"c{index}", "url": "/v1/completions", "body": body})
    expected = {model: house.text(model, max_tokens=4) for model in models[:3]}
    house.ok("/models/unload", model="nano")
    found = batch_of(house, lines)
    assert sorted(found) == sorted(line["custom_id"] for line in lines)
    for line in lines:
        result = found[line["custom_id"]]["response"]
        model = line["body"]["model"]
        if model in expected:
            assert result["status_code"] == 200, result
            assert result["body"]["choices"][0]["text"] == expected[model]
        else:
            assert result["status_code"] == (400 if model == "vectors" else 404), result
            assert result["body"]["error"]["message"]
    house.ok("/unload_lora_adapter?model=nano", lora_name="sea")
    adapter = house.folder / "adapters" / "sea"
    adapter.rename(house.folder / "removed")
    try:
        found = batch_of(house, lines[:6])
        status = {id: one["response"]["status_code"] for id, one in found.items()}
        assert status == {"c0": 200, "c1": 200, "c2": 404, "c3": 404, "c4": 404, "c5": 400}
    finally:
        (house.folder / "removed").rename(adapter)


def batch_of(house: House, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The results of a batch by their `custom_id`."""
    files = {"file": ("in.jsonl", "\n".join(map(json.dumps, lines)).encode())}
    file = house.http.post("/v1/files", files=files, data={"purpose": "batch"}).json()
    wanted = {"input_file_id": file["id"], "endpoint": "/v1/completions"}
    batch = house.ok("/v1/batches", **wanted)
    while (batch := house.http.get(f"/v1/batches/{batch['id']}").json())["status"] != "completed":
        assert batch["status"] in ("validating", "in_progress", "finalizing"), batch
        time.sleep(0.05)
    found: dict[str, Any] = {}
    for name in ("output_file_id", "error_file_id"):
        for line in house.http.get(f"/v1/files/{batch[name]}/content").text.splitlines():
            result = json.loads(line)
            assert result["custom_id"] not in found
            found[result["custom_id"]] = result
    return found


def test_a_session_outlives_its_model(house: House) -> None:
    params = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    opened = house.ok("/open_session?model=nano", capacity_of_str_len=500)
    first = house.ok(
        "/generate?model=nano", text=PROMPT, sampling_params=params, session_params={"id": opened}
    )
    house.ok("/models/unload", model="nano")
    turn = {"id": opened, "rid": first["meta_info"]["id"]}
    second = house.ok(
        "/generate?model=nano", text=" and so", sampling_params=params, session_params=turn
    )
    whole = house.ok(
        "/generate?model=nano",
        text=PROMPT + first["text"] + " and so",
        sampling_params=params,
    )
    assert second["text"] == whole["text"]
    other = house.http.post(
        "/generate?model=twin",
        json={"text": "x", "sampling_params": params, "session_params": turn},
    )
    assert other.status_code == 404, "it belongs to its model"


def test_vectors_and_scores_come_from_models_for_them(house: House) -> None:
    ids = [2, 8, 9, 12, 3]
    found = house.ok("/v1/embeddings", model="vectors", input=[ids])
    vector = np.asarray(found["data"][0]["embedding"])
    assert np.allclose(vector, house.vectors.vector(ids), atol=2e-2)
    documents = ["a b c", "x y z", "b c d e"]
    ranked = house.ok("/v1/rerank", model="scores", query="a b", documents=documents)["results"]
    scores = [one["relevance_score"] for one in ranked]
    assert (sorted(scores, reverse=True), len(set(scores))) == (scores, 3)
    wrong = house.http.post("/v1/embeddings", json={"model": "scores", "input": "a"})
    assert wrong.status_code == 400
    assert house.text("nano")


@pytest.mark.parametrize("name", ["eyes", "ears"])
def test_pictures_and_sounds_get_the_answers_of_their_models(house: House, name: str) -> None:
    model: MediaModel = getattr(house, name)
    item = picture(1, 60, 40) if name == "eyes" else sound(1, 9_000)
    content = [{"type": "text", "text": "What is this?"}, item.part]
    found = house.ok(
        "/v1/chat/completions",
        model=name,
        messages=[{"role": "user", "content": content}],
        max_tokens=COUNT,
        min_tokens=COUNT,
        temperature=0,
        return_token_ids=True,
    )
    asked = [{"role": "user", "content": [content[0], {"type": model.kind}]}]
    expected = model.answer(asked, [item.value], COUNT)
    assert found["choices"][0]["token_ids"] == expected
    refused = house.http.post(
        "/v1/chat/completions",
        json={"model": "nano", "messages": [{"role": "user", "content": content}]},
    )
    assert refused.status_code == 400, "a model of text takes none"


def test_the_loads_are_those_of_one_rank_and_of_a_page_if_asked(house: House) -> None:
    house.ok("/models/load", model="nano")
    house.ok("/models/load", model="twin")
    until_both_are_up(house)
    found = house.http.get("/v1/loads?dp_rank=1").json()
    assert [(one["model"], one["dp_rank"]) for one in found["loads"]] == [("twin", 1)]
    assert found["capacity"]["full"] is None
    wrong = house.http.get("/v1/loads?dp_rank=2")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "dp_rank")
    page = house.http.get("/v1/loads?format=prometheus").text
    assert 'weft:load_num_running_reqs{model_name="twin",dp_rank="1"} 0' in page
    assert 'weft:load_num_running_reqs{model_name="nano",dp_rank="0"} 0' in page


def test_tokens_of_a_response_are_counted_by_the_model_that_is_named_or_the_default(
    house: House,
) -> None:
    asked = {"input": "It was late."}
    counted = [
        house.ok("/v1/responses/input_tokens", **asked, **more) for more in ({}, {"model": "nano"})
    ]
    assert counted[0] == counted[1]
    assert counted[0]["input_tokens"] > 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_form_names_the_model_that_hears(house: House, stream: bool) -> None:
    if not stream:
        house.ok("/models/unload", model="ears")
    asked: dict[str, str] = {"model": "ears"} | ({"stream": "true"} if stream else {})
    found = house.http.post(
        "/v1/audio/transcriptions",
        data=asked,
        files={"file": ("sound.wav", speaking.wav(speaking.sound(12_000)))},
    )
    assert found.status_code == 200, found.text
    assert ("transcript.text.done" in found.text) is stream
    assert house.state("ears") == "loaded"
    nowhere = house.http.post(
        "/v1/audio/transcriptions",
        data={"model": "nose"},
        files={"file": ("sound.wav", b"RIFF")},
    )
    assert (nowhere.status_code, nowhere.json()["error"]["code"]) == (404, "model_not_found")


def test_every_load_has_a_journal_that_can_be_replayed(house: House) -> None:
    """The last test: it stops the server."""
    for name in NAMES:
        house.ok("/models/unload", model=name)
    page = house.http.get("/metrics").text
    assert 'weft:model_unloads_total{model_name="eyes",why="asked"}' in page
    assert house.server.stop() == 0
    journals = house.folder / "journals"
    assert {one.name for one in journals.iterdir()} == NAMES
    assert len([*(journals / "nano").iterdir()]) >= 3, "one for each load"
    for name in ("nano/000001", "eyes/000001"):
        assert main(["replay", str(journals / name)]) == 0
