"""The draft model, or the head, of a model as a runner needs it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from weft.assemble.draft_model import head_of
from weft.assemble.model_config import choose_model
from weft.config.draft_model import draft_settings, runs_as
from weft.config.engine import EngineConfig
from weft.config.model import ModelConfig
from weft.config.resolve import kept_as
from weft.executor.assembly import DraftSpec


def draft_spec(config: EngineConfig, target: ModelConfig) -> DraftSpec | None:
    """The draft model or the head of the model `target` as a runner needs it; None without one.
    `config` is resolved. Raises ModelError."""
    if not config.draft_model:
        return None
    folder = Path(config.draft_model)
    model = head_of(config, folder, target)
    if model is None:
        model = choose_model(draft_settings(config), folder, here=True)
    engine = runs_as(config, model)
    kept = replace(kept_as(engine, model), context_length=config.context_length)
    return DraftSpec(engine, kept, folder)


def head_spec(config: EngineConfig, target: ModelConfig) -> DraftSpec | None:
    """The same for a rank that follows, which has a part of a head, and no draft model."""
    spec = draft_spec(config, target)
    return None if spec is None or spec.model.head is None else spec
