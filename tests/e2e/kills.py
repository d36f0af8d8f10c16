"""The command line of the modules that kill servers at random moments."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def run_kills(
    about: str | None,
    run: Callable[[Path, int, int], T],
    kills: int,
) -> tuple[int, T]:
    """Call `run` with a new folder, and the number of kills and the seed of the command line.

    `kills`: as many if the command line does not say. Returns their number, and what `run` returns.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--kills", type=int, default=kills)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder), arguments.kills, arguments.seed)
    return arguments.kills, found
