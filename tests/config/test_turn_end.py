from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch.tiny_model import write_tiny_model
from weft.config.model import ModelConfig, ModelError
from weft.config.turn_end import turn_end_id


def put(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(json.dumps(content))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose config.json names another token than its tokenizer, as fine-tunes of base models do."""
    folder = write_tiny_model(tmp_path, eos_token_id=0)
    put(folder, "tokenizer_config.json", {"eos_token": "</s>"})
    return folder


def test_the_tokenizers_end_is_one_of_the_models(folder: Path) -> None:
    assert turn_end_id(folder) == 257
    assert ModelConfig.from_folder(folder).eos_token_ids == (0, 257)


def test_ends_of_all_files_hold_together(folder: Path) -> None:
    put(folder, "generation_config.json", {"eos_token_id": [3, 257, 0]})
    assert ModelConfig.from_folder(folder).eos_token_ids == (0, 3, 257)


@pytest.mark.parametrize("token", ["</s>", {"content": "</s>", "lstrip": False}])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_it_may_stand_in_either_file_in_either_form(folder: Path, name: str, token: Any) -> None:
    put(folder, "tokenizer_config.json", {})
    put(folder, name, {"eos_token": token})
    assert turn_end_id(folder) == 257


def test_it_may_be_a_token_of_the_plain_vocabulary(folder: Path) -> None:
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    put(folder, "tokenizer_config.json", {"eos_token": "z"})
    assert turn_end_id(folder) == vocab["z"]


@pytest.mark.parametrize("token", [None, "", "<none>", 7, {"content": 7}])
def test_no_such_token_is_no_end(folder: Path, token: Any) -> None:
    put(folder, "tokenizer_config.json", {"eos_token": token})
    assert turn_end_id(folder) is None


@pytest.mark.parametrize("content", ["{", "[]", '{"eos_token":' + "[" * 100_000])
def test_broken_files_say_nothing_of_it(folder: Path, content: str) -> None:
    (folder / "tokenizer_config.json").write_text(content)
    assert turn_end_id(folder) is None


@pytest.mark.parametrize("token", [258, -1, [0, 1_000_000]])
def test_an_end_beyond_the_vocabulary_is_refused(folder: Path, token: Any) -> None:
    put(folder, "generation_config.json", {"eos_token_id": token})
    with pytest.raises(ModelError, match=r"eos_token_id is .*; 0 to 257 are in the vocabulary"):
        ModelConfig.from_folder(folder)


def test_a_config_nested_without_end_is_refused_in_one_line(folder: Path) -> None:
    (folder / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(ModelError, match="nested too deeply"):
        ModelConfig.from_folder(folder)
