"""What each test takes, and which functions it calls: so that a mutant meets only tests that can
see it."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

import pytest
from _pytest.runner import runtestprotocol

from tests.mutation.operators import functions_of

Place = tuple[str, str]  # file and qualified name of an outermost function


@dataclass(frozen=True)
class Profile:
    seconds: float  # of processor time
    calls: frozenset[Place]


class Calls:
    """Collects the functions of some files that are called while it looks."""

    def __init__(self, root: Path, paths: Iterable[str]) -> None:
        self._paths = {str(root / path): path for path in paths}
        self._seen: set[CodeType] = set()

    def __enter__(self) -> Calls:
        self._seen.clear()
        threading.settrace(self._look)  # of threads that begin meanwhile
        sys.settrace(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def _look(self, frame: FrameType, event: str, _: object) -> None:
        self._seen.add(
            frame.f_code
        )  # of every call; that nothing is returned leaves its lines alone

    def places(self) -> frozenset[Place]:
        paths = self._paths
        codes = (code for code in self._seen.copy() if code.co_filename in paths)
        return frozenset(
            (paths[code.co_filename], code.co_qualname.split(".<locals>")[0]) for code in codes
        )


def learn(
    items: list[pytest.Item], root: Path, paths: list[str], store: Path
) -> dict[str, Profile]:
    """Profiles by the id of the test; without those that fail or are skipped. Tests are not run
    again if their file and the names of all functions of `paths` are as they were the last time."""
    known = json.loads(store.read_text()) if store.exists() else {}
    traced = _functions(root, paths)
    keys = {item.nodeid: _key(item, traced) for item in items}
    unknown = [item for item in items if known.get(item.nodeid, {}).get("key") != keys[item.nodeid]]
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # what tests leave behind stays there
        os.close(reader)
        with os.fdopen(writer, "w") as out:
            for item in unknown:
                out.write(json.dumps({"id": item.nodeid, **_profile(item, root, paths)}) + "\n")
                out.flush()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as lines:
        for line in lines:
            found = json.loads(line)
            known[found.pop("id")] = found | {"key": keys[json.loads(line)["id"]]}
    os.waitpid(child, 0)
    store.parent.mkdir(parents=True, exist_ok=True)
    store.write_text(json.dumps(known))
    profiles = {}
    for item in items:
        found = known.get(item.nodeid)
        if found is not None and found["passed"]:
            places = frozenset((path, name) for path, name in found["calls"])
            profiles[item.nodeid] = Profile(found["seconds"], places)
    return profiles


def _profile(item: pytest.Item, root: Path, paths: list[str]) -> dict[str, object]:
    began = time.process_time()
    with Calls(root, paths) as calls:
        reports = runtestprotocol(item, log=False, nextitem=None)
    seconds = time.process_time() - began
    passed = len(reports) == 3 and all(report.passed for report in reports)
    return {"seconds": seconds, "passed": passed, "calls": sorted(calls.places())}


def _functions(root: Path, paths: list[str]) -> bytes:
    """Files and names of all functions: with others, the learnt calls would not name them."""
    names = ((path, name) for path in paths for name in functions_of((root / path).read_text()))
    return json.dumps(sorted(names)).encode()


def _key(item: pytest.Item, traced: bytes) -> str:
    return hashlib.sha256(traced + item.path.read_bytes()).hexdigest()[:16]
