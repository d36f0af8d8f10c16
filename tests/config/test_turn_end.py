from __future__ import annotations

import json
from collections.abc import Callable
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
    """A model whose config.json names another token than its tokenizer, as fine-tunes of base
    models do."""
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


CHATML = "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"


@pytest.fixture
def added(folder: Path) -> Callable[..., None]:
    """Adds special tokens to the tokenizer of the model, with the ids 200, 201, ..."""

    def add(*texts: str, special: bool = True) -> None:
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        tokenizer["added_tokens"] += [
            {"id": 200 + place, "content": text, "special": special}
            for place, text in enumerate(texts)
        ]
        put(folder, "tokenizer.json", tokenizer)

    return add


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    "text", ["<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>"]
)
def test_added_tokens_that_end_turns_are_known_by_their_text(
    folder: Path, added: Callable[..., None], text: str, special: bool
) -> None:
    added("<|user|>", text, special=special)
    assert ModelConfig.from_folder(folder).eos_token_ids == (0, 257, 201)


def test_a_list_for_generation_is_complete(folder: Path, added: Callable[..., None]) -> None:
    added("<|im_end|>", "<done>")
    put(folder, "tokenizer_config.json", {"chat_template": "{{ content }}<done>"})
    put(folder, "generation_config.json", {"eos_token_id": 0})
    assert ModelConfig.from_folder(folder).eos_token_ids == (0,)
    put(folder, "generation_config.json", {"temperature": 0.6})
    assert ModelConfig.from_folder(folder).eos_token_ids == (0, 200, 201)


def test_the_end_of_one_of_several_messages_of_a_turn_is_no_end(
    folder: Path, added: Callable[..., None]
) -> None:
    added("<|end|>", "<|return|>", "<|call|>")
    template = "{{ m.content }}<|end|>"
    put(folder, "tokenizer_config.json", {"chat_template": template})
    assert ModelConfig.from_folder(folder).eos_token_ids == (0, 201, 202)


@pytest.mark.parametrize(
    "template",
    [
        "{{'<u>' + m['content'] + '<done>' + '\n'}}",
        '{{ "<u>" + m["content"]|trim + "<done>" }}',
        "{{ m.content }}<done>",
        "{{- content -}}\n{{- '<done>\\n' }}",
        "{{ '<u>' ~ m.content | trim ~ '<done>' }}",
        [{"name": "default", "template": "{{ m.content }}<done>"}],
    ],
)
@pytest.mark.parametrize("is_file", [True, False])
def test_the_token_that_the_template_writes_behind_a_content_is_an_end(
    folder: Path, added: Callable[..., None], template: Any, is_file: bool
) -> None:
    added("<u>", "<done>", "<done>?")
    put(folder, "tokenizer_config.json", {"chat_template": template})
    if is_file and isinstance(template, str):
        put(folder, "tokenizer_config.json", {})
        (folder / "chat_template.jinja").write_text(template)
    assert ModelConfig.from_folder(folder).eos_token_ids == (0, 201)


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace("m['content'] + '<|im_end|>'", "m['content'] + eos_token + '<other>'"),
        "<think>{{ m.reasoning_content }}<other>",
        "<think>{{ m.content }}</think>",
        "[INST]{{ m.content }}[/INST]",
        "{{ m.content }} done. <other>",
        "",
        7,
        [7, {"name": "default"}],
    ],
)
def test_what_does_not_close_a_turn_is_no_end(
    folder: Path, added: Callable[..., None], template: Any
) -> None:
    added("<other>", "</think>", "[/INST]")
    put(folder, "tokenizer_config.json", {"chat_template": template})
    assert ModelConfig.from_folder(folder).eos_token_ids == (0,)


def test_a_template_that_writes_an_end_needs_no_other(
    folder: Path, added: Callable[..., None]
) -> None:
    added("<|im_end|>", "<other>")
    template = CHATML + "{{ m.content }}<other>"
    put(folder, "tokenizer_config.json", {"chat_template": template})
    assert ModelConfig.from_folder(folder).eos_token_ids == (0, 200)
