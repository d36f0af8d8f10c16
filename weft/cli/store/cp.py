"""The verb `cp`: gives a model a second name, in the user's own folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.cli.store.common import settings_of
from weft.config.model import ModelNotFound
from weft.config.options import Command, SettingsError, option
from weft.store.store import ModelStore

ABOUT = (
    "Copy a model of this machine to another name: weft cp MODEL NAME. The copy is in your own "
    "folder, shares the bytes on the disk where it can, and stays when the other is removed."
)


@dataclass(frozen=True, kw_only=True)
class CopyOptions:
    name: str = option("", "the model to copy", group="cp", everyday=True)
    to: str = option("", "name of the copy, also as second word", group="cp", everyday=True)
    models_dir: str = option(
        "", "folder with your own models (WEFT_MODELS_DIR)", group="cp", everyday=True
    )


def cp(argv: Sequence[str]) -> int:
    """Run the verb. Returns the exit status."""
    words = list(argv)
    if len(words) > 1 and not any(word.startswith("-") for word in words[:2]):
        words.insert(1, "--to")
    settings = settings_of(
        Command("weft cp", ABOUT, CopyOptions, positional="name", has_variables=False), words
    )
    if settings is None:
        return 0
    options = settings.make(CopyOptions)
    if not options.name or not options.to:
        raise SettingsError("two names are needed: weft cp MODEL NAME")
    store = ModelStore(options.models_dir)
    entry = store.find(options.name)
    try:
        path = store.copy(entry, options.to)
    except OSError as exc:
        raise ModelNotFound(f"{entry.name} cannot be copied: {exc}") from exc
    print(f"{options.to} is {path}")
    return 0
