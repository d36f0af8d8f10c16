"""Adapters on the command line, in files and in programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.config.adapters import LoraPath, parse_lora_paths
from weft.config.engine import EngineConfig
from weft.config.options import Command, SettingsError, options_of


def read(*argv: str, environ: dict[str, str] | None = None) -> tuple[LoraPath, ...]:
    command = Command("weft", "", EngineConfig, positional="model")
    config = command.read(argv, environ or {}).make(EngineConfig)
    return parse_lora_paths(config.lora_paths)


@pytest.mark.parametrize(
    "argv",
    [
        ["--lora-paths", "a=/x", "b=/y"],
        ["--lora-modules", "a=/x", "b=/y"],
        ["--lora-paths", "a=/x", "b=/y", "model"],
        ["--lora-paths", "a=/x", "b=/y", "--threads", "2"],
        ["model", "--lora-paths=a=/x,b=/y"],
        ["--lora-paths", '{"lora_name": "a", "lora_path": "/x"}', "b=/y"],
        ["--lora-paths", '{"name": "a", "path": "/x", "base_model_name": "m"}', "b=/y"],
        ["--lora-paths", '[{"lora_name": "a", "lora_path": "/x", "pinned": false}, "b=/y"]'],
    ],
)
def test_adapters_are_named_in_all_forms(argv: list[str]) -> None:
    assert read(*argv) == (LoraPath("a", "/x"), LoraPath("b", "/y"))


def test_a_folder_alone_is_its_own_name() -> None:
    assert read("--lora-paths", "/x/y") == (LoraPath("/x/y", "/x/y"),)


def test_an_adapter_may_be_pinned() -> None:
    words = '{"lora_name": "a", "lora_path": "/x", "pinned": true}'
    assert read(environ={"WEFT_LORA_PATHS": words}) == (LoraPath("a", "/x", pinned=True),)


def test_files_and_programs_give_lists(tmp_path: Path) -> None:
    file = tmp_path / "weft.toml"
    file.write_text('lora_paths = ["a=/x", {lora_name = "b", lora_path = "/y"}]')
    assert read("--config", str(file)) == (LoraPath("a", "/x"), LoraPath("b", "/y"))
    option = next(one for one in options_of(EngineConfig) if one.name == "lora_paths")
    for given in [{"a": Path("/x"), "b": "/y"}, ["a=/x", "b=/y"], ("a=/x", "b=/y"), "a=/x,b=/y"]:
        text = option.from_python(given, "lora_paths")
        assert isinstance(text, str)
        assert parse_lora_paths(text) == (LoraPath("a", "/x"), LoraPath("b", "/y"))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a=/x,a=/y", "twice"),
        ("=/x", "''"),
        ("a=", "no folder"),
        ("a\tb=/x", r"a\\tb"),
        ("x" * 257 + "=/x", "256"),
        ("{", "JSON"),
        ('{"lora_name": "a"}', "NAME=FOLDER"),
        ('{"lora_name": 1, "lora_path": "/x"}', "NAME=FOLDER"),
        ('{"lora_name": "a", "lora_path": "/x", "pinned": 1}', "NAME=FOLDER"),
        ('{"lora_name": "a", "lora_path": "/x", "rank": 1}', "'rank'"),
        ("[3]", "3"),
    ],
)
def test_other_forms_are_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(SettingsError, match=named) as caught:
        parse_lora_paths(text)
    assert "\n" not in str(caught.value)


def test_the_word_behind_the_option_must_be_there() -> None:
    with pytest.raises(SettingsError, match="--lora-paths"):
        read("--lora-paths")
