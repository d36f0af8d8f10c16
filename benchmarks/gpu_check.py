"""One command that tells whether weft's path for GPUs is right on this machine, and how fast it is.

    python benchmarks/gpu_check.py --out DIR                        everything, in less than 9 minutes
    python benchmarks/gpu_check.py --out DIR --parts kernels,steps  some of it
    python benchmarks/gpu_check.py --device cpu --small             the script itself, in a minute, with tiny shapes

Every part (`gpu_parts/`) is a process of its own with a time limit: one that fails, hangs or breaks the GPU's context
takes no other with it, and what it had found until then stays. The findings stand in DIR/gpu_check.json, and a line
each is printed. Exit status 1 if a part failed or something that was compared is not equal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent

PARTS = {  # name -> seconds that it may take
    "probe": 40,
    "kernels": 90,
    "steps": 80,
    "states": 60,
    "attention": 80,
    "bench-0.6b": 70,
    "bench-8b": 110,
}


def main() -> int:
    options = arguments()
    folder = Path(options.out or tempfile.mkdtemp(prefix="weft-gpu-check-"))
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    findings = {}
    for name in options.parts:
        limit_s = options.budget_s - (time.monotonic() - began)
        if not options.small:  # tiny shapes are tried on machines that may be busy
            limit_s = min(PARTS[name], limit_s)
        findings[name] = run(name, options, folder, limit_s)
        (folder / "gpu_check.json").write_text(json.dumps(findings, indent=1))
        print("\n".join(lines(name, findings[name])), flush=True)
    total = time.monotonic() - began
    failed = [name for name, found in findings.items() if not is_good(found)]
    print(
        f"{total:.0f} s; {'all is well' if not failed else 'look at: ' + ', '.join(failed)}; {folder}/gpu_check.json"
    )
    return 1 if failed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try the script")
    parser.add_argument(
        "--parts", default=list(PARTS), type=lambda text: text.split(","), help=", ".join(PARTS)
    )
    parser.add_argument("--out", default="", help="folder for the findings")
    parser.add_argument("--budget-s", default=530.0, type=float, help="seconds for everything")
    options = parser.parse_args()
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    return options


def run(name: str, options: argparse.Namespace, folder: Path, limit_s: float) -> dict[str, object]:
    """Run a part. What it writes down as it goes is kept, however it ends."""
    file, log = folder / f"{name}.jsonl", folder / f"{name}.log"
    file.unlink(missing_ok=True)
    if limit_s <= 5:
        return {"end": "no time was left", "seconds": 0.0, "rows": []}
    command = [
        sys.executable,
        "-m",
        "gpu_parts.part",
        name,
        options.device,
        "small" if options.small else "full",
        file,
    ]
    paths = os.pathsep.join((str(ROOT), str(Path(__file__).parent)))
    began = time.monotonic()
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                list(map(str, command)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
                env={**os.environ, "PYTHONPATH": paths},
                check=False,
            )
            end = "" if done.returncode == 0 else f"ended with {done.returncode}: {last_line(log)}"
        except subprocess.TimeoutExpired:
            end = f"was stopped after {limit_s:.0f} s"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {"end": end, "seconds": round(time.monotonic() - began, 1), "rows": rows}


def last_line(log: Path) -> str:
    return (log.read_text(errors="replace").strip().splitlines() or [""])[-1][:200]


def is_good(found: dict[str, object]) -> bool:
    rows = found["rows"]
    assert isinstance(rows, list)
    return not found["end"] and all(row.get("ok", True) for row in rows)


def lines(name: str, found: dict[str, object]) -> list[str]:
    """A part for people: what is wrong stands out."""
    rows = found["rows"]
    assert isinstance(rows, list)
    head = f"== {name}: {found['seconds']} s {found['end']}".rstrip()
    return [head, *(("   " if row.get("ok", True) else "!! ") + text(row) for row in rows)]


def text(row: dict[str, object]) -> str:
    figures = [(key, value) for key, value in row.items() if key != "what"]
    values = (
        f"{key} {value:,.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in figures
    )
    return f"{row['what']!s:<44} {'  '.join(values)}"


if __name__ == "__main__":
    sys.exit(main())
