"""The facts that must be equal on all nodes that hold one model. Imports no torch."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from weft.config.engine import EngineConfig
from weft.config.model import ModelConfig
from weft.version import __version__
from weft.weights.fetch import weight_files

NUM_SAMPLES = 16  # samples per file
SAMPLE_BYTES = 1 << 16


def facts_of(config: EngineConfig, model: ModelConfig, folder: Path) -> dict[str, str]:
    """The facts of this node; error messages use their names. `model`: as its files describe it."""
    weights = "made up"
    if config.load_format != "dummy":
        weights = _sampled(folder)
    # The name of a model does not change its bits.
    shape = hashlib.sha256(repr(replace(model, name="")).encode()).hexdigest()
    return {
        "version of weft": __version__,
        "shape of the model": shape[:16],
        "weights": weights,
    }


def difference(here: dict[str, str], there: dict[str, str]) -> str:
    """The first fact that differs on another node, as a line; "" if all are equal."""
    for name, value in here.items():
        other = there.get(name, "unknown")
        if other != value:
            return f"the {name} differs: {value} on node 0, {other} on this node"
    return ""


def _sampled(folder: Path) -> str:
    """A digest of the sizes of all files of weights and of samples of each file. Samples are
    enough, because two trainings of one model differ everywhere."""
    digest = hashlib.sha256()
    for path in weight_files(folder):
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for index in range(NUM_SAMPLES):
                file.seek(size * index // NUM_SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]
