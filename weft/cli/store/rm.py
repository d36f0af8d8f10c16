"""The verb `rm`: removes a model, after a question, or the weights cache."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from weft.cli.store.common import require_name, settings_of
from weft.config.amounts import size
from weft.config.model import ModelNotFound
from weft.config.options import Command, SettingsError, option
from weft.store.store import ModelStore
from weft.weights.cache.folder import cache_at

ABOUT = (
    "Remove a model of this machine, or, with --cached-weights, the files of the weights cache "
    "that no process uses. Asks first, unless --yes says so."
)


@dataclass(frozen=True, kw_only=True)
class RemoveOptions:
    name: str = option("", "the model to remove", group="rm", everyday=True)
    models_dir: str = option(
        "", "folder with your own models (WEFT_MODELS_DIR)", group="rm", everyday=True
    )
    cached_weights: bool = option(
        False, "clear the weights cache instead of removing a model", group="rm", everyday=True
    )
    weights_cache: str = option(
        "", "its folder, if it is not the usual one", group="rm", everyday=True
    )
    yes: bool = option(False, "do not ask", group="rm", everyday=True)


def rm(argv: Sequence[str]) -> int:
    """Run the verb. Returns the exit status: 1 if the user says no."""
    settings = settings_of(
        Command("weft rm", ABOUT, RemoveOptions, positional="name", has_variables=False), argv
    )
    if settings is None:
        return 0
    options = settings.make(RemoveOptions)
    if options.cached_weights:
        if options.name:
            raise SettingsError("name a model, or give --cached-weights, not both")
        return _clear(options)
    store = ModelStore(options.models_dir)
    removal = store.removal(store.find(require_name(options.name, "rm")))
    entry = removal.entry
    freed = size(removal.num_bytes)
    if not _is_sure(f"remove {entry.name} ({freed} of {entry.path.parent})?", options.yes):
        return 1
    try:
        removal.do()
    except OSError as exc:
        raise ModelNotFound(f"{entry.name} cannot be removed: {exc}") from exc
    print(f"{entry.name} is removed: {freed} are free")
    return 0


def _clear(options: RemoveOptions) -> int:
    cache = cache_at(options.weights_cache, 0.0)
    unused = sum(file.num_bytes for file in cache.files() if not file.is_used)
    if not _is_sure(f"remove {size(unused)} of {cache.folder}?", options.yes):
        return 1
    freed, num_left = cache.clear()
    left = f"; {num_left} files are in use and stay" if num_left else ""
    print(f"{size(freed)} are free{left}")
    return 0


def _is_sure(question: str, is_yes: bool) -> bool:
    """Whether the user wants it. Raises SettingsError if nobody can be asked."""
    if is_yes:
        return True
    if not sys.stdin.isatty():
        raise SettingsError(f"{question} Nobody can be asked here: --yes removes it")
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
