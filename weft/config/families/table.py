"""All architectures that weft reads, by their name in `config.json` or in a GGUF file. Every module
of this folder with a table `FAMILIES`, `ENCODERS` or `ARCHITECTURES` adds its own, so a new family
is one file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules
from typing import NamedTuple

from weft.config import families
from weft.config.families.family import Family
from weft.config.families.gguf import Architecture
from weft.config.plugins import plugins, refused

THIS = "table"


def _tables(name: str) -> Iterator[Mapping[str, Family]]:
    """The tables with this name, in the order of their modules."""
    for module in iter_modules(families.__path__):
        if module.name != THIS:
            yield getattr(import_module(f"{families.__name__}.{module.name}"), name, {})


def _joined(tables: Iterator[Mapping[str, Family]]) -> dict[str, Family]:
    found: dict[str, Family] = {}
    for table in tables:
        twice = found.keys() & table.keys()
        assert not twice, f"two families have the names {twice}"
        found.update(table)
    return found


DECODERS = _joined(_tables("FAMILIES"))
ENCODERS = _joined(_tables("ENCODERS"))


def _of_decoders(
    decoders: Mapping[str, Family], encoders: Mapping[str, Family]
) -> dict[str, Family]:
    """What decoders and encoders can be: models that generate, embed, classify, and fill masks."""
    found = {f"{name}ForCausalLM": family for name, family in decoders.items()}
    for kind, task in (("Model", "embed"), ("ForSequenceClassification", "classify")):
        for name, family in {**decoders, **encoders}.items():
            # A GGUF file is that of a decoder that generates, or of an encoder that embeds.
            files = family.gguf if name in encoders and task == "embed" else {}
            found[f"{name}{kind}"] = replace(family, task=task, gguf=files)
    for name, family in encoders.items():
        found[f"{name}ForMaskedLM"] = replace(family, task="fill", gguf={})
    return found


def _architectures() -> dict[str, Family]:
    found = _of_decoders(DECODERS, ENCODERS) | _joined(_tables("ARCHITECTURES"))
    return dict(sorted(found.items()))


FAMILIES = _architectures()


class GgufFiles(NamedTuple):
    """The files of one architecture of GGUF."""

    model: str  # class in a `config.json`
    family: Family
    architecture: Architecture


def _gguf_files() -> dict[str, GgufFiles]:
    found: dict[str, GgufFiles] = {}
    for model, family in FAMILIES.items():
        for name, architecture in family.gguf.items():
            assert name not in found, f"two families have GGUF files of {name}"
            found[name] = GgufFiles(model, family, architecture)
    return dict(sorted(found.items()))


GGUF_FILES = _gguf_files()


def add_outside(setting: str) -> None:
    """Add the families of `--plugins`. Raises SettingsError for one that is there already."""
    for name, own in plugins(setting, "families"):
        if not isinstance(own, dict) or not all(isinstance(one, Family) for one in own.values()):
            raise refused("families", name, "is no dict of weft.config.families.family.Family")
        for architecture, family in _of_decoders(own, {}).items():
            before = FAMILIES.setdefault(architecture, family)
            if before != family:
                raise refused("families", name, f"has {architecture}, which is there already")
