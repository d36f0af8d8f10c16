"""Attention kernels of others, as packages that weft does not need: where each is looked for, and how it is had.

Nothing is imported before it is asked for by name (`--attention-backend`).
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from types import ModuleType

from weft.config.model import ModelError

MODULES = {  # name, which is that of the extra, too -> modules that have it, the first that is there counts
    "fa3": ("flash_attn_interface", "sgl_kernel.flash_attn"),
    "flashinfer": ("flashinfer",),
}


class NoProvider(ModelError):
    """The package that was asked for cannot be had."""


def provider(name: str) -> ModuleType:
    """The module that computes. Raises NoProvider if none is installed, or if it cannot be imported."""
    found = _module(name)
    if found is None:
        modules = " nor ".join(MODULES[name])
        raise NoProvider(
            f"--attention-backend {name}: {modules} is not installed; pip install 'weft[{name}]'"
        )
    try:
        return import_module(found)
    except Exception as exc:  # a package built for another torch or CUDA raises what it likes
        raise NoProvider(
            f"--attention-backend {name}: {found} is installed but cannot be imported: {exc}"
        ) from exc


def installed(name: str) -> str:
    """The package and its version, '' if there is none. Imports nothing."""
    found = _module(name)
    if found is None:
        return ""
    top = found.partition(".")[0]
    try:
        return f"{top} {version(packages_distributions()[top][0])}"
    except (KeyError, PackageNotFoundError):
        return top


def _module(name: str) -> str | None:
    return next((module for module in MODULES[name] if find_spec(module.partition(".")[0])), None)
