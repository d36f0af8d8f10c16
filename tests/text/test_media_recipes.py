"""A processor is made again in another process, from what was read at the start."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from tests.text.recipes import CLIP, CUT, RECIPES
from weft.text.media import families
from weft.text.media.families import FILES, ProcessorRecipe, read_recipe


def test_a_recipe_has_every_file_that_a_family_reads() -> None:
    folder = Path(families.__file__).parent
    read: set[str] = set()
    for path in folder.glob("*.py"):
        read |= set(re.findall(r'folder / "([a-z_]+\.json)"', path.read_text()))
    assert "processor_config.json" in read
    assert read <= set(FILES)


def test_a_processor_of_a_recipe_does_not_change_with_the_files(tmp_path: Path) -> None:
    recipe = RECIPES["llava"]
    for name, text in recipe.files.items():
        (tmp_path / name).write_text(text)
    found = read_recipe(tmp_path, {})
    assert found == recipe
    (tmp_path / "preprocessor_config.json").unlink()
    sent = msgspec.json.decode(msgspec.json.encode(found), type=ProcessorRecipe)
    assert sent.make().marks == {"image": "<image>"}
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "vision_config": CLIP})
    )
    assert read_recipe(tmp_path, {}) is None


def test_a_recipe_has_the_changes_of_the_operator() -> None:
    recipe = RECIPES["qwen3-vl"]
    changed = msgspec.structs.replace(recipe, changes={"max_pixels": 100_000})
    assert changed.make().knobs["max_pixels"] == 100_000
    assert recipe.make().knobs["max_pixels"] != 100_000


def test_a_recipe_that_makes_nothing_is_an_error() -> None:
    config = {"architectures": ["LlavaForConditionalGeneration"]}
    files = {"config.json": json.dumps(config), "preprocessor_config.json": json.dumps(CUT)}
    recipe = ProcessorRecipe("weft.text.media.clip:make", files)
    with pytest.raises(ValueError, match=r"\w"):
        recipe.make()
