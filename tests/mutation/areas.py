"""The parts of weft that mutants are planted into, each with the tests that run it in their own process."""

from __future__ import annotations

from typing import NamedTuple


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
            "weft/engine/tier_service.py",
        ),
        ("tests/tiers", "tests/scheduler/test_tiers.py"),
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
        ("weft/scheduler/lanes",),
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
        ),
    ),
}
