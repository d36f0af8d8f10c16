"""The kernels for tests: the library that serves here, and one with the other instruction sets that
this processor has, built once for each state of the sources."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from weft.ops.cpp.build import (
    EMULATED,
    PORTABLE,
    CannotBuild,
    all_sets,
    build,
    find_compiler,
    find_or_build,
    library_name,
    processor_flags,
    sets_here,
)
from weft.ops.cpp.library import Library, Unavailable

DAY_S = 24 * 3600
HERE = tuple(one for one in all_sets() if one.needs <= processor_flags() or not processor_flags())
NAMES = {one.name for one in HERE}
# Where the processor has the instructions themselves, emulated ones tell nothing more.
LACKS_PAIRS = "avx512_vnni" in NAMES and "avx512_bf16" not in NAMES
BUILT = (*HERE[:-1], EMULATED, HERE[-1]) if LACKS_PAIRS else HERE
SETS = tuple(one.name for one in BUILT)
# A set takes half a minute of a processor to compile: these are in the library that serves.
SERVED = sets_here()[0].name
SERVING = {SERVED, PORTABLE.name}
OTHERS = tuple(one for one in BUILT if one.name not in SERVING)
# Each line of its code is also in one of these two: of the first it lacks the pairs, and the second
# lacks its bytes. So a usual run neither compiles nor tries it.
BESIDE = {"avx512_bf16_kv", "avx512"}
BETWEEN = "avx512_vnni" if NAMES >= BESIDE and SERVED != "avx512_vnni" else ""
# The sets that do not serve here take a third less to compile so; with `--all` as they are served.
QUICKLY = "-O1"


# The first test of a run waits for the compiler, which takes a minute or two, and on a busy machine
# many.
BUILD_TIMEOUT_S = 1200


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "library_file" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(BUILD_TIMEOUT_S))
        if parameters_of(item).get("kernels") == BETWEEN:
            item.add_marker(pytest.mark.slow)
    for item in of_other_thirds(items):
        item.add_marker(pytest.mark.slow)


def parameters_of(item: pytest.Item) -> dict[str, Any]:
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else dict(callspec.params)


def of_other_thirds(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """What only `--all` tries. Of the parameter with the most values, the set that serves here has
    all, each other one a third."""
    functions: defaultdict[str, list[Any]] = defaultdict(list)
    for item in items:
        if parameters_of(item).get("kernels") in SETS:
            functions[item.nodeid.partition("[")[0]].append(item)
    for tests in functions.values():
        rows = [test.callspec._idlist for test in tests]
        columns = [list(dict.fromkeys(values)) for values in zip(*rows, strict=True)]
        of_sets = next(column for column in columns if column[0] in SETS)
        others = [column for column in columns if column is not of_sets]
        if not others:
            continue
        longest = max(others, key=len)
        for test, row in zip(tests, rows, strict=True):
            name, value = row[columns.index(of_sets)], row[columns.index(longest)]
            is_chosen = (of_sets.index(name) + longest.index(value)) % 3 == 0
            if name != SERVED and not is_chosen:
                yield test


@pytest.fixture(scope="session")
def library_file() -> Path:
    try:
        find_compiler()
    except CannotBuild as problem:
        pytest.skip(str(problem))
    return find_or_build()


@pytest.fixture(scope="session")
def others_file(request: pytest.FixtureRequest) -> Path:
    sets = OTHERS
    if not request.config.option.all:
        sets = tuple(
            one._replace(flags=(*one.flags, QUICKLY)) for one in OTHERS if one.name != BETWEEN
        )
    folder = Path(tempfile.gettempdir()) / f"weft-test-kernels-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    assert folder.stat().st_uid == os.getuid()
    assert not folder.stat().st_mode & 0o077
    made = folder / library_name(sets)
    if made.exists():
        return made  # whoever builds another one need not be waited for
    with (folder / "lock").open("w") as lock:
        # Of the processes of a run, the first builds, and the others wait for it.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            for old in folder.glob("*.so"):
                # A younger one may be in use by another run.
                if time.time() - old.stat().st_mtime > DAY_S:
                    old.unlink(missing_ok=True)
            build(made, sets)
    return made


@pytest.fixture(scope="session")
def library(request: pytest.FixtureRequest, library_file: Path) -> Callable[[str], Library]:
    """The library with one instruction set."""

    def choose(instruction_set: str = "") -> Library:
        file = library_file
        if instruction_set and instruction_set not in SERVING:
            file = request.getfixturevalue("others_file")
        Library(file)  # what cannot be loaded at all is an error, not a missing instruction set
        try:
            return Library(file, instruction_set)
        except Unavailable as problem:
            pytest.skip(str(problem))

    return choose


@pytest.fixture(params=SETS)
def kernels(request: pytest.FixtureRequest, library: Callable[[str], Library]) -> Library:
    """Once for each instruction set; skipped where the processor lacks it."""
    return library(request.param)
