"""Leaves out of `import torch` what a server without foreign code never calls: the kernels in
Python for the device `meta`, on which tensors have shapes and no values. To register them takes a
third of the import's time.

They are there again before any module is imported that could compute on that device: transformers,
torch's compiler, Triton, plugins of users. It knows no model and no server.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

NAME = "torch._meta_registrations"
# Packages that compute nothing on `meta`; all others that are not Python's own may.
WITHOUT_META = frozenset(
    (
        *sys.stdlib_module_names,
        *("torch", "weft", "numpy", "msgspec", "psutil", "safetensors", "zmq"),
        *("llguidance", "tokenizers"),
        *("_cython_3_3_1", "cython_runtime", "typing_extensions"),
    )
)
COMPILERS = ("torch._dynamo", "torch._inductor")
# A build of torch for CUDA asks at its import whether they are there. Parts of them follow where
# they are imported.
ASKED_FOR = frozenset(("triton", "cutlass", "tvm_ffi"))


class Deferred(Loader):
    """A finder of modules: gives an empty module for `NAME` until foreign code is imported."""

    def __init__(self, known: frozenset[str]) -> None:
        self._known = known

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Called by Python for each module that is imported for the first time."""
        if name == NAME:
            return ModuleSpec(name, self)
        if NAME in sys.modules and name not in ASKED_FOR and self._may_use_meta(name):
            register()
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        """Python's own empty module is enough."""

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is registered now."""

    def _may_use_meta(self, name: str) -> bool:
        return name.partition(".")[0] not in self._known or name.startswith(COMPILERS)


def defer(*packages: str) -> None:
    """Call before torch is imported. If it has been, this does nothing. `packages`: those whose
    code is never run."""
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, Deferred(WITHOUT_META.union(packages)))


def register() -> None:
    """Register the kernels if that was deferred. A second call does nothing."""
    deferred = [finder for finder in sys.meta_path if isinstance(finder, Deferred)]
    if not deferred:
        return
    for finder in deferred:
        sys.meta_path.remove(finder)
    if sys.modules.pop(NAME, None) is not None:
        importlib.import_module(NAME)
