"""Finds the draft model that the settings name, checks it, and compares its tokenizer with that of
the target model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from weft.assemble.checkpoint import check_files, check_weights, read_headers
from weft.assemble.model_config import choose_model
from weft.assemble.model_folder import TOKENIZER, model_folder
from weft.config.draft_model import draft_settings, no_head
from weft.config.drafts import AUTO, parse_draft_sources
from weft.config.engine import EngineConfig
from weft.config.heads import MTP
from weft.config.model import ModelConfig, ModelError
from weft.config.options import SettingsError


class DraftModel(NamedTuple):
    folder: Path
    model: ModelConfig


def find_draft_model(config: EngineConfig, folder: Path, target: ModelConfig) -> DraftModel | None:
    """The draft model, or the head, of the model `target` in `folder`; None if the settings name
    none, and the model has no MTP layer of its own that they allow.

    Raises SettingsError, which names the option.
    """
    if not config.draft_model:
        return _own_layer(config, folder, target)
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


def head_of(config: EngineConfig, folder: Path, target: ModelConfig) -> ModelConfig | None:
    """The head in `folder` for the model `target`, as the resolved settings choose it; None if it
    has a draft model. Raises ModelError."""
    if MTP in parse_draft_sources(config.speculative, "--speculative"):
        return target.mtp(read_headers(folder))
    return ModelConfig.of_head(folder, target)


def _own_layer(config: EngineConfig, folder: Path, target: ModelConfig) -> DraftModel | None:
    """The MTP layer of the model itself, if it is asked for, or if nothing forbids it by
    default."""
    is_auto = config.speculative == AUTO
    if is_auto:
        if config.device == "cuda" or no_head(config, target):
            return None
    elif MTP not in parse_draft_sources(config.speculative, "--speculative"):
        return None
    layer = None
    if config.load_format != "dummy" and not target.is_encoder:
        layer = target.mtp(read_headers(folder))
    if layer is not None:
        return DraftModel(folder, layer)
    if is_auto:
        return None
    raise SettingsError(
        f"--speculative is {config.speculative}, but {target.name} has no MTP layer that weft reads"
    )


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
