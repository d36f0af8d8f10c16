"""All architectures that weft reads, by their name in `config.json` or in a GGUF file. Every module
of this folder with a table `FAMILIES` or `ARCHITECTURES` adds its own, so a new family is one file.
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

ENCODER_ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
THIS = "table"
_BERT = Family(norm_eps_key="layer_norm_eps")
_ROBERTA = replace(_BERT, positions_begin_after_padding=True)
ENCODERS = {"Bert": _BERT, "Roberta": _ROBERTA, "XLMRoberta": _ROBERTA}


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


def _architectures() -> dict[str, Family]:
    found = {f"{name}ForCausalLM": family for name, family in DECODERS.items()}
    for kind, task in (("Model", "embed"), ("ForSequenceClassification", "classify")):
        for name, family in (DECODERS | ENCODERS).items():
            found[f"{name}{kind}"] = replace(family, task=task, gguf={})
    found |= _joined(_tables("ARCHITECTURES"))
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
