"""Names on pages are those of the code: files and folders, routes, metrics, options in prose,
settings that can be changed, methods of RPC."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from weft.cli.completion import tree
from weft.config.engine import EngineConfig
from weft.config.limits import Limits
from weft.config.options import NEEDLESS, Config, options_of
from weft.config.server import ServerConfig
from weft.config.several import ModelsConfig
from weft.engine.control.settings import CHANGEABLE
from weft.messages.codec import REQUESTS
from weft.server.app import OPERATIONS

ROOT = Path(__file__).parents[2]
CONFIGS: tuple[type[Config], ...] = (EngineConfig, ServerConfig, ModelsConfig, Limits)
WRITTEN = ("command-line.md", "http.md", "errors.md", "python.md")  # by a program, from the code
FOLDERS = ("weft", "tests", "docs", "benchmarks", "scripts", "deploy", "examples", "training")
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *(page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("*.md"))),
]
PAGES = [page for page in PAGES if page.name not in WRITTEN]
FENCE = re.compile(r"```.*?```", re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
FILE = re.compile(rf"^(?:{'|'.join(FOLDERS)})/[\w./-]*\w/?")
ROUTE = re.compile(r"\b(?:GET|POST|PUT|DELETE) (/[\w/{}.-]*)")
METRIC = re.compile(r"\bweft:([a-z_0-9]+)")
OPTION = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]+)")
PLACE = re.compile(r"\{[^}]*\}|(?<=/)[A-Z]+(?![\w-])")
# Other programs' options, and words that only look like a path.
OTHERS = {"enable-feature", "config.file"}
NO_FILES = {"weft/nano", "examples/NAME.py"}


def spans(page: Path) -> list[str]:
    """What stands between backticks in a page, outside of blocks."""
    return SPAN.findall(FENCE.sub("", page.read_text("utf-8")))


@cache
def sources() -> str:
    """The sources of weft, of its tests and programs, as one text."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    found += [path for path in (ROOT / "scripts").iterdir() if path.is_file()]
    return "\n".join(path.read_text("utf-8") for path in found)


@cache
def options() -> frozenset[str]:
    """The options of all commands, with the names that other engines give them."""
    known = {flag.lstrip("-") for node in tree().values() for flag in node.options}
    for config in CONFIGS:
        for one in options_of(config):
            known |= {one.name, *one.aliases, *one.elsewhere}
    return frozenset(name.replace("_", "-") for name in known | NEEDLESS.keys())


def faults(pattern: re.Pattern[str], known: Callable[[Path, str], bool]) -> list[str]:
    """What the pattern finds in the spans of all pages, and is not known."""
    return sorted(
        f"{page.relative_to(ROOT)}: {name}"
        for page in PAGES
        for name in {name for span in spans(page) for name in pattern.findall(span)}
        if not known(page, name)
    )


def test_files_that_pages_name_are_there() -> None:
    def is_there(page: Path, name: str) -> bool:
        folders = (ROOT, page.parent, ROOT / "weft")
        return name in NO_FILES or any(
            (folder / name).exists() or any(folder.glob(f"{name}*")) for folder in folders
        )

    assert faults(FILE, is_there) == []


def test_routes_that_pages_name_are_there() -> None:
    paths = {PLACE.sub("{}", operation.path) for operation in OPERATIONS}
    paths |= {"/docs", "/openapi.json"}
    assert faults(ROUTE, lambda page, path: PLACE.sub("{}", path.rstrip(".")) in paths) == []


def test_metrics_that_pages_name_are_made() -> None:
    words = set(re.findall(r"\w+", sources()))
    ending = re.compile("_(total|bucket|sum|count)$")

    def is_made(page: Path, name: str) -> bool:
        return name in words or ending.sub("", name) in words or name.endswith("_")

    assert faults(METRIC, is_made) == []


def test_options_in_the_prose_of_pages_are_there() -> None:
    def is_there(page: Path, name: str) -> bool:
        named = {name, name.removeprefix("no-")} & (options() | OTHERS)
        return bool(named) or f"--{name}" in sources()

    assert faults(OPTION, is_there) == []


def test_the_page_of_control_requests_has_each_setting_that_can_be_changed() -> None:
    text = (ROOT / "docs" / "guides" / "control.md").read_text("utf-8")
    table = text.split("## Settings that can be changed")[1].split("\n\n")[0]
    named = {name for row in table.splitlines() for name in SPAN.findall(row.split(" | ")[0])}
    assert named == {*CHANGEABLE, "log_level"}


def test_the_page_of_control_requests_has_the_names_of_methods() -> None:
    text = (ROOT / "docs" / "guides" / "control.md").read_text("utf-8")
    said = text.split("the message's name in small letters: ")[1].split("; `list_methods`")[0]
    first, *others = SPAN.findall(said)
    assert first in REQUESTS
    methods = {kind.__name__: name for name, kind in REQUESTS.items()}
    named = [methods[name] for name in re.findall(r"^\| `(\w+)` \|", text, re.M) if name in methods]
    plain = {re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower() for name in methods}
    assert sorted(others) == sorted({name for name in named if name not in plain})
