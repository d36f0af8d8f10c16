"""Models in the user's own folder, by name: a folder with a model, or a GGUF file.

    ~/.local/share/weft/models/        or --models-dir, WEFT_MODELS_DIR
        my-model/config.json ..        my-model
        other.Q4_K_M.gguf              other.Q4_K_M

`weft cp` makes models there. A link that leads out of the folder is no model of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from weft.weights.gguf import files as gguf_files
from weft.weights.pull.names import BadName, is_plain, require_printable

VARIABLE = "WEFT_MODELS_DIR"


def models_folder(asked: str = "") -> Path:
    """The folder of the user's own models; it may not exist."""
    named = asked or os.environ.get(VARIABLE, "")
    if named:
        return Path(named).expanduser().absolute()
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "weft" / "models"


def own_models(folder: Path) -> Iterator[tuple[str, Path]]:
    """Names and paths of the models in this folder, by name."""
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return
    found = [path for path in paths if not leads_out(path, folder)]
    for path in gguf_files.first_of_each(path for path in found if _is_gguf(path)):
        yield gguf_files.stem(path), path
    for path in found:
        if path.is_dir() and ((path / "config.json").is_file() or any(path.glob("*.gguf"))):
            yield path.name, path


def own_model(name: str, folder: Path) -> Path | None:
    """The folder or file of the model with this name; None: there is none. Raises BadName for a
    name that leads elsewhere."""
    require_printable(name)
    if not is_plain(name):
        return None
    for known, path in own_models(folder):
        if known == name:
            return path
    for path in (folder / name, folder / f"{name}{gguf_files.ENDING}"):
        if path.is_symlink() and leads_out(path, folder):
            raise BadName(f"{name} is a link out of {folder}, so it is no model there")
    return None


def leads_out(path: Path, folder: Path) -> bool:
    """Whether a path in the folder is a link to something outside of it, or to nothing."""
    try:
        return not path.resolve(strict=True).is_relative_to(folder.resolve())
    except (OSError, RuntimeError):
        return True


def _is_gguf(path: Path) -> bool:
    return path.name.endswith(gguf_files.ENDING) and path.is_file()
