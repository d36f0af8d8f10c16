"""The store: the models of this machine under one roof, for the command line and the server."""

from __future__ import annotations

from pathlib import Path

from weft.config.model import ModelNotFound
from weft.store.change import Removal, copy, removal
from weft.store.details import ModelDetails, details, digest, known_digest
from weft.store.entries import Entry, entries, find
from weft.weights.own import models_folder
from weft.weights.pull.names import hub_name
from weft.weights.pull.pull import Pulled, PullWatcher, pull

__all__ = ["Entry", "ModelDetails", "Removal", "Store", "known_digest"]


class Store:
    """`models_dir`: the user's own folder; "": the usual one."""

    def __init__(self, models_dir: str = "") -> None:
        self.models_dir = models_folder(models_dir)

    @property
    def hub_cache(self) -> Path:
        """Where the hub's models live: `HF_HUB_CACHE`, or `hub` below `HF_HOME`."""
        from huggingface_hub import constants

        return Path(constants.HF_HUB_CACHE)

    def entries(self) -> list[Entry]:
        """All models, by name."""
        return entries(self.hub_cache, self.models_dir)

    def find(self, name: str) -> Entry:
        """The model with this name. Raises ModelNotFound."""
        return find(name, self.hub_cache, self.models_dir)

    def has(self, name: str) -> bool:
        try:
            self.find(name)
        except ModelNotFound:
            return False
        return True

    def details(self, entry: Entry) -> ModelDetails:
        """Raises ModelError."""
        return details(entry)

    def digest(self, entry: Entry) -> str:
        """Raises ModelError and OSError."""
        return digest(entry)

    def removal(self, entry: Entry) -> Removal:
        """What removing it would take away. Raises ModelNotFound."""
        return removal(entry, self.hub_cache, self.models_dir)

    def copy(self, entry: Entry, name: str) -> Path:
        """Raises ModelNotFound and OSError."""
        return copy(entry, name, self.models_dir)

    def pull(self, name: str, revision: str = "", watcher: PullWatcher | None = None) -> Pulled:
        """Raises ModelNotFound; KeyboardInterrupt leaves what has come."""
        return pull(hub_name(name), revision, watcher)
