from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.config.generation import sampling_defaults
from weft.config.model import ModelError

QWEN = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "eos_token_id": [1, 2]}


def write(folder: Path, content: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("source", ["auto", "model"])
def test_the_models_sampling_is_read(tmp_path: Path, source: str) -> None:
    found = sampling_defaults(source, write(tmp_path, QWEN))
    assert found == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


@pytest.mark.parametrize("source", ["none", "openai"])
def test_the_models_sampling_can_be_left_aside(tmp_path: Path, source: str) -> None:
    assert sampling_defaults(source, write(tmp_path, {"temperature": "hot"})) == {}


def test_another_folder_may_say_it(tmp_path: Path) -> None:
    other = write(
        tmp_path / "other", {"min_p": 0.1, "repetition_penalty": 1, "top_k": 50.0, "top_p": None}
    )
    found = sampling_defaults(str(other), write(tmp_path, QWEN))
    assert found == {"min_p": 0.1, "repetition_penalty": 1.0, "top_k": 50}
    assert [type(value) for value in found.values()] == [int, float, float]


def test_a_model_without_the_file_has_the_sampling_of_the_api(tmp_path: Path) -> None:
    assert sampling_defaults("auto", tmp_path) == {}


def test_another_folder_without_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"--generation-config: .* does not exist"):
        sampling_defaults(str(tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", "hot"), ("top_k", 1.5), ("top_p", True), ("min_p", [1])]
)
def test_what_is_no_number_is_refused_by_name_with_the_way_out(
    tmp_path: Path, name: str, value: Any
) -> None:
    with pytest.raises(ModelError, match=rf"{name} is .*--generation-config none"):
        sampling_defaults("auto", write(tmp_path, {name: value}))
