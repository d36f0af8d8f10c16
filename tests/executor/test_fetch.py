from __future__ import annotations

import socket
import threading

import pytest
from huggingface_hub import constants

from tests.executor.gguf_files import write_gguf
from weft.config.model import ModelNotFound
from weft.weights import fetch
from weft.weights import hub as hub_module
from weft.weights.fetch import local_folder, local_path
from weft.weights.pull.listing import PullError
from weft.weights.pull.pull import Pulled


@pytest.fixture
def hub(monkeypatch, tmp_path) -> list[dict]:
    """A hub that has everything; remembers what it was asked for."""
    asked: list[dict] = []

    def pull(name, revision, watcher):
        asked.append({"model": name.repo, "kind": name.kind, "revision": revision})
        return Pulled(name, tmp_path, (), "c0ffee")

    def pull_files(repo, revision, patterns, watcher):
        asked.append({"model": repo, "revision": revision, "patterns": patterns})
        return tmp_path

    monkeypatch.setattr(fetch, "pull", pull)
    monkeypatch.setattr(fetch, "pull_files", pull_files)
    return asked


def test_a_folder_is_itself(tmp_path, hub):
    assert local_folder(str(tmp_path)) == tmp_path
    assert hub == []


def test_no_name_is_the_bundled_model(hub):
    assert local_path("").parts[-3:] == ("weft", "bundled", "weft-nano")
    assert hub == []


def test_an_id_is_downloaded_without_code_and_pickles(tmp_path, hub):
    assert local_folder("org/model", "v2") == tmp_path
    assert hub[0]["model"] == "org/model"
    assert hub[0]["revision"] == "v2"
    assert not {"*.py", "*.bin", "*.pt", "*"} & set(hub[0]["patterns"])


@pytest.mark.parametrize("name", ["/no/such/folder", "./org/model", "~/model", "model", "a/b/c"])
def test_impossible_ids_are_not_looked_up(name, hub):
    with pytest.raises(ModelNotFound, match="there is no folder"):
        local_folder(name)
    assert hub == []


def test_a_name_without_a_folder_is_answered_with_those_that_are_known(hub):
    with pytest.raises(ModelNotFound, match=r"ORG/MODEL .*weft-nano, SmolLM2-135M-Instruct"):
        local_folder("SmolLM2-999M")
    assert hub == []


def test_a_file_is_no_model_but_for_gguf(tmp_path, hub):
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(ModelNotFound, match="is a file"):
        local_path(str(tmp_path / "model.safetensors"))
    (tmp_path / "model.gguf").write_text("")
    assert local_path(str(tmp_path / "model.gguf")) == tmp_path / "model.gguf"
    assert hub == []


def test_of_a_repository_with_gguf_one_type_is_downloaded(tmp_path, hub):
    for name in ("a-Q4_K_M.gguf", "a-IQ4_K_M.gguf", "mmproj-a-Q4_K_M.gguf", "a-Q8_0.gguf"):
        write_gguf(tmp_path / name, {}, {})
    assert local_path("org/a-GGUF:q4_k_m", "v2") == tmp_path / "a-Q4_K_M.gguf"
    assert hub[0] == {"model": "org/a-GGUF", "kind": "q4_k_m", "revision": "v2"}
    with pytest.raises(ModelNotFound, match="has no GGUF file of type Q5_K_M"):
        local_path("org/a-GGUF:Q5_K_M")
    with pytest.raises(ModelNotFound, match="has 3 models, name one of them"):
        local_path("org/a-GGUF")


def test_a_folder_with_safetensors_and_gguf_is_itself(tmp_path, hub):
    write_gguf(tmp_path / "a.gguf", {}, {})
    assert local_path(str(tmp_path)) == tmp_path / "a.gguf"
    (tmp_path / "model.safetensors").write_text("")
    assert local_path(str(tmp_path)) == tmp_path


def test_a_hub_that_fails_is_one_sentence(monkeypatch, tmp_path):
    def fail(*_args, **_options):
        raise PullError("the hub has failed")

    monkeypatch.setattr(fetch, "pull_files", fail)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ModelNotFound,
        match=r"org/model is not a folder here, .* from the hub: the hub has failed$",
    ):
        local_folder("org/model")


@pytest.mark.parametrize(
    "name",
    ["models/nosuch.gguf", "nosuch.gguf", "models/my.gguf:Q4", "my.gguf:Q4", "a/b.safetensors"],
)
def test_the_name_of_a_file_is_not_looked_up(name, hub):
    with pytest.raises(ModelNotFound, match=f"there is no .* {name}"):
        local_path(name)
    assert hub == []


def test_a_similar_name_is_proposed(tmp_path, hub):
    write_gguf(tmp_path / "my-model.gguf", {}, {})
    with pytest.raises(ModelNotFound, match=r"did you mean my-model\.gguf\?"):
        local_path(str(tmp_path / "mymodel.gguf"))
    with pytest.raises(ModelNotFound, match=r"a file is named without a type: .*/my-model\.gguf$"):
        local_path(f"{tmp_path}/my-model.gguf:Q4")
    with pytest.raises(ModelNotFound, match=r"did you mean weft-nano\?"):
        local_path("wfet-nano")
    with pytest.raises(ModelNotFound, match="as ORG/MODEL-GGUF:Q4_K_M"):
        local_path("gemma:Q4_K_M")


def test_without_a_connection_only_the_cache_is_read_and_the_error_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub_module, "why_unreachable", lambda endpoint: "hub:443: refused")
    with pytest.raises(ModelNotFound, match=r"no connection to the hub \(hub:443: refused\)$"):
        local_folder("org/model")
    monkeypatch.setattr(hub_module, "why_unreachable", None)  # it is not asked
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFound, match=r"_OFFLINE is set, so the hub is not asked$"):
        local_folder("org/model")


def test_a_hub_is_reachable_if_it_listens_or_its_proxy_does(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert hub_module.why_unreachable(url) == ""
        monkeypatch.setenv("https_proxy", url)
        assert hub_module.why_unreachable("https://hub.invalid") == ""
    monkeypatch.delenv("https_proxy")
    assert url.removeprefix("http://") in hub_module.why_unreachable(url)
    monkeypatch.setattr(hub_module, "CONNECT_TIMEOUT_S", 0.01)
    asleep = threading.Event()

    def silent(*_args, **_options):
        asleep.wait()
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", silent)
    assert "has not answered" in hub_module.why_unreachable(url)
    asleep.set()
