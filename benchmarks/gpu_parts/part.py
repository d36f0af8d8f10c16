"""Runs one part of gpu_check. Findings are written down one by one: what follows a crash is lost, nothing else."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

Row: TypeAlias = dict[str, Any]  # "what", figures, and "ok" where something was compared


class Setting(NamedTuple):
    device: str  # cuda, cpu
    small: bool

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def pick(self, full: Any, small: Any) -> Any:
        return small if self.small else full


MODULES = {
    "states": "steps:states",
    "bench-0.6b": "serving:small_model",
    "bench-8b": "serving:large_model",
}


def main(name: str, device: str, size: str, file: str) -> None:
    module, _, function = MODULES.get(name, f"{name}:findings").partition(":")
    findings: Callable[[Setting], Iterator[Row]] = getattr(
        import_module(f"gpu_parts.{module}"), function
    )
    with Path(file).open("w") as target:
        for row in findings(Setting(device, size == "small")):
            target.write(json.dumps(row) + "\n")
            target.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
