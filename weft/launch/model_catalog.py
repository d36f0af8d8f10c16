"""The `ModelCatalog` of a server: the store of models of this machine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from weft.config.model import ModelError, ModelNotFound
from weft.server.catalog import CatalogError, CatalogModel, NoSuchModel, PullState
from weft.store.details import digest_of_files, weights_in
from weft.store.store import Entry, ModelStore
from weft.weights.pull.progress import ProgressWatcher, PullProgress
from weft.weights.pull.transfer import Download

MOST_KEPT = 256  # models whose facts are kept


class StoreCatalog:
    def __init__(self, store: ModelStore | None = None) -> None:
        self.num_changes = 0  # pulls, copies and removals so far
        self._store = store or ModelStore()
        self._digest = lru_cache(MOST_KEPT)(_digest_of)
        self._facts = lru_cache(MOST_KEPT)(self._facts_of)

    def show(self, name: str) -> CatalogModel:
        found = self.facts(name)
        return found._replace(digest=self.digest(str(self._find(name).path)))

    def facts(self, name: str) -> CatalogModel:
        return self._facts(self._find(name))

    def _facts_of(self, entry: Entry) -> CatalogModel:
        try:
            found = self._store.details(entry)._asdict()
        except ModelError as exc:
            raise CatalogError(str(exc)) from exc
        for unused in ("architecture", "problem"):
            del found[unused]
        return CatalogModel(**found, modified_at=entry.modified_at, digest="")

    def digest(self, folder: str) -> str:
        try:
            files = weights_in(Path(folder))
            return self._digest(tuple((str(path), path.stat().st_mtime_ns) for path in files))
        except (ModelError, OSError):
            return ""

    def pull(
        self, name: str, report: Callable[[PullState], None], stopped: threading.Event
    ) -> None:
        watcher = _Reporter(report, stopped)
        try:
            self._store.pull(name, watcher=watcher)
        except ModelNotFound as exc:
            raise CatalogError(str(exc)) from exc
        self.num_changes += 1

    def delete(self, name: str) -> None:
        self.num_changes += 1  # also if another program has removed it before
        entry = self._find(name)
        try:
            self._store.removal(entry).do()
        except ModelError as exc:
            raise CatalogError(str(exc)) from exc
        except OSError as exc:
            raise CatalogError(f"{entry.name} cannot be removed: {exc}") from exc
        self.num_changes += 1

    def copy(self, source: str, destination: str) -> None:
        entry = self._find(source)
        try:
            self._store.copy(entry, destination)
        except (ModelError, OSError) as exc:
            raise CatalogError(str(exc)) from exc
        self.num_changes += 1

    def _find(self, name: str) -> Entry:
        try:
            return self._store.find(name)
        except ModelNotFound as exc:
            raise NoSuchModel(str(exc)) from exc


class _Reporter(ProgressWatcher):
    """Reports each file by its digest, as Ollama's clients show a bar for each."""

    def __init__(self, report: Callable[[PullState], None], stopped: threading.Event) -> None:
        super().__init__(_nothing, lambda line: report(PullState(line)))
        self.stopped = stopped
        self._report = report

    def at(self, part: Download, num_bytes: int) -> None:
        super().at(part, num_bytes)
        digest = part.file.etag
        status = f"pulling {digest[:12]}"
        self._report(PullState(status, digest, part.file.num_bytes, num_bytes))

    def checking(self, part: Download) -> None:
        self._report(PullState("verifying sha256 digest"))


def _nothing(progress: PullProgress) -> None:
    """Files are reported one by one."""


def _digest_of(files: tuple[tuple[str, int], ...]) -> str:
    return digest_of_files([Path(path) for path, _ in files])
