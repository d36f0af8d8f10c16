"""The documents that the bundled models learn from: what every Python installation carries. Source files of the
standard library, the help topics of `pydoc`, and the documentation strings of modules written in C. Each document has a
name, and a hash of that name alone says whether it is trained on or held out. Knows nothing about tokens or models.
"""

import hashlib
import importlib
import inspect
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

HELD_OUT_PERCENT = 3
# Tests, bundled packages, demo data, and files that are generated for one machine or are one big table.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "test", "tests", "idle_test", "__pycache__", "lib-dynload", "__phello__"}
)
SKIPPED_MODULES = frozenset({"antigravity", "this", "idlelib", "turtledemo"})


class Document(NamedTuple):
    name: str  # relative path ("json/decoder.py"), "topics/NAME" or "builtin/MODULE"
    text: str

    @property
    def held_out(self) -> bool:
        """Whether this document belongs to the held-out part. Depends on its name only, so it never changes."""
        digest = hashlib.sha256(self.name.encode()).digest()
        return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def documents() -> list[Document]:
    """All documents in a fixed order: sources, help topics, documentation of C modules."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return [*source_files(root), *help_topics(), *builtin_modules(root)]


def split(docs: list[Document]) -> tuple[list[Document], list[Document]]:
    """Returns (trained on, held out); every document is in exactly one of the two."""
    return [d for d in docs if not d.held_out], [d for d in docs if d.held_out]


def source_files(root: Path) -> Iterator[Document]:
    """Every Python file below `root` that a person wrote, as UTF-8 text."""
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS & set(relative.parts) or relative.name.startswith("_sysconfigdata"):
            continue
        if relative.as_posix() == "pydoc_data/topics.py":
            continue  # its values are documents of their own: help_topics
        text = path.read_bytes().decode("utf-8", errors="replace").replace("\r\n", "\n")
        if text.strip() and "decoding_table" not in text and "decoding_map" not in text:
            yield Document(relative.as_posix(), text)


def help_topics() -> Iterator[Document]:
    """The language reference as `help("TOPIC")` prints it."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    for name, text in sorted(topics.items()):
        yield Document(f"topics/{name}", text.strip() + "\n")


def builtin_modules(root: Path) -> Iterator[Document]:
    """One document per module written in C: each public name with its signature and documentation string."""
    extensions = {p.name.split(".")[0] for p in (root / "lib-dynload").glob("*.so")}
    for name in sorted(extensions | set(sys.builtin_module_names)):
        if "test" in name or name.startswith("xx") or name in SKIPPED_MODULES:
            continue
        try:
            with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
                module = importlib.import_module(name)
        except ImportError:  # an optional system library is missing
            continue
        entries = [f"{title}\n\n{text}" for title, text in described_members(module)]
        if entries:
            yield Document(f"builtin/{name}", "\n\n\n".join(entries) + "\n")


def described_members(module: ModuleType) -> Iterator[tuple[str, str]]:
    """The public functions, classes and methods of a C module as (qualified name with signature, documentation)."""
    for name, value in sorted(vars(module).items()):
        if (
            name.startswith("_")
            or not callable(value)
            or getattr(value, "__module__", None) != module.__name__
        ):
            continue
        yield from described(f"{module.__name__}.{name}", value)
        if isinstance(value, type) and not issubclass(value, BaseException):
            for member, method in sorted(vars(value).items()):
                if not member.startswith("_"):
                    yield from described(f"{module.__name__}.{name}.{member}", method)


def described(title: str, value: object) -> Iterator[tuple[str, str]]:
    """(title with signature, documentation) of one object, or nothing if it has no documentation."""
    text = inspect.getdoc(value)
    if not text:
        return
    signature = getattr(value, "__text_signature__", None) or ""
    yield title + signature.replace("$", ""), text
