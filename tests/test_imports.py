"""Imports go down only (docs/architecture.md). Every import counts: in functions and under
TYPE_CHECKING, too."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# What the modules below each name may import of ours, besides each other; the longest name that
# fits a module counts.
ALLOWED = {
    "arrays": set(),
    "json_types": set(),
    "seal": set(),
    "version": set(),
    "config": set(),
    "ops": set(),
    "plan": set(),
    "messages": {"config.numbers"},
    "observe": {"config"},
    "parallel": {"ops", "config", "observe"},
    "memory": {"config"},
    "grammar": {"config"},
    "models": {"ops", "parallel", "config"},
    "weights": {"models", "ops", "parallel", "config", "observe"},
    "executor": {"weights", "plan", "models", "ops", "parallel", "config", "observe"},
    "scheduler": {"plan", "memory", "grammar", "messages", "config", "observe"},
    "engine": {"scheduler", "plan", "memory", "grammar", "messages", "config", "observe"},
    "tiers": {"memory", "config", "observe"},
    "kv_events": {"memory", "config", "observe"},
    "handoff": {"tiers", "memory", "config", "observe"},
    "journal": {
        *("engine", "scheduler", "memory", "plan", "grammar", "messages", "config", "observe"),
    },
    "route": set(),
    "residency": set(),
    "state": {"observe"},
    "batches": {"state", "config", "observe"},
    "store": {"weights", "config", "observe"},
    "relay": {"route", "server", "config", "observe"},
    "text": {"messages", "config", "observe"},
    "client": {"route", "text", "messages", "config", "observe"},
    "server": {"client", "residency", "batches", "text", "state", "messages", "config", "observe"},
    "sim": {
        "route",
        "journal",
        "engine",
        "scheduler",
        "memory",
        "plan",
        "messages",
        "config",
        "observe",
    },
    "capacity": {"sim", "route", "scheduler", "config"},
    "bench": {
        "assemble",
        "executor",
        "weights",
        "sim",
        "text",
        "server",
        "engine",
        "scheduler",
        "memory",
        "grammar",
        "plan",
        "messages",
        "config",
    },
}
EVERYWHERE = {"arrays", "json_types", "seal", "version"}  # any module may import it
UNBOUND = {
    "",
    "__main__",
    "llm",
    "own_engine",
    "assemble",
    "launch",
    "cli",
}  # may import everything; "" is weft/__init__.py

# What runs in the front process, and the pure core, must not pull in torch.
WITHOUT_TORCH = (
    *(
        "arrays",
        "json_types",
        "seal",
        "config",
        "plan",
        "messages",
        "observe",
        "route",
        "residency",
        "relay",
        "memory",
        "tiers",
        "handoff",
        "kv_events",
        "grammar",
        "scheduler",
        "engine",
        "journal",
        "state",
        "store",
    ),
    *("text", "client", "server", "assemble", "launch", "cli", "sim", "bench", "capacity"),
)
WITH_TORCH = {
    "launch.worker",
    "launch.follower",
    "assemble.build",
    "assemble.cache",
    "assemble.draft_runner",
    "assemble.handoff",
    "assemble.nodes",
    "assemble.ranks",
}
WITH_RAY = {"launch.ray", "launch.ray_nodes"}  # an extra: nobody else imports it, or Ray
TORCH_WHEN_IT_RUNS = {"bench.roofline", "cli.doctor", "grammar.xgr"}


def modules() -> dict[str, Path]:
    """Name below `weft` -> file."""
    found = {}
    for path in sorted((ROOT / "weft").rglob("*.py")):
        parts = path.relative_to(ROOT / "weft").with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def below(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


# A statement has a line of its own (E401, E701 and E702 of ruff), and perhaps lines in brackets.
STATEMENT = re.compile(r"^[ \t]*((?:import|from)\s(?:[^\n(]|\([^)]*\))*)", re.MULTILINE)


@cache
def imports(source: str) -> list[tuple[int, str]]:
    """Line and full dotted name of everything that `source` imports, wherever it does. Examples in
    texts count, too."""
    found = []
    for hit in STATEMENT.finditer(source):
        try:
            statements = ast.parse(hit[1]).body
        except SyntaxError:  # a line of a text
            continue
        line = source.count("\n", 0, hit.start(1)) + 1
        for node in statements:
            if isinstance(node, ast.Import):
                found += [(line, item.name) for item in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, "imports name the whole path"
                found += [(line, f"{node.module}.{item.name}") for item in node.names]
    return found


def ours(source: str) -> Iterator[tuple[int, str]]:
    """Line and module below `weft` of every import of ours."""
    for line, name in imports(source):
        if below(name, "weft"):
            module = name.removeprefix("weft").removeprefix(".")
            while module not in MODULES:  # a name inside a module
                module = module.rpartition(".")[0]
            yield line, module


def violations(module: str, source: str) -> list[str]:
    """The imports of `module` that the table does not allow."""
    owners = [name for name in ALLOWED if below(module, name)]
    if not owners:
        return (
            []
            if module.partition(".")[0] in UNBOUND
            else [f"{module} is below no name of the table"]
        )
    owner = max(owners, key=len)
    allowed = {owner, *ALLOWED[owner], *EVERYWHERE}
    return [
        f"weft.{module}, line {line}: imports weft.{target}"
        for line, target in ours(source)
        if not any(below(target, name) for name in allowed)
    ]


def test_every_import_goes_down() -> None:
    found = [
        line for module, path in MODULES.items() for line in violations(module, path.read_text())
    ]
    assert not found, "\n".join(found)


def knot(graph: Mapping[str, Set[str]]) -> str:
    """The names of a circle in `graph`; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as exc:
        return " <- ".join(exc.args[1])
    return ""


def test_no_two_modules_import_each_other() -> None:
    graph = {
        module: {target for _, target in ours(path.read_text())} - {module}
        for module, path in MODULES.items()
    }
    assert not knot(graph)


def side_by_side(folder: str) -> dict[str, set[str]]:
    """For each file and folder in `folder`: those beside it that something in it imports."""
    inside = f"{folder}." if folder else ""
    graph: dict[str, set[str]] = defaultdict(set)
    for module, path in MODULES.items():
        if not module.startswith(inside) or module == folder:
            continue
        name = module.removeprefix(inside).partition(".")[0]
        for _, target in ours(path.read_text()):
            if target.startswith(inside) and target != folder:
                graph[name].add(target.removeprefix(inside).partition(".")[0])
        graph[name].discard(name)
    return graph


FOLDERS = sorted({module.rpartition(".")[0] for module in MODULES})


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_stands_side_by_side_in_a_folder_has_no_circle(folder: str) -> None:
    assert not knot(side_by_side(folder))


def test_front_and_core_have_no_import_of_torch() -> None:
    found = [
        f"weft.{module}, line {line}"
        for module, path in MODULES.items()
        if module.partition(".")[0] in WITHOUT_TORCH
        and module not in WITH_TORCH | TORCH_WHEN_IT_RUNS
        for line, name in imports(path.read_text())
        if below(name, "torch")
    ]
    assert not found, "\n".join(found)


def test_ray_is_imported_in_one_place() -> None:
    found = set()
    for module, path in MODULES.items():
        names = [name for _, name in imports(path.read_text())]
        if any(below(name, "ray") or name.startswith("weft.launch.ray") for name in names):
            found.add(module)
    assert found == WITH_RAY


def test_importing_front_and_core_leaves_torch_out() -> None:
    names = [
        f"weft.{name}"
        for name in MODULES
        if name.partition(".")[0] in WITHOUT_TORCH and name not in WITH_TORCH | WITH_RAY
    ]
    code = f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\nprint('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("memory.radix", "from weft.scheduler import request"),
        ("memory.radix", "def f():\n    import weft.scheduler"),
        (
            "memory.radix",
            "if TYPE_CHECKING:\n    from weft.messages.sampling import SamplingParams",
        ),
        ("scheduler.loop", "from weft.executor.runner import TorchRunner"),
        ("config.engine", "from weft import launch"),
        ("novelty", "import json"),
    ],
)
def test_check_finds(module: str, source: str) -> None:
    MODULES.setdefault("executor.runner", Path())
    assert violations(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("scheduler.loop", "from weft.plan.step import Plan"),
        ("memory.radix", "from weft.memory.allocator import RowTable\nimport numpy"),
        ("server", "from weft.version import __version__"),
        ("cli.main", "from weft.engine.core import Loop"),
    ],
)
def test_check_lets_pass(module: str, source: str) -> None:
    assert not violations(module, source)
