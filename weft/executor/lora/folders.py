"""The folders that adapters may be read from: those below the root of weights, and those that the
settings name. Errors name what was asked for, never where it lies."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from weft.config.adapters import parse_lora_paths
from weft.config.engine import EngineConfig
from weft.config.model import ModelNotFound
from weft.executor.weights.root import WeightsRoot, default_root


class AdapterFolders:
    def __init__(self, root: str, model: Path, named: Iterable[str] = ()) -> None:
        """`root` as --weights-root says it; nothing: as follows from the folder of the `model`.
        `named` folders may be anywhere."""
        path = Path(root).expanduser() if root else default_root(model.resolve())
        self._root = WeightsRoot(path)
        self._named = {_resolved(one) for one in named}

    @classmethod
    def of(cls, config: EngineConfig, model: Path) -> AdapterFolders:
        """Those that the settings of an engine allow. `model`: its folder."""
        named = parse_lora_paths(config.lora_paths)
        return cls(config.weights_root, model, [one.path for one in named])

    def folder(self, path: str) -> Path:
        """The folder of that name. Raises ModelNotFound for one that may not be read, or that is
        not there."""
        named = _resolved(path)
        if named in self._named:
            if named.is_dir():
                return named
            raise ModelNotFound(f"there is no folder {path[:200]!r}")
        return self._root.folder(path)


def _resolved(path: str) -> Path:
    """The path itself, behind all links."""
    try:
        return Path(path).expanduser().resolve()
    except (OSError, ValueError, RuntimeError):  # too long a name, NUL, links in a circle
        return Path()
