"""New weights for a real server, and its memory back and forth, over HTTP."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save, save_file

from tests.e2e.server import Server
from weft.weights.known import BUNDLED

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`old` is the bundled model; in `new` its last norm is turned around, so that it says
    something else."""
    root = tmp_path_factory.mktemp("root")
    shutil.copytree(BUNDLED, root / "old")
    shutil.copytree(BUNDLED, root / "new")
    (file,) = (root / "new").glob("*.safetensors")
    tensors = load_file(file)
    save_file({**tensors, NORM: -tensors[NORM]}, file)
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Server]:
    server = Server("--dtype", "float32", "--weights-root", str(root))
    yield server
    assert server.stop() == 0


def generate(server: Server, num_tokens: int = 8) -> dict[str, Any]:
    answer = server.post(
        "/generate",
        text="def f(x):\n",
        sampling_params={"temperature": 0, "max_new_tokens": num_tokens},
    )
    return dict(answer)


def refused(server: Server, path: str, **body: object) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as raised:
        server.post(path, **body)
    with raised.value as answer:
        return answer.code, json.load(answer)["error"]["message"]


def test_weights_change_while_the_server_serves_and_answers_say_which_they_are(
    server: Server,
) -> None:
    before = generate(server)
    assert before["meta_info"]["weight_version"] == "default"
    answers: list[dict[str, Any]] = []
    running = threading.Thread(target=lambda: answers.append(generate(server, 400)))
    running.start()
    answer = server.post("/update_weights_from_disk", model_path="new", weight_version="turned")
    assert (answer["success"], answer["weight_version"]) == (True, "turned")
    after = generate(server)
    running.join()
    assert after["meta_info"]["weight_version"] == "turned"
    assert after["text"] != before["text"]
    assert answers[0]["meta_info"]["finish_reason"]["type"] in ("length", "stop")
    for path in ("/model_info", "/server_info"):
        assert server.get(path)["weight_version"] == "turned"
    for bad in ("..", "/etc", "nowhere"):
        status, message = refused(server, "/update_weights_from_disk", model_path=bad)
        assert (status, "folder for weights" in message) == (400, True)
    assert generate(server)["text"] == after["text"]
    server.post("/update_weights_from_disk", model_path="old", weight_version="default")
    assert generate(server)["text"] == before["text"]


def test_a_weight_is_sent_and_read_back(server: Server, root: Path) -> None:
    (file,) = (root / "old").glob("*.safetensors")
    old = load_file(file)[NORM]
    before = generate(server)["text"]
    body = save({NORM: -old})
    request = urllib.request.Request(
        server.url + "/update_weights_from_tensor?weight_version=sent",
        data=body,
        headers={"Content-Type": "application/octet-stream"},
    )
    with urllib.request.urlopen(request, timeout=240) as answer:
        assert json.load(answer)["num_tensors"] == 1
    read = server.post("/get_weights_by_name", name=NORM, truncate_size=3)
    assert read == pytest.approx((-old[:3].float()).tolist())
    assert generate(server)["text"] != before
    status, message = refused(server, "/get_weights_by_name", name="model.norm.wait")
    assert (status, NORM in message) == (400, True)
    server.post("/update_weights_from_disk", model_path="old", weight_version="default")
    assert generate(server)["text"] == before


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux takes memory back")
def test_released_memory_leaves_the_process_and_requests_get_503_until_it_is_back(
    server: Server,
) -> None:
    before = generate(server)["text"]
    released = server.post("/release_memory_occupation")
    assert released["released"] == ["kv_cache", "weights"]
    (file,) = BUNDLED.glob("*.safetensors")
    assert (
        released["num_bytes"] > 1.9 * file.stat().st_size
    )  # two bytes on disk are four in float32
    assert refused(server, "/generate", text="x")[0] == 503
    with pytest.raises(urllib.error.HTTPError, match="503") as not_ready:
        server.get("/ready")
    not_ready.value.close()
    assert refused(server, "/update_weights_from_tensor", named_tensors=[])[0] == 400
    assert server.post("/resume_memory_occupation")["released"] == []
    assert generate(server)["text"] == before
    with urllib.request.urlopen(server.url + "/ready", timeout=240) as ready:
        assert ready.status == 200


def test_the_engine_says_what_is_wrong_with_a_group(server: Server) -> None:
    group = {
        "master_address": "127.0.0.1",
        "master_port": 9,
        "rank_offset": 1,
        "world_size": 2,
        "timeout_s": 0.2,
    }
    status, message = refused(server, "/init_weights_update_group", **group)
    assert status == 400
    assert message == "the group 'weight_update_group' did not come together within 0.2 s"
    names = {"names": [NORM], "dtypes": ["float32"], "shapes": [[1]]}
    assert "no group" in refused(server, "/update_weights_from_distributed", **names)[1]
