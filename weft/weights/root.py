"""The folder from which new weights may be read while the engine serves (`--weights-root`). Nothing
outside of it is read.

Error messages contain the requested name, never the real path.
"""

from __future__ import annotations

import stat
from pathlib import Path

from weft.config.model import BadCheckpoint, ModelNotFound
from weft.weights.fetch import INDEX, weight_files
from weft.weights.gguf.files import SUFFIX

DESCRIPTIONS = ("config.json", "generation_config.json", INDEX)


def default_root(folder: Path) -> Path:
    """The parent of a model's folder. In the hub's cache, where files are links, the folder that
    also contains their targets. For a GGUF file, the parent of the file's folder, because weft
    itself makes the folder that describes the file.
    """
    for path in folder.glob(f"*{SUFFIX}"):
        if path.is_symlink():
            folder = (folder / path.readlink()).parent
            break
    parent = folder.resolve().parent
    return parent.parent if parent.name == "snapshots" else parent


class WeightsRoot:
    def __init__(self, root: Path) -> None:
        self._root = root.resolve()

    def folder(self, name: str) -> Path:
        """The folder with this name, relative to the root or absolute. Raises ModelNotFound if it
        is not below the root."""
        try:
            folder = (self._root / name).resolve()
            is_below = bool(name) and folder.is_relative_to(self._root)
            if is_below and folder.is_dir():
                return folder
        except (
            OSError,
            ValueError,
            RuntimeError,
        ) as exc:  # too long a name, NUL, links in a circle
            raise ModelNotFound(f"{name[:200]!r} is not the name of a folder") from exc
        if not is_below:
            raise ModelNotFound(
                f"{name[:200]!r} is not below the folder for weights (--weights-root)"
            )
        raise ModelNotFound(
            f"there is no folder {name[:200]!r} in the folder for weights (--weights-root)"
        )

    def weight_files(self, folder: Path) -> dict[str, Path]:
        """The weight files of a folder that `folder` returned, by name.

        Raises ModelError if a file is missing, links to a path outside of the root, or is not a
        regular file.
        """
        for name in DESCRIPTIONS:
            if (folder / name).is_symlink() or (folder / name).exists():
                self._regular(folder / name)
        return {path.name: self._regular(path) for path in weight_files(folder)}

    def _regular(self, path: Path) -> Path:
        """The file with all links resolved. Raises BadCheckpoint as `weight_files` does."""
        try:
            file = path.resolve(strict=True)
            is_regular = stat.S_ISREG(file.lstat().st_mode)
        except (OSError, RuntimeError) as exc:
            raise BadCheckpoint(
                f"{path.name} cannot be opened: {getattr(exc, 'strerror', None) or exc}"
            ) from exc
        if not file.is_relative_to(self._root):
            raise BadCheckpoint(
                f"{path.name} is a link out of the folder for weights (--weights-root)"
            )
        if not is_regular:
            raise BadCheckpoint(f"{path.name} is not a regular file")
        return file
