from __future__ import annotations

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from tests.executor.gguf_files import write_gguf
from weft.config.model import ModelNotFound
from weft.executor.weights.fetch import local_folder, local_path


@pytest.fixture
def hub(monkeypatch, tmp_path) -> list[dict]:
    """A hub that has everything; remembers what it was asked for."""
    asked: list[dict] = []

    def snapshot_download(model, **options):
        asked.append({"model": model, **options})
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def test_a_folder_is_itself(tmp_path, hub):
    assert local_folder(str(tmp_path)) == tmp_path
    assert hub == []


def test_no_name_is_the_bundled_model(hub):
    assert local_path("").parts[-3:] == ("weft", "bundled", "weft-nano")
    assert hub == []


def test_an_id_is_downloaded_without_code_and_pickles(tmp_path, hub):
    assert local_folder("org/model", "v2") == tmp_path
    assert (hub[0]["model"], hub[0]["revision"]) == ("org/model", "v2")
    assert not {"*.py", "*.bin", "*.pt", "*"} & set(hub[0]["allow_patterns"])


@pytest.mark.parametrize("name", ["/no/such/folder", "./org/model", "~/model", "model", "a/b/c"])
def test_what_cannot_be_an_id_is_not_looked_up(name, hub):
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
    assert (hub[0]["model"], hub[0]["revision"]) == ("org/a-GGUF", "v2")
    assert "*Q4_K_M*.gguf" in hub[0]["allow_patterns"]
    assert "*.safetensors" not in hub[0]["allow_patterns"]
    with pytest.raises(ModelNotFound, match="has no GGUF file of type Q5_K_M"):
        local_path("org/a-GGUF:Q5_K_M")
    with pytest.raises(ModelNotFound, match="name one of them, as org/a-GGUF:Q4_K_M"):
        local_path("org/a-GGUF")


def test_a_folder_with_safetensors_and_gguf_is_itself(tmp_path, hub):
    write_gguf(tmp_path / "a.gguf", {}, {})
    assert local_path(str(tmp_path)) == tmp_path / "a.gguf"
    (tmp_path / "model.safetensors").write_text("")
    assert local_path(str(tmp_path)) == tmp_path


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch):
    def fail(*_args, **_options):
        raise LocalEntryNotFoundError("Cannot find the requested files.\nLong advice.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(
        ModelNotFound,
        match=r"org/model is not a folder here, .* from the hub: Cannot find .*files\.$",
    ):
        local_folder("org/model")
