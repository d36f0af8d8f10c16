"""The models of a machine: listed by the names that serve them, described by their own headers,
removed and copied without harm to others."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.executor.gguf_files import gguf_bytes, random_blocks
from tests.executor.gguf_models import hf_weights, metadata, stored, write_folder
from tests.weights.hub_server import Hub
from weft.cli.main import main
from weft.config.model import ModelError, ModelNotFound
from weft.store.store import ModelStore
from weft.weights.cache.folder import WeightsKey, cache_at
from weft.weights.fetch import local_path
from weft.weights.pull.names import BadName
from weft.weights.pull.pull import repo_folder

GGUF = "org/real-GGUF"


@pytest.fixture
def store(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    """A model with safetensors and one with three GGUF types on the hub."""
    monkeypatch.setenv("WEFT_MODELS_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    weights = hf_weights()
    folder = write_folder(tmp_path / "made", weights, "llama")
    hub.repos["org/real"] = {path.name: path.read_bytes() for path in folder.iterdir()}
    tensors = stored(weights)
    values = metadata() | {"general.file_type": 15, "general.license": "mit"}
    hub.repos[GGUF] = {"README.md": b""}
    for number, kind in enumerate(("Q4_K_M", "Q8_0", "F32")):
        one = tensors | {f"more.{number}": random_blocks("Q8_0", (4, 32), seed=number)}
        hub.repos[GGUF][f"real-{kind}.gguf"] = gguf_bytes(values, one)
    return ModelStore()


def names(store: ModelStore) -> list[str]:
    return [one.name for one in store.entries() if one.source != "package"]


def test_models_are_listed_by_the_names_that_serve_them(store: ModelStore) -> None:
    assert names(store) == []
    store.pull("org/real")
    store.pull(f"{GGUF}:Q4_K_M")
    store.pull(f"{GGUF}:F32")
    assert names(store) == ["org/real", f"{GGUF}:F32", f"{GGUF}:Q4_K_M"]
    for one in store.entries():
        path = local_path(one.name)
        assert one.path in (path, path.parent, *path.parents)
        assert one.num_bytes == sum(file.stat().st_size for file in one.files)


def test_models_that_another_process_removes_meanwhile_are_not_listed(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.pull("org/real")
    store.pull(f"{GGUF}:F32")
    removed = store.find("org/real").files
    is_file = Path.is_file

    def seen(path: Path) -> bool:
        """Whether it is a file; one of those that are removed is gone afterwards."""
        found = is_file(path)
        if path in removed:
            path.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Path, "is_file", seen)
    assert names(store) == [f"{GGUF}:F32"]


def test_a_name_may_be_written_in_several_ways(store: ModelStore) -> None:
    store.pull(f"{GGUF}:Q4_K_M")
    for name in (f"{GGUF}:q4_k_m", f"hf.co/{GGUF}:Q4_K_M", GGUF, GGUF.upper()):
        assert store.find(name).name == f"{GGUF}:Q4_K_M"
    store.pull(f"{GGUF}:F32")
    with pytest.raises(ModelNotFound, match="are several models: org/real-GGUF:F32, "):
        store.find(GGUF)
    with pytest.raises(ModelNotFound, match="did you mean org/real"):
        store.find("org/reel-GGUF:Q4_K_M")


def test_facts_are_those_of_the_header(store: ModelStore, hub: Hub) -> None:
    store.pull(f"{GGUF}:Q4_K_M")
    entry = store.find(f"{GGUF}:Q4_K_M")
    found = store.details(entry)
    content = hub.repos[GGUF]["real-Q4_K_M.gguf"]
    assert found.family == "llama"
    assert found.format == "gguf"
    assert found.quantization == "Q4_K_M"
    assert found.size_bytes == len(content)
    assert found.context_length == 256
    assert found.num_layers == 2
    assert found.num_heads == 4
    assert found.num_kv_heads == 2
    assert found.license == "mit"
    assert found.num_parameters == 4 * 32 + sum(one.numel() for one in hf_weights().values())
    assert found.template.startswith("{% for m in messages %}")
    assert store.digest(entry) == hub.etag(content)


def test_facts_of_safetensors_are_those_of_their_headers(store: ModelStore, hub: Hub) -> None:
    store.pull("org/real")
    entry = store.find("org/real")
    found = store.details(entry)
    assert found.family == "llama"
    assert found.format == "safetensors"
    assert found.quantization == "F32"
    assert found.num_parameters == sum(one.numel() for one in hf_weights().values())
    assert found.context_length == 256
    assert found.hidden_size == 64
    assert found.problem == ""
    [name] = [name for name in hub.repos["org/real"] if name.endswith(".safetensors")]
    assert store.digest(entry) == hub.etag(hub.repos["org/real"][name])


def test_a_damaged_model_is_an_error_and_no_guess(store: ModelStore, hub: Hub) -> None:
    hub.repos[GGUF]["real-Q8_0.gguf"] = b"GGUF" + bytes(2_000)
    store.pull(f"{GGUF}:Q8_0")
    with pytest.raises(ModelError, match=r"real-Q8_0\.gguf"):
        store.details(store.find(f"{GGUF}:Q8_0"))


def test_what_weft_cannot_serve_is_said(store: ModelStore, hub: Hub) -> None:
    values = metadata() | {"general.architecture": "unheard-of"}
    hub.repos[GGUF]["real-Q8_0.gguf"] = gguf_bytes(values, stored(hf_weights()))
    store.pull(f"{GGUF}:Q8_0")
    found = store.details(store.find(f"{GGUF}:Q8_0"))
    assert found.family == "unheard-of"
    assert "unheard-of" in found.problem


def test_removing_one_type_leaves_the_others(store: ModelStore) -> None:
    store.pull(f"{GGUF}:Q4_K_M")
    store.pull(f"{GGUF}:F32")
    removal = store.removal(store.find(f"{GGUF}:F32"))
    assert removal.num_bytes == store.find(f"{GGUF}:F32").num_bytes
    removal.do()
    assert names(store) == [f"{GGUF}:Q4_K_M"]
    assert local_path(f"{GGUF}:Q4_K_M").is_file()
    store.removal(store.find(f"{GGUF}:Q4_K_M")).do()
    assert names(store) == []
    assert not repo_folder(GGUF).exists()


def test_a_pull_that_was_ended_is_listed_and_can_be_removed(store: ModelStore) -> None:
    blobs = repo_folder("org/real") / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "abc.incomplete").write_bytes(bytes(500))
    entry = store.find("org/real")
    assert not entry.is_complete
    store.removal(entry).do()
    assert not repo_folder("org/real").exists()


def test_models_of_packages_stay(store: ModelStore) -> None:
    with pytest.raises(ModelNotFound, match="belongs to an installed package"):
        store.removal(store.find("weft-nano"))


def test_a_copy_shares_its_bytes_and_outlives_the_other(store: ModelStore) -> None:
    store.pull(f"{GGUF}:Q4_K_M")
    entry = store.find(f"{GGUF}:Q4_K_M")
    before = entry.path.read_bytes()
    path = store.copy(entry, "mine")
    [file] = path.iterdir()
    assert file.stat().st_ino == entry.path.stat().st_ino
    assert store.removal(store.find("mine")).num_bytes == 0
    store.removal(entry).do()
    assert local_path("mine").read_bytes() == before
    with pytest.raises(ModelNotFound, match="there is a model mine already"):
        store.copy(store.find("mine"), "mine")
    store.removal(store.find("mine")).do()
    assert names(store) == []


def test_a_copy_of_a_folder_is_a_model(store: ModelStore) -> None:
    store.pull("org/real")
    store.copy(store.find("org/real"), "mine")
    assert store.details(store.find("mine")).size_bytes
    assert (local_path("mine") / "config.json").is_file()


@pytest.mark.parametrize("name", ["../x", "a/b", "..", "x\x1b[2J", "", "weft-nano", "x.gguf", "."])
def test_names_of_copies_lead_nowhere(store: ModelStore, name: str) -> None:
    before = store.find("weft-nano")
    with pytest.raises(ModelNotFound):
        store.copy(before, name)
    assert names(store) == []


def test_a_link_out_of_the_folder_is_no_model(store: ModelStore, tmp_path: Path) -> None:
    write_folder(tmp_path / "elsewhere", hf_weights(), "llama")
    store.models_dir.mkdir()
    (store.models_dir / "out").symlink_to(tmp_path / "elsewhere")
    assert names(store) == []
    with pytest.raises(BadName, match="out is a link out of"):
        local_path("out")
    assert (tmp_path / "elsewhere" / "config.json").exists()


# The commands


def run(*words: str) -> int:
    return main(list(words))


def test_the_commands_from_pull_to_rm(
    store: ModelStore, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("pull", f"{GGUF}:Q4_K_M") == 0
    told = capsys.readouterr()
    assert f"{GGUF}:Q4_K_M: 1 files" in told.out
    assert "100 %" in told.err
    assert run("cp", GGUF, "mine") == 0
    assert run("list", "--json") == 0
    listed = json.loads(capsys.readouterr().out.partition("\n")[2])
    assert {"mine", f"{GGUF}:Q4_K_M"} <= {one["name"] for one in listed["models"]}
    assert run("show", "mine", "--json") == 0
    assert json.loads(capsys.readouterr().out)["quantization"] == "Q4_K_M"
    assert run("show", "mine", "--template") == 0
    assert capsys.readouterr().out.startswith("{% for m in messages %}")
    assert run("rm", "mine", "--yes") == 0
    folder = local_path(GGUF).parent
    (folder / "mmproj-F16.gguf").write_bytes(b"an encoder")
    assert run("rm", GGUF, "--yes") == 0
    assert "are free" in capsys.readouterr().out
    assert not folder.exists()
    assert names(store) == []


def test_the_list_tells_where_models_live(
    store: ModelStore, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    key = WeightsKey("real", {"a": 1})
    cache = cache_at("", 1.0)
    with cache.making(key):
        assert cache.store(key, [], [])
    store.pull("org/real")
    assert run("list", "--models-dir", str(tmp_path / "other")) == 0
    text = capsys.readouterr().out
    assert "org/real " in text
    assert str(store.hub_cache) in text
    assert str(tmp_path / "other") in text
    assert "weights cache: " in text
    assert run("rm", "--cached-weights", "--yes") == 0
    assert cache.files() == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "stays"), [("n\n", True), ("\n", True), ("yes\n", False)])
def test_rm_asks(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch, answer: str, stays: bool
) -> None:
    store.pull("org/real")
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    assert run("rm", "org/real") == int(stays)
    assert names(store) == (["org/real"] if stays else [])


def test_rm_removes_nothing_if_nobody_can_be_asked(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store.pull("org/real")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert run("rm", "org/real") == 2
    assert "--yes removes it" in capsys.readouterr().err
    # A name in the environment is no order to remove it.
    monkeypatch.setenv("WEFT_NAME", "org/real")
    monkeypatch.setenv("WEFT_YES", "1")
    assert run("rm") == 2
    assert names(store) == ["org/real"]


def test_ctrl_c_says_that_the_next_pull_goes_on(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("weft.weights.pull.pull._fetch_all", interrupted)
    assert run("pull", "org/real") == 130
    assert "the same command goes on" in capsys.readouterr().err


def test_errors_are_one_sentence(store: ModelStore, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["pull"], ["show"], ["cp", "a"], ["pull", "../x"], ["show", "no-such"]):
        assert run(*words) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert not os.path.exists(store.models_dir)
