"""Runs tests against mutants: each in a fork of a process that has imported everything, so that
none pays for a start.

A mutant of a function is planted by giving the live function the code of the mutated one. One at
the level of a module or a class (a constant, a default) needs a fresh import; so it gets a fork of
a process that has not imported weft yet. A test that takes much longer than it should is ended, and
counts as failed: endless loops die so.
"""

from __future__ import annotations

import gc
import importlib.abc
import importlib.machinery
import importlib.util
import os
import resource
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

import pytest
from _pytest.runner import runtestprotocol

from tests.mutation.baseline import Profile
from tests.mutation.operators import Mutant

IMPORTED_BEFORE = (
    "ignore::pytest.PytestAssertRewriteWarning"  # pytest would rather import its plugins itself
)
PYTEST_OPTIONS = ["-q", "-s", "-p", "no:cacheprovider", "-W", IMPORTED_BEFORE]
MORE_MEMORY = 2 << 30  # bytes that a child may take beyond what its parent has


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    killer: str | None  # the test that failed, or what else ended it; None: it survived
    num_tests: int  # that could have seen it
    seconds: float

    @property
    def is_killed(self) -> bool:
        return self.killer is not None


@dataclass
class Selection:
    """Which tests a mutant meets, in which order: those that call its function, as many as fit into
    `budget_s`. First those that take little time and have killed others, by turns such that call
    little else and such that call much."""

    profiles: dict[str, Profile]
    budget_s: float
    kills: Counter[str] = field(default_factory=Counter)

    def tests(self, mutant: Mutant) -> list[str]:
        place = mutant.path, mutant.function
        found = [id for id, one in self.profiles.items() if self._sees(one, mutant, place)]
        narrow = sorted(found, key=lambda id: self._rank(id) * len(self.profiles[id].calls))
        wide = sorted(found, key=lambda id: self._rank(id) / len(self.profiles[id].calls))
        spent = 0.0
        chosen = dict[str, None]()
        for pair in zip(narrow, wide, strict=True):
            for id in pair:
                if id not in chosen:
                    spent += self.profiles[id].seconds
                    if chosen and spent > self.budget_s:
                        return list(chosen)
                    chosen[id] = None
        return list(chosen)

    def _rank(self, id: str) -> float:
        return (self.profiles[id].seconds + 0.01) / (self.kills[id] + 1)

    @staticmethod
    def _sees(profile: Profile, mutant: Mutant, place: tuple[str, str]) -> bool:
        if mutant.function:
            return place in profile.calls
        return any(path == mutant.path for path, _ in profile.calls)


def try_all(
    mutants: Sequence[Mutant],
    selection: Selection,
    run: Callable[[Mutant, list[str], Callable[[str], None]], None],
    *,
    jobs: int,
    until: float,
    hang_s: float,
) -> Iterator[Verdict]:
    """The verdicts as they come. `run` is called in a child: it tells the id of each test before it
    runs it and returns if all passed. Nothing new is begun after the time `until`."""
    waiting = list(reversed(mutants))
    running: dict[int, _Child] = {}  # by the end of the pipe that is read
    while waiting or running:
        while waiting and len(running) < jobs and time.monotonic() < until:
            mutant = waiting.pop()
            tests = selection.tests(mutant)
            if not tests:
                yield Verdict(mutant, None, 0, 0.0)
                continue
            limit = hang_s + 20 * sum(selection.profiles[id].seconds for id in tests)
            child = _start(mutant, tests, run, limit)
            running[child.reader] = child
        if not running:
            return
        ready, _, _ = select.select(list(running), [], [], 1.0)
        for reader, child in list(running.items()):
            if reader in ready:
                child.read()
            if child.is_over or time.monotonic() > child.until:
                del running[reader]
                verdict = child.verdict()
                if verdict.killer in selection.profiles:
                    selection.kills[verdict.killer or ""] += 1
                yield verdict


@dataclass
class _Child:
    mutant: Mutant
    tests: list[str]
    pid: int
    reader: int
    began: float
    until: float
    told: bytes = b""
    is_over: bool = False

    def read(self) -> None:
        piece = os.read(self.reader, 1 << 16)
        self.told += piece
        self.is_over = not piece

    def verdict(self) -> Verdict:
        if not self.is_over:
            os.kill(self.pid, signal.SIGKILL)
        os.close(self.reader)
        _, status = os.waitpid(self.pid, 0)
        last = self.told.decode().splitlines()[-1:] or ["before the first test"]
        survived = os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0
        return Verdict(
            self.mutant,
            None if survived else last[0],
            len(self.tests),
            time.monotonic() - self.began,
        )


def _start(
    mutant: Mutant,
    tests: list[str],
    run: Callable[[Mutant, list[str], Callable[[str], None]], None],
    limit: float,
) -> _Child:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        now = time.monotonic()
        return _Child(mutant, tests, pid, reader, now, now + limit)
    status = 1
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (used + MORE_MEMORY, used + MORE_MEMORY))
        run(mutant, tests, lambda id: _write(writer, id))
        status = 0
    finally:
        os._exit(status)


def _write(writer: int, id: str) -> None:
    os.write(writer, (id + "\n").encode())


class TestsFailed(Exception):
    """The mutant is dead."""


class InFunctions:
    """Plants mutants of functions in a process that has collected all tests."""

    def __init__(
        self, items: Sequence[pytest.Item], profiles: dict[str, Profile], root: Path
    ) -> None:
        self._items = {item.nodeid: item for item in items}
        self._profiles = profiles
        self._root = root
        self._functions: dict[tuple[str, str, int], list[FunctionType]] = {}
        for one in gc.get_objects():
            if (
                type(one) is FunctionType
            ):  # isinstance would ask proxies what they are, and wake them
                code = one.__code__
                key = code.co_filename, code.co_qualname, code.co_firstlineno
                self._functions.setdefault(key, []).append(one)

    def __call__(self, mutant: Mutant, tests: list[str], tell: Callable[[str], None]) -> None:
        self._plant(mutant)
        for id in tests:
            tell(id)
            seconds = self._profiles[id].seconds
            signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_VIRTUAL, 3.0 + 6 * seconds)
            reports = runtestprotocol(self._items[id], log=False, nextitem=None)
            if any(report.failed for report in reports):
                raise TestsFailed

    def _plant(self, mutant: Mutant) -> None:
        path = self._root / mutant.path
        module = compile(mutant.apply(path.read_text()), str(path), "exec")
        found = [code for code in _codes(module) if code.co_qualname == mutant.function]
        code = next(code for code in found if code.co_firstlineno == mutant.first_line)
        functions = self._functions[str(path), mutant.function, mutant.first_line]
        for function in functions:
            function.__code__ = code


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The codes of a module's outermost functions, those of methods among them."""
    for one in code.co_consts:
        if isinstance(one, CodeType) and "<locals>" not in one.co_qualname:
            yield one
            yield from _codes(one)


class InModules:
    """Plants mutants at the level of modules in a process that has not imported weft."""

    def __init__(self, root: Path, profiles: dict[str, Profile]) -> None:
        self._root = root
        self._profiles = profiles

    def __call__(self, mutant: Mutant, tests: list[str], tell: Callable[[str], None]) -> None:
        assert not any(name == "weft" or name.startswith("weft.") for name in sys.modules)
        sys.meta_path.insert(0, Planted(self._root, mutant))
        tell(mutant.path)
        limit = int(15 + 6 * sum(self._profiles[id].seconds for id in tests))
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        if pytest.main(["-x", *PYTEST_OPTIONS, *tests]) != 0:
            raise TestsFailed


class Planted(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from mutated source."""

    def __init__(self, root: Path, mutant: Mutant) -> None:
        self._path = root / mutant.path
        self._name = mutant.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        return importlib.util.spec_from_file_location(fullname, self._path, loader=self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(
            compile(self._mutant.apply(self._path.read_text()), str(self._path), "exec"),
            module.__dict__,
        )
