"""Writes the figures of benchmarks to files, with the machine and the settings, so that they can be
compared."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections.abc import Sequence

import numpy as np

from weft.config.options import SettingsError
from weft.json_types import JsonObject

PERCENTS = (50, 90, 99)


def write_json(name: str, kind: str, settings: JsonObject, results: object) -> None:
    """Write results with the information that a comparison needs; without a `name`, write no
    file."""
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


def percentiles(seconds: Sequence[float]) -> list[float]:
    """p50, p90 and p99 in milliseconds; NaN if there are no values."""
    if not seconds:
        return [math.nan] * len(PERCENTS)
    values: list[float] = (1e3 * np.percentile(seconds, PERCENTS)).tolist()
    return values
