"""Plants small faults into weft, and tells which of them no test notices.

`python -m tests.mutation --sample 200 --seed 1 [FILE OR FOLDER ...]`, or `--area all --sample 10`.
See README.md beside this file.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from tests.mutation.areas import AREAS, CORE, ROOT, Area, files, part_of
from tests.mutation.baseline import Profile, learn
from tests.mutation.equivalents import EQUIVALENT, PLANTED, Key, key_of, planted, read_list
from tests.mutation.operators import Mutant, mutants_of
from tests.mutation.runner import (
    PYTEST_OPTIONS,
    InFunctions,
    InModules,
    Selection,
    Verdict,
    try_all,
)

STORE = ROOT / ".pytest_cache" / "mutation"
FOREIGN = (
    "numpy",
    "msgspec",
    "hypothesis",
    "torch",
    "zmq",
    "httpx",
    "llguidance",
    "tokenizers",
)  # slow to import


def main() -> int:
    args = parse_args()
    record = Record(args.record)
    for name in FOREIGN:
        importlib.import_module(name)
    if not args.area:
        name = "core"
        area = CORE
        if args.planted:  # also outside of the core
            paths = sorted({key.path for key in planted_keys(args.paths)})
            name = "planted"
            area = CORE._replace(traced=(*CORE.traced, *CORE.paths, *paths))
        elif args.paths:
            name, area = part_of(args.paths, args.tests or ())
        if args.tests:
            area = area._replace(tests=tuple(args.tests))
        return run_area(area, name, args, record)
    status = 0
    for name in AREAS if "all" in args.area else args.area:
        print(f"\n{name}:", flush=True)
        status = max(status, run_area(AREAS[name], name, args, record))
    return status


def run_area(area: Area, name: str, args: argparse.Namespace, record: Record) -> int:
    """Try the mutants of one area. Returns 0 if all died, 1 if not, 2 if the tests cannot run."""
    chosen, num_equivalent = choose(area.paths, args)
    print(f"{len(chosen):,} mutants; {num_equivalent} more are listed as equivalent", flush=True)
    wanted = [one for one in chosen if record.wants(one)]
    inner = [one for one in wanted if one.function]
    outer = [one for one in wanted if not one.function]
    store = STORE / f"profiles-{name}.json"
    pid = os.fork()
    if pid == 0:
        plugin = Mutating(inner, record, args, traced=area.traced or area.paths, store=store)
        status = pytest.main([*PYTEST_OPTIONS, *area.tests], plugins=[plugin])
        sys.stdout.flush()
        os._exit(int(status))
    _, status = os.waitpid(pid, 0)
    if status:
        return 2
    if outer:
        profiles = read_profiles(store)
        run = InModules(ROOT, profiles)
        selection = Selection(profiles, args.budget_s)
        until = time.monotonic() + 60 * args.minutes
        found = try_all(outer, selection, run, jobs=args.jobs, until=until, hang_s=args.hang_s)
        record.take(found)
    return record.tell(chosen)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=__doc__.split("\n")[0])
    parser.add_argument(
        "paths",
        nargs="*",
        help="files, folders or patterns below the root, with the tests of their areas; default: the core",
    )
    parser.add_argument("--tests", nargs="+", help="files or folders of tests, instead of those")
    parser.add_argument(
        "--area",
        nargs="+",
        default=[],
        choices=["all", *AREAS],
        help="parts of weft with their own tests, one after the other, instead of paths",
    )
    parser.add_argument(
        "--sample", type=int, default=0, help="try so many of each area, drawn at random; 0: all"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument(
        "--planted", action="store_true", help="only the faults in planted.txt; all must die"
    )
    parser.add_argument(
        "--function", default="", help="only mutants of functions whose name has this in it"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    parser.add_argument(
        "--budget-s", type=float, default=20.0, help="seconds of tests that a mutant meets at most"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=60.0,
        help="begin no mutant after so long, without the time of learning",
    )
    parser.add_argument(
        "--hang-s",
        type=float,
        default=60.0,
        help="seconds beyond twenty times the usual, after which a mutant that waits counts as dead",
    )
    parser.add_argument(
        "--record", type=Path, default=None, help="keep verdicts in this file; killed ones rest"
    )
    return parser.parse_args()


def choose(paths: Iterable[str], args: argparse.Namespace) -> tuple[list[Mutant], int]:
    """The mutants of `paths` that are tried, and how many of all are known to be equivalent."""
    if args.planted:
        keys = planted_keys(args.paths)
        return [planted(key, (ROOT / key.path).read_text()) for key in keys], 0
    equivalents = read_list(EQUIVALENT.read_text())
    found: list[Mutant] = []
    met = set()
    for path in sorted(files(paths)):
        source = (ROOT / path).read_text()
        for mutant in mutants_of(path, source):
            key = key_of(mutant, source)
            if key in equivalents:
                met.add(key)
            elif args.function in mutant.function:
                found.append(mutant)
    with_met = {key.path for key in met}
    for key in equivalents:
        if key not in met and key.path in with_met:
            print(
                f"listed as equivalent, but there is no such mutant any more: {key}",
                file=sys.stderr,
            )
    if args.sample and args.sample < len(found):
        found = random.Random(args.seed).sample(found, args.sample)
    return found, len(met)


def planted_keys(paths: Sequence[str]) -> list[Key]:
    """The listed faults: all, or those in some files, folders or patterns."""
    keys = read_list(PLANTED.read_text())
    wanted = files(paths)
    return [key for key in keys if not paths or key.path in wanted]


def read_profiles(store: Path) -> dict[str, Profile]:
    known = json.loads(store.read_text())
    return {
        id: Profile(one["seconds"], frozenset((path, name) for path, name in one["calls"]))
        for id, one in known.items()
        if one["passed"]
    }


class Mutating:
    """Instead of running the collected tests, runs them against mutants."""

    def __init__(
        self,
        mutants: list[Mutant],
        record: Record,
        args: argparse.Namespace,
        *,
        traced: Iterable[str],
        store: Path,
    ) -> None:
        self._traced = sorted(files(traced))
        self._store = store
        self._mutants = mutants
        self._record = record
        self._args = args

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        began = time.monotonic()
        profiles = learn(session.items, ROOT, self._traced, self._store)
        seconds = sum(one.seconds for one in profiles.values())
        print(
            f"{len(profiles)} tests, {seconds:.0f} s; learnt in {time.monotonic() - began:.0f} s",
            flush=True,
        )
        run = InFunctions(session.items, profiles, ROOT)
        selection = Selection(profiles, self._args.budget_s)
        self._record.take(
            try_all(
                self._mutants,
                selection,
                run,
                jobs=self._args.jobs,
                until=time.monotonic() + 60 * self._args.minutes,
                hang_s=self._args.hang_s,
            )
        )
        return True


class Record:
    """Verdicts, one line each, in a file: two processes write it, one after the other."""

    def __init__(self, path: Path | None) -> None:
        STORE.mkdir(parents=True, exist_ok=True)
        self._path = path or STORE / "latest.jsonl"
        if path is None:
            self._path.unlink(missing_ok=True)
        self._killed = {tuple(one["key"]) for one in self._lines() if one["killer"]}

    def wants(self, mutant: Mutant) -> bool:
        """Whether it is not known to be killed."""
        return self._key(mutant) not in self._killed

    def take(self, verdicts: Iterable[Verdict]) -> None:
        for verdict in verdicts:
            self._show(verdict)
            line = {
                "key": self._key(verdict.mutant),
                "killer": verdict.killer,
                "tests": verdict.num_tests,
            }
            with self._path.open("a") as out:
                out.write(json.dumps(line) + "\n")

    def tell(self, mutants: list[Mutant]) -> int:
        """Print the sums. Returns 1 if any mutant survived."""
        latest = {tuple(one["key"]): one for one in self._lines()}
        tried = [latest[self._key(one)] for one in mutants if self._key(one) in latest]
        count = Counter("killed" if one["killer"] else "survived" for one in tried)
        share = count["killed"] / max(len(tried), 1)
        unknown = len(mutants) - len(tried)
        print(
            f"{count['killed']} killed, {count['survived']} survived ({share:.1%}), {unknown} not tried"
        )
        return int(count["survived"] > 0)

    def _lines(self) -> list[dict[str, object]]:
        return (
            [json.loads(line) for line in self._path.read_text().splitlines()]
            if self._path.exists()
            else []
        )

    @staticmethod
    def _key(mutant: Mutant) -> tuple[str, ...]:
        source = (ROOT / mutant.path).read_text()
        return (*key_of(mutant, source), mutant.kind)

    @staticmethod
    def _show(verdict: Verdict) -> None:
        if verdict.is_killed:
            return
        mutant = verdict.mutant
        before, after = mutant.changed((ROOT / mutant.path).read_text())
        why = f"{verdict.num_tests} tests" if verdict.num_tests else "no test calls it"
        print(
            f"\n{mutant.path} {mutant.function}\n- {before}\n+ {after}\n  line {mutant.line}; {why}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
