"""The command `weft` with the fake engine in the place of the real one."""

from __future__ import annotations

import sys
from pathlib import Path

from weft.launch import cli, engine_process

engine_process.COMMAND = (sys.executable, str(Path(__file__).parent / "fake_engine.py"))

if __name__ == "__main__":
    sys.exit(cli.main())
