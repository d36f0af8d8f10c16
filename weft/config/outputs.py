"""Judges the files that a command will write, before its work begins: hours of work must not end
with "cannot write". It creates and changes no file, and does not know what is written.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path


def wrong_file(name: str) -> str:
    """Why the file `name` cannot be written; "" if it can. "" and "-" are no files."""
    if name in ("", "-"):
        return ""
    path = Path(name)
    folder = path.parent
    if not folder.is_dir():
        return f"there is no folder {folder}"
    if path.is_dir():
        return "this is a folder; the name of a file is expected"
    if not os.access(path if path.exists() else folder, os.W_OK):
        return "it cannot be written: permission denied"
    return ""


def wrong_picture(name: str) -> str:
    """Why curves cannot be drawn into the file `name`; "" if they can."""
    if name and find_spec("matplotlib") is None:
        return "curves need matplotlib: pip install matplotlib"
    kinds = (".png", ".svg", ".pdf")
    if name and Path(name).suffix.lower() not in kinds:
        return f"a name that ends in {', '.join(kinds)} is expected"
    return wrong_file(name)
