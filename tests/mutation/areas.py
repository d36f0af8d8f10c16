"""The parts of weft that mutants are planted into, each with the tests that run it in their own
process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Area(NamedTuple):
    paths: tuple[str, ...]  # files, folders or patterns below the root
    tests: tuple[str, ...]
    traced: tuple[str, ...] = ()  # whose calls are learnt, if more than `paths`


CORE = Area(
    (
        "weft/scheduler/*.py",
        "weft/scheduler/pace",
        "weft/scheduler/policies",
        "weft/scheduler/groups",
        "weft/memory",
    ),
    ("tests/scheduler", "tests/engine", "tests/memory"),
    ("weft/scheduler", "weft/memory", "weft/executor/*.py"),
)
AREAS = {
    "core": CORE,
    "handoff": Area(
        (
            "weft/handoff",
            "weft/engine/handoff",
            "weft/memory/handoff",
            "weft/scheduler/features/handoff.py",
        ),
        ("tests/handoff", "tests/scheduler/test_handoff.py"),
    ),
    "tiers": Area(
        (
            "weft/tiers",
            "weft/memory/tiers",
            "weft/scheduler/tiers",
            "weft/scheduler/features/tiers.py",
            "weft/engine/tiers",
        ),
        ("tests/tiers", "tests/scheduler/test_tiers.py", "tests/engine/test_tier_writes.py"),
    ),
    "windows": Area(
        ("weft/scheduler/groups/kinds/windows.py", "weft/memory/window"),
        (
            "tests/scheduler/test_groups.py",
            "tests/scheduler/test_windows.py",
            "tests/scheduler/test_random_schedules.py",
            "tests/memory",
        ),
    ),
    "states": Area(
        ("weft/scheduler/groups/kinds/states.py", "weft/memory/states"),
        (
            "tests/scheduler/test_groups.py",
            "tests/scheduler/test_states.py",
            "tests/scheduler/test_random_schedules.py",
            "tests/memory",
        ),
    ),
    "speculation": Area(
        ("weft/scheduler/speculation", "weft/scheduler/pace/draft_cost.py"),
        (
            "tests/scheduler/test_drafts.py",
            "tests/scheduler/test_draft_model.py",
            "tests/scheduler/test_drafted_grammars.py",
            "tests/scheduler/test_pace.py",
        ),
    ),
    "lanes": Area(
        ("weft/scheduler/policies/lanes",),
        (
            "tests/scheduler/test_lanes.py",
            "tests/scheduler/test_policies.py",
            "tests/scheduler/test_composed.py",
            "tests/scheduler/test_queue.py",
            "tests/scheduler/test_ttft.py",
        ),
    ),
    "features": Area(("weft/scheduler/features",), ("tests/scheduler", "tests/engine")),
    "fleet": Area(("weft/client/fleet",), ("tests/client/test_fleet.py",)),
    "route": Area(("weft/route",), ("tests/route", "tests/client/test_fleet.py")),
    "hangs": Area(
        ("weft/launch/heartbeat.py", "weft/launch/processor_use.py", "weft/client/engine_state.py"),
        (
            "tests/launch/test_hang.py",
            "tests/client/test_hang_detector.py",
            "tests/client/test_client.py",
            "tests/client/test_deferred.py",
            "tests/client/test_open_completions.py",
        ),
    ),
}


def files(patterns: Iterable[str]) -> set[str]:
    """The Python files below the root that these files, folders and patterns name."""
    found = set()
    for pattern in patterns:
        for path in ROOT.glob(pattern):
            inside = path.rglob("*.py") if path.is_dir() else [path]
            found |= {str(one.relative_to(ROOT)) for one in inside if one.suffix == ".py"}
    return found


def part_of(paths: Sequence[str], tests: Sequence[str] = ()) -> tuple[str, Area]:
    """These files as an area with a name: with these tests, or those of all areas that they belong
    to. The core's are taken for files that belong to no other area. Raises LookupError if there are
    none."""
    names = dict[str, None]()
    for path in sorted(files(paths)):
        found = [name for name, area in AREAS.items() if path in files(area.paths)]
        if not found and not tests:
            raise LookupError(f"{path} is in no area (areas.py): name its tests with --tests")
        if len(found) > 1 and "core" in found:
            found.remove("core")
        names |= dict.fromkeys(found)
    areas = [AREAS[name] for name in names]
    traced = [path for area in areas for path in area.traced or area.paths]
    if not tests:
        tests = list(dict.fromkeys(path for area in areas for path in area.tests))
    return "+".join(names) or "others", Area(tuple(paths), tuple(tests), (*traced, *paths))
