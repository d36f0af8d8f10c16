"""Engines that Ray has started."""

from __future__ import annotations

import psutil


def engines() -> list[psutil.Process]:
    """The engine processes below Ray's."""
    return [one for one in psutil.process_iter(["cmdline"]) if is_engine(one)]


def is_engine(process: psutil.Process) -> bool:
    command = process.info["cmdline"] or []
    if "weft.launch.start_worker" not in command:
        return False
    return any("Replica" in " ".join(parent.cmdline()) for parent in process.parents())
