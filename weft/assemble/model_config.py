"""Describes the model in a folder, and chooses the code that computes it (`--model-impl`):

    auto           weft's own code, else that of transformers, else an error
    weft           weft's own code
    transformers   the code of transformers, even if weft has its own

Imports neither torch nor transformers, unless this process must describe a model of transformers.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.assemble.checkpoint import read_model
from weft.assemble.model_folder import model_name
from weft.config.config_json import get
from weft.config.engine import EngineConfig
from weft.config.families.table import add_outside
from weft.config.model import FAMILIES, ModelConfig, UnsupportedModel, read_json
from weft.config.model_errors import BadConfig
from weft.config.process import Child, ChildEnded
from weft.models.transformers_backend.library import NotByLibrary, require_library
from weft.models.transformers_backend.wire import from_wire
from weft.weights.gguf.files import SUFFIX

DESCRIBE = "weft.models.transformers_backend.describe"
DESCRIBE_S = 300.0  # timeout: a model of many layers takes some seconds
# The speed of the code of transformers, as measured (docs/guides/transformers.md).
COST = (
    "as fast as weft's own code if the CPU kernels have all of its operations, else up to twice "
    "as slow"
)


def choose_model(config: EngineConfig, folder: Path, *, here: bool = False) -> ModelConfig:
    """The model in `folder`. `here`: this process will run it, so it may import what the model
    needs; otherwise another process describes a model that weft has no code for.

    Raises `ModelError`.
    """
    add_outside(config.plugins)
    model = _chosen(config, folder, here)
    if config.language_model_only:
        model = replace(model, vision=None)
    return model


def _chosen(config: EngineConfig, folder: Path, here: bool) -> ModelConfig:
    name = model_name(config, folder)
    if config.model_impl == "transformers":
        try:
            return _by_library(folder, name, here)
        except NotByLibrary as exc:
            raise UnsupportedModel(
                f"{_class(folder)} cannot be run by the code of transformers "
                f"(--model-impl transformers): {exc}"
            ) from exc
    try:
        return read_model(folder, name, weights=config.load_format != "dummy")
    except BadConfig:
        raise
    except UnsupportedModel as exc:
        if config.model_impl == "weft":
            raise
        own = exc
    try:
        return _by_library(folder, name, here)
    except NotByLibrary as exc:
        known = [name for name in _classes(folder) if name in FAMILIES]
        if known:
            raise UnsupportedModel(
                f"{own}. The code of transformers cannot run it either: {exc}"
            ) from exc
        raise UnsupportedModel(
            f"{_class(folder)} has no native implementation, and the code of transformers cannot "
            f"run it: {exc}"
        ) from exc


def _by_library(folder: Path, name: str, here: bool) -> ModelConfig:
    """The model as the code of transformers computes it. Raises `NotByLibrary`."""
    if any(folder.glob(f"*{SUFFIX}")):
        raise NotByLibrary("a GGUF file is read by weft's own models only")
    require_library()
    if here or "transformers" in sys.modules:
        from weft.models.transformers_backend.describe import described

        return described(folder, name)
    return _asked(folder, name)


def _asked(folder: Path, name: str) -> ModelConfig:
    """The model as another process describes it, so that this one need not import transformers."""
    child = Child(DESCRIBE)
    try:
        line = child.ask(json.dumps([str(folder.absolute()), name]).encode(), DESCRIBE_S)
    except (ChildEnded, TimeoutError) as exc:
        raise NotByLibrary("the process that examines it has ended") from exc
    finally:
        child.close()
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise NotByLibrary(answer["error"])
    return from_wire(answer["model"]).completed(folder)


def _classes(folder: Path) -> list[str]:
    return [str(name) for name in get(read_json(folder / "config.json"), "architectures", list)]


def _class(folder: Path) -> str:
    return ", ".join(_classes(folder)[:3])[:200] or "a model without a class"
