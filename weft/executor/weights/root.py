"""The folder below which new weights are read while the engine serves, and nothing outside of it.

Errors name what was asked for, never where it lies.
"""

from __future__ import annotations

import stat
from pathlib import Path

from weft.config.model import BadCheckpoint, ModelNotFound
from weft.executor.weights.fetch import INDEX, weight_files
from weft.executor.weights.gguf.files import ENDING

DESCRIPTIONS = ("config.json", "generation_config.json", INDEX)


def default_root(folder: Path) -> Path:
    """The parent of a model's folder; in the cache of the hub, where its files are links, what
    holds them too. Of a GGUF file, its own folder's parent: the folder that describes it is ours.
    """
    for path in folder.glob(f"*{ENDING}"):
        if path.is_symlink():
            folder = (folder / path.readlink()).parent
            break
    parent = folder.resolve().parent
    return parent.parent if parent.name == "snapshots" else parent


class WeightsRoot:
    def __init__(self, root: Path) -> None:
        self._root = root.resolve()

    def folder(self, name: str) -> Path:
        """The folder of that name, relative to the root or absolute. Raises ModelNotFound if it is
        not below it."""
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
        """The weight files of a folder as `folder` gave it, by name.

        Raises ModelError if one is missing, leads out of the root, or is no regular file.
        """
        for name in DESCRIPTIONS:
            if (folder / name).is_symlink() or (folder / name).exists():
                self._regular(folder / name)
        return {path.name: self._regular(path) for path in weight_files(folder)}

    def _regular(self, path: Path) -> Path:
        """The file itself, with all links resolved."""
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
