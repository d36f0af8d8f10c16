"""The folders from which adapters may be read: those below the root of weights, those that the
settings name, and those in the folder of adapters. Errors name the requested path, never its
location."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from weft.config.adapters import parse_lora_paths, wrong_name
from weft.config.engine import EngineConfig
from weft.config.model import ModelNotFound
from weft.executor.lora.read import CONFIG
from weft.weights.root import WeightsRoot, default_root


class AdapterFolders:
    def __init__(
        self, root: str, model: Path, named: Iterable[str] = (), directory: str = ""
    ) -> None:
        """`root`: the value of --weights-root; empty: derived from the folder of the `model`. The
        folders `named`, and the one whose subfolders are adapters, may be anywhere."""
        path = Path(root).expanduser() if root else default_root(model.resolve())
        self._root = WeightsRoot(path)
        self._named = {_resolved(one) for one in named}
        self._directory = _resolved(directory) if directory else None

    @classmethod
    def of(cls, config: EngineConfig, model: Path) -> AdapterFolders:
        """The folders that the settings of an engine allow. `model`: its folder."""
        named = parse_lora_paths(config.lora_paths)
        return cls(config.weights_root, model, [one.path for one in named], config.lora_dir)

    def folder(self, path: str) -> Path:
        """The folder of this path. Raises ModelNotFound for a folder that may not be read or does
        not exist."""
        asked = _resolved(path)
        if asked in self._named or asked.parent == self._directory:
            if asked.is_dir():
                return asked
            raise ModelNotFound(f"there is no folder {path[:200]!r}")
        return self._root.folder(path)

    def offered(self, name: str) -> str:
        """The folder of the adapter that requests may use by this name before it is loaded; empty
        if there is none."""
        if self._directory is None or wrong_name(name) or Path(name).name != name:
            return ""
        folder = _resolved(str(self._directory / name))
        if folder.parent != self._directory or not (folder / CONFIG).is_file():
            return ""
        return str(folder)


def _resolved(path: str) -> Path:
    """The path after resolving all links."""
    try:
        return Path(path).expanduser().resolve()
    except (OSError, ValueError, RuntimeError):  # name too long, NUL, circular links
        return Path()
