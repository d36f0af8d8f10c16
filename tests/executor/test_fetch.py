from __future__ import annotations

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from weft.config.model import ModelNotFound
from weft.executor.weights.fetch import local_folder


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
    assert local_folder("").parts[-3:] == ("weft", "bundled", "weft-nano")
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


def test_a_file_is_no_model(tmp_path, hub):
    (tmp_path / "model.gguf").write_text("")
    with pytest.raises(ModelNotFound, match="is a file"):
        local_folder(str(tmp_path / "model.gguf"))
    assert hub == []


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch):
    def fail(*_args, **_options):
        raise LocalEntryNotFoundError("Cannot find the requested files.\nLong advice.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(
        ModelNotFound, match=r"org/model is no folder here, .* from the hub: Cannot find .*files\.$"
    ):
        local_folder("org/model")
