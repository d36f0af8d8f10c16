"""The command `weft` with the fake engine in the place of the real one."""

from __future__ import annotations

import importlib.abc
import os
import sys
import time
from pathlib import Path

from weft.cli import main as cli
from weft.launch import engine_process

engine_process.COMMAND = (sys.executable, str(Path(__file__).parent / "fake_engine.py"))


class SlowFront(importlib.abc.MetaPathFinder):
    """Importing the front takes until there is the file FAKE_GATE."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        while name == "weft.launch.supervisor" and not Path(os.environ["FAKE_GATE"]).exists():
            time.sleep(0.01)


if "importing" in os.environ.get("FAKE_ENGINE", "").split():
    sys.meta_path.insert(0, SlowFront())

if __name__ == "__main__":
    sys.exit(cli.main())
