"""Figures on their way to tables and files."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from typing import Any

import numpy as np

from weft.config.options import SettingsError


def write_json(name: str, kind: str, settings: dict[str, Any], results: object) -> None:
    """Write results with what is needed to compare them to others, if a file is wanted."""
    if not name:
        return
    machine = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
    }
    document = {
        "bench": kind,
        "time": time.time(),
        "machine": machine,
        "settings": settings,
        "results": results,
    }
    try:
        with open(name, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)
    except OSError as exc:
        raise SettingsError(f"cannot write {name}: {exc.strerror}") from exc
    print(f"written to {name}", file=sys.stderr)


def percentiles(seconds: list[float]) -> list[float]:
    """p50, p90 and p99 in milliseconds."""
    values: list[float] = (
        (1e3 * np.percentile(seconds, (50, 90, 99))).tolist() if seconds else [math.nan] * 3
    )
    return values
