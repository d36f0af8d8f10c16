"""Finds the draft model that the settings name, checks it, and compares its tokenizer with that of
the target model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from weft.assemble.checkpoint import check_files, check_weights
from weft.assemble.model_config import choose_model
from weft.assemble.model_folder import TOKENIZER, model_folder
from weft.config.draft_model import draft_settings
from weft.config.engine import EngineConfig
from weft.config.model import ModelConfig, ModelError
from weft.config.options import SettingsError


class DraftModel(NamedTuple):
    folder: Path
    model: ModelConfig


def find_draft_model(config: EngineConfig, folder: Path, target: ModelConfig) -> DraftModel | None:
    """The draft model, or the head, of the model `target` in `folder`; None if the settings name
    none.

    Raises SettingsError, which names the option.
    """
    if not config.draft_model:
        return None
    settings = draft_settings(config)
    has_weights = config.load_format != "dummy"
    try:
        own = model_folder(settings)
        model = ModelConfig.of_head(own, target)
        if model is not None:
            if has_weights:
                check_weights(own)
            return DraftModel(own, model)
        check_files(own, weights=has_weights)
        model = choose_model(settings, own)
    except (ModelError, SettingsError) as exc:
        raise SettingsError(f"--draft-model is {config.draft_model}: {exc}") from exc
    difference = _first_difference(folder, own)
    if difference:
        raise SettingsError(
            f"--draft-model is {config.draft_model}, but its tokenizer differs from the model's: "
            f"{difference}"
        )
    return DraftModel(own, model)


def _first_difference(folder: Path, other: Path) -> str:
    """The first id that means another token in the other folder, as a text; "" if there is none."""
    one = _vocabulary(folder)
    two = _vocabulary(other)
    for id in sorted(one.keys() & two.keys()):
        if one[id] != two[id]:
            return f"token {id} is {two[id]!r} in its tokenizer, and {one[id]!r} in the model's"
    return ""


def _vocabulary(folder: Path) -> dict[int, str]:
    """The tokens of a model: id → token."""
    content = json.loads((folder / TOKENIZER).read_text(encoding="utf-8"))
    words = content["model"]["vocab"]
    if isinstance(words, dict):
        found = {id: word for word, id in words.items()}
    else:  # a list of unigrams, each with its score
        found = {id: word for id, (word, _) in enumerate(words)}
    for added in content.get("added_tokens", ()):
        found[added["id"]] = added["content"]
    return found
