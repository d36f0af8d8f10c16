"""Runs the tests that read clocks, or start threads, processes or servers, beside busy processes:
none may depend on how fast the machine is.

    python -m tests.busy [--loops 30] [--minutes 60] [--parts 1] [--apart] [--list] [PATH ...]

The tests are run again and again until the time is over, at least once. With `--parts N` each round
has every N-th file, in turn. Ends with 1 if any failed.

Two processors give a test beside 30 loops a sixteenth of their time. With `--apart` the loops have
a session of their own, as those of another user have; where Linux divides time between sessions
first (sched(7), autogroup), the tests get half of it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.durations import ROOT
from tests.fast import imported_names, naming

# Modules with which a test waits, or is waited for.
CLOCKS = frozenset(
    (
        "asyncio",
        "concurrent.futures",
        "httpx",
        "multiprocessing",
        "psutil",
        "select",
        "signal",
        "socket",
        "subprocess",
        "threading",
        "time",
        "zmq",
    )
)
# So many processes, the first of which has started the others. Each ends with the one that started
# it, also if that was killed.
LOOPS = """
import os, sys
parent, first = os.getppid(), os.getpid()
for _ in range(int(sys.argv[1]) - 1):
    if not os.fork():
        parent = first
        break
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Run tests of time beside busy processes.")
    parser.add_argument("paths", nargs="*", default=["tests"], metavar="PATH")
    parser.add_argument("--loops", type=int, default=30, help="busy processes")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no round after these")
    parser.add_argument("--parts", type=int, default=1, help="run so many rounds for all files")
    parser.add_argument("--apart", action="store_true", help="loops have their own session")
    parser.add_argument("--list", action="store_true", help="print the files, and run none")
    asked = parser.parse_args()
    files = [file for file in timed_files(_imports()) if _is_below(file, asked.paths)]
    if asked.list or not files:
        print("\n".join(files) or f"no test below {', '.join(asked.paths)} reads a clock")
        return 0 if files else 1
    until_s = time.monotonic() + 60 * asked.minutes
    num_rounds = num_failed = 0
    with busy(asked.loops, apart=asked.apart):
        while not num_rounds or time.monotonic() < until_s:
            began_s = time.monotonic()
            part = files[num_rounds % asked.parts :: asked.parts]
            command = [sys.executable, "-m", "pytest", "-q", *part]
            status = subprocess.run(command, cwd=ROOT, check=False).returncode
            num_rounds += 1
            num_failed += status != 0
            took_s = time.monotonic() - began_s
            print(f"round {num_rounds}: status {status}, {took_s:,.0f} s", flush=True)
    print(f"{len(files)} files beside {asked.loops} loops: {num_failed} of {num_rounds} failed")
    return 1 if num_failed else 0


def timed_files(imports: Mapping[str, set[str]]) -> list[str]:
    """The files of tests that import one of `CLOCKS`, by themselves, through helpers, or through
    the fixtures of their folder. `imports`: what each file imports."""
    timed = {file for file, names in imports.items() if names & CLOCKS}
    found = naming(timed, imports)
    for file in timed:
        folder = str(Path(file).parent)
        # The fixtures of all tests are those of pytest itself.
        if Path(file).name == "conftest.py" and folder != "tests":
            found |= {one for one in imports if _is_test(one) and _is_below(one, [folder])}
    return sorted(found)


@contextmanager
def busy(num_loops: int, *, apart: bool = False) -> Iterator[subprocess.Popen[bytes]]:
    """So many processes keep the processors busy, if `apart` in a session of their own. The first
    of them has started the others."""
    command = [sys.executable, "-S", "-c", LOOPS, str(num_loops)]
    first = subprocess.Popen(command, start_new_session=apart)
    try:
        yield first
    finally:
        first.kill()
        first.wait()


def _imports() -> dict[str, set[str]]:
    return {
        str(path.relative_to(ROOT)): imported_names(path.read_text("utf-8"))
        for path in (ROOT / "tests").rglob("*.py")
    }


def _is_test(file: str) -> bool:
    return Path(file).name.startswith("test_")


def _is_below(file: str, paths: list[str]) -> bool:
    return any(Path(file).is_relative_to(path) for path in paths)


if __name__ == "__main__":
    sys.exit(main())
