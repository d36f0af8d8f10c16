"""The verb `list`: the models of this machine, and what they and their caches take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from weft.cli.readable import readable
from weft.cli.store.common import ago, settings_of
from weft.config.amounts import size
from weft.config.options import Command, option
from weft.store.store import Entry, ModelStore
from weft.weights.cache.folder import cache_at

ABOUT = "List the models of this machine, their sizes, where they live, and the weights cache."
SOURCES = {"hub": "cache of the hub", "folder": "own folder", "package": "package"}


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    models_dir: str = option(
        "", "folder with your own models (WEFT_MODELS_DIR)", group="list", everyday=True
    )
    json: bool = option(False, "print JSON", group="list", everyday=True)


def list_models(argv: Sequence[str]) -> int:
    """Run the verb. Returns the exit status."""
    settings = settings_of(Command("weft list", ABOUT, ListOptions, has_variables=False), argv)
    if settings is None:
        return 0
    options = settings.make(ListOptions)
    store = ModelStore(options.models_dir)
    found = store.entries()
    cached = cache_at("", 0.0)
    files = cached.files()
    if options.json:
        models = [
            {"name": one.name, "source": one.source, "path": str(one.path), "bytes": one.num_bytes}
            | {"modified_at": one.modified_at, "is_complete": one.is_complete}
            for one in found
        ]
        kept = [file._asdict() for file in files]
        print(json.dumps({"models": models, "weights_cache": kept}, indent=2))
        return 0
    print("\n".join(readable([_row(one) for one in found])) or "there is no model here")
    total = sum(one.num_bytes for one in found if one.source != "package")
    print()
    print(f"hub's models: {store.hub_cache}")
    print(f"own models:   {store.models_dir}")
    print(f"disk:         {size(total)}")
    if files:
        in_use = sum(file.is_used for file in files)
        text = f"{size(sum(file.num_bytes for file in files))}, {len(files)} files"
        print(f"weights cache: {text}, {in_use} in use, {cached.folder}")
    return 0


def _row(one: Entry) -> dict[str, str]:
    note = "" if one.is_complete else "not complete: weft pull goes on"
    row = {"name": one.name, "size": size(one.num_bytes), "where": SOURCES[one.source]}
    return row | {"changed": ago(one.modified_at), "note": note}
