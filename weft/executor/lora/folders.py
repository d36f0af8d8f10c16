"""The folders that adapters may be read from: those below the root of weights, those that the
settings name, and those in the folder of adapters. Errors name what was asked for, never where it
lies."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from weft.config.adapters import parse_lora_paths, wrong_name
from weft.config.engine import EngineConfig
from weft.config.model import ModelNotFound
from weft.executor.lora.read import CONFIG
from weft.executor.weights.root import WeightsRoot, default_root


class AdapterFolders:
    def __init__(
        self, root: str, model: Path, named: Iterable[str] = (), directory: str = ""
    ) -> None:
        """`root` as --weights-root says it; nothing: as follows from the folder of the `model`.
        `named` folders, and the one whose folders are adapters, may be anywhere."""
        path = Path(root).expanduser() if root else default_root(model.resolve())
        self._root = WeightsRoot(path)
        self._named = {_resolved(one) for one in named}
        self._directory = _resolved(directory) if directory else None

    @classmethod
    def of(cls, config: EngineConfig, model: Path) -> AdapterFolders:
        """Those that the settings of an engine allow. `model`: its folder."""
        named = parse_lora_paths(config.lora_paths)
        return cls(config.weights_root, model, [one.path for one in named], config.lora_dir)

    def folder(self, path: str) -> Path:
        """The folder of that name. Raises ModelNotFound for one that may not be read, or that is
        not there."""
        asked = _resolved(path)
        if asked in self._named or asked.parent == self._directory:
            if asked.is_dir():
                return asked
            raise ModelNotFound(f"there is no folder {path[:200]!r}")
        return self._root.folder(path)

    def offered(self, name: str) -> str:
        """The folder of the adapter that requests may name so before it is loaded; nothing if there
        is none."""
        if self._directory is None or wrong_name(name) or Path(name).name != name:
            return ""
        folder = _resolved(str(self._directory / name))
        if folder.parent != self._directory or not (folder / CONFIG).is_file():
            return ""
        return str(folder)


def _resolved(path: str) -> Path:
    """The path itself, behind all links."""
    try:
        return Path(path).expanduser().resolve()
    except (OSError, ValueError, RuntimeError):  # too long a name, NUL, links in a circle
        return Path()
