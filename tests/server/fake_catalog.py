"""The models of a machine, without files, for tests of routes."""

from __future__ import annotations

import threading
from collections.abc import Callable

from weft.server.catalog import CatalogError, CatalogModel, NoSuchModel, PullState

DIGEST = 64 * "a"
OTHER = CatalogModel(
    name="org/other:Q4_K_M",
    size_bytes=500,
    modified_at=1_000.0,
    format="gguf",
    family="qwen3",
    num_parameters=596_049_920,
    quantization="Q4_K_M",
    context_length=40_960,
    hidden_size=1_024,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    vocab_size=151_936,
    template="{{ x }}",
    license="mit",
    digest=DIGEST,
)


class FakeCatalog:
    """Has one model; remembers what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.states = [PullState("pulling aaaa", DIGEST, 100, done) for done in (0, 50, 100)]
        self.fails = ""
        self.waits = False
        self.was_stopped = threading.Event()

    def show(self, name: str) -> CatalogModel:
        self._require(name)
        return OTHER

    def facts(self, name: str) -> CatalogModel:
        return self.show(name)._replace(digest="")

    def digest(self, folder: str) -> str:
        return DIGEST

    def pull(
        self, name: str, report: Callable[[PullState], None], stopped: threading.Event
    ) -> None:
        self.calls.append(("pull", name))
        for state in self.states:
            report(state)
        if self.waits:
            stopped.wait()
            self.was_stopped.set()
        if self.fails:
            raise CatalogError(self.fails)

    def delete(self, name: str) -> None:
        self._require(name)
        self.calls.append(("delete", name))

    def copy(self, source: str, destination: str) -> None:
        self._require(source)
        self.calls.append(("copy", source, destination))

    def _require(self, name: str) -> None:
        if name != OTHER.name:
            raise NoSuchModel(f"there is no model {name!r} here")
