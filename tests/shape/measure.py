"""Measures the shape of the code: how dense lines are, which class names are used twice, how much
state classes keep.

python -m tests.shape.measure            the table of docs/understand/shape.md, for all of weft
python -m tests.shape.measure FOLDER     the same of one folder, such as weft/server
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
WEFT = ROOT / "weft"
MAX_COLUMNS = 100
MAX_ATTRIBUTES = 15
MAX_METHODS = 25

# Comments, texts and ends of lines that go on, which no token spans. Each alternative begins with a
# character of its own: so Python looks for these alone.
TEXTS = re.compile(
    r"#[^\n]*|\\\n"
    r'|"""[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*"""|"[^"\\\n]*(?:\\.[^"\\\n]*)*"'
    r"|'''[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*'''|'[^'\\\n]*(?:\\.[^'\\\n]*)*'",
    re.DOTALL,
)
# The tokens of `tokenize` in what is left.
TOKENS = re.compile(
    r"""
      [^\W\d]\w*
    | (?:\d|\.\d) (?:[eE][+-]|[\w.])*
    | \*\*= | //= | >>= | <<= | \.\.\. | -> | := | [-+*/%&|^@<>=!]= | \*\* | // | >> | << | [^\w\s#]
    """,
    re.VERBOSE,
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
VALUES = {"NamedTuple", "Struct"}
COMPREHENSIONS = (ast.ListComp, ast.GeneratorExp, ast.DictComp, ast.SetComp)


@dataclass
class Density:
    """Counts over some files. A line of code is a line in which a token begins that is neither
    comment nor docstring."""

    lines: int = 0
    tokens: int = 0
    long_lines: int = 0
    ternaries: int = 0
    comprehensions: int = 0
    multi_assignments: int = 0
    comment_lines: int = 0

    def add(self, other: Density) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    @property
    def tokens_per_line(self) -> float:
        return self.tokens / max(self.lines, 1)

    def per_thousand(self, name: str) -> float:
        """How many of a count there are per 1,000 lines of code."""
        count: int = getattr(self, name)
        return 1000 * count / max(self.lines, 1)


@cache
def parsed(path: Path) -> ast.Module:
    """A file of the tree that nobody changes meanwhile."""
    return ast.parse(path.read_text("utf-8"))


def walk(tree: ast.AST) -> Iterator[ast.AST]:
    """As `ast.walk`, in a third of its time and without the kinds of operators and uses."""
    todo = deque([tree])
    while todo:
        node = todo.popleft()
        yield node
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                todo += [one for one in value if isinstance(one, ast.AST)]
            elif isinstance(value, ast.AST) and name not in ("ctx", "op"):
                todo.append(value)


def classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    """All classes of a file, found among its statements."""
    todo: deque[ast.AST] = deque([tree])
    while todo:
        node = todo.popleft()
        if isinstance(node, ast.ClassDef):
            yield node
        for name in ("body", "handlers", "orelse", "finalbody", "cases"):
            todo += getattr(node, name, [])


def density_of_lines(source: str) -> Density:
    """The counts for which a source need not be parsed."""
    code = TEXTS.sub(_in_short, source)
    lines = [line.strip() for line in code.splitlines()]
    comment_lines = lines.count("#")
    return Density(
        lines=len(lines) - lines.count("") - comment_lines,
        tokens=len(TOKENS.findall(code)),
        long_lines=sum(len(line) > MAX_COLUMNS for line in source.splitlines()),
        comment_lines=comment_lines,
    )


def _in_short(found: re.Match[str]) -> str:
    """A sign for a comment, one token for a text, and nothing for a docstring: a text between
    three quotes. With a prefix it is a token, as the prefix stays."""
    text = found[0]
    end = "\n" if "\n" in text else ""
    if text.startswith("#"):
        return "#"
    return end if text.startswith(("\\", '"""', "'''")) else "s" + end


def density_of_source(source: str, tree: ast.Module | None = None) -> Density:
    found = density_of_lines(source)
    for node in walk(tree or ast.parse(source)):
        found.ternaries += isinstance(node, ast.IfExp)
        found.comprehensions += isinstance(node, COMPREHENSIONS)
        found.multi_assignments += isinstance(node, ast.Assign) and _has_several_targets(node)
    return found


def _has_several_targets(node: ast.Assign) -> bool:
    """Whether it is `a = b = x` or `a, b = x, y`."""
    if len(node.targets) > 1:
        return True
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def density_of_folder(folder: Path) -> Density:
    total = Density()
    for path in sorted(folder.rglob("*.py")):
        total.add(density_of_source(path.read_text("utf-8"), parsed(path)))
    return total


def lines_of_folder(folder: Path) -> Density:
    """The counts of `density_of_lines`."""
    total = Density()
    for path in folder.rglob("*.py"):
        total.add(density_of_lines(path.read_text("utf-8")))
    return total


def class_names_used_twice(folder: Path = WEFT) -> dict[str, list[str]]:
    """Names of classes at the top of modules that stand in more than one module, with these
    modules."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(folder.rglob("*.py")):
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(folder)))
    return {name: files for name, files in places.items() if len(files) > 1}


def subclasses(name: str, folder: Path = WEFT) -> list[str]:
    """The classes of a folder that inherit from the class of this name, themselves or through
    others."""
    found = {name}
    while True:
        more = {kind for kind, above in _bases(folder).items() if above & found} - found
        if not more:
            return sorted(found - {name})
        found |= more


@cache
def _bases(folder: Path) -> dict[str, set[str]]:
    """The names that the classes of a folder inherit from."""
    bases: dict[str, set[str]] = {}
    for path in folder.rglob("*.py"):
        for node in classes(parsed(path)):
            bases[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
    return bases


def state(name: str, folder: Path = WEFT) -> list[str]:
    """The attributes that a class keeps: its fields, and what its methods assign to `self`."""
    found: set[str] = set()
    for path in folder.rglob("*.py"):
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                found |= _attributes(node)
    return sorted(found)


def _attributes(node: ast.ClassDef) -> set[str]:
    found: set[str] = set()
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            is_constant = "ClassVar" in ast.unparse(statement.annotation)
            if not is_constant:
                found.add(statement.target.id)
    for inner in walk(node):
        targets: list[ast.expr] = []
        if isinstance(inner, ast.Assign):
            targets = inner.targets
        elif isinstance(inner, ast.AnnAssign | ast.AugAssign):
            targets = [inner.target]
        for target in targets:
            for one in walk(target):
                if (
                    isinstance(one, ast.Attribute)
                    and isinstance(one.ctx, ast.Store)
                    and isinstance(one.value, ast.Name)
                    and one.value.id == "self"
                ):
                    found.add(one.attr)
    return found


class Size(NamedTuple):
    """What a class consists of."""

    attributes: int
    methods: int


def sizes(folder: Path = WEFT) -> dict[str, Size]:
    """The sizes of all classes of a folder that are more than values. A value is a message
    (msgspec's `Struct`), a frozen dataclass or a `NamedTuple`: many fields, and nobody changes
    them."""
    bases: dict[str, set[str]] = {}
    found: dict[str, Size] = {}
    for path in sorted(folder.rglob("*.py")):
        for node in classes(parsed(path)):
            bases[node.name] = {ast.unparse(base).split(".")[-1] for base in node.bases}
            if not _is_frozen(node):
                methods = sum(isinstance(part, FUNCTIONS) for part in node.body)
                found[node.name] = Size(len(_attributes(node)), methods)
    return {name: size for name, size in found.items() if not _above(name, bases) & VALUES}


def _is_frozen(node: ast.ClassDef) -> bool:
    """Whether it is a frozen dataclass."""
    return any("frozen=True" in ast.unparse(decorator) for decorator in node.decorator_list)


def _above(name: str, bases: dict[str, set[str]]) -> set[str]:
    """All names of classes that a class inherits from."""
    found: set[str] = set()
    rest = {name}
    while rest:
        above = bases.get(rest.pop(), set()) - found
        found |= above
        rest |= above
    return found


def density_without_magic_commas(folder: Path = WEFT) -> Density:
    """The density after formatting a copy of the folder, in which no trailing comma keeps a line
    apart. So commas cannot make lines emptier."""
    with tempfile.TemporaryDirectory() as copies:
        copy = Path(copies, folder.name)
        shutil.copytree(folder, copy, ignore=_other_files)
        command = [sys.executable, "-m", "ruff", "format", "--quiet", "--no-cache"]
        command += ["--config", str(ROOT / "pyproject.toml")]
        command += ["--config", "format.skip-magic-trailing-comma=true", str(copy)]
        subprocess.run(command, check=True)
        return lines_of_folder(copy)


def _other_files(folder: str, names: list[str]) -> list[str]:
    """The files of a folder that are no Python."""
    return [name for name in names if Path(folder, name).is_file() and not name.endswith(".py")]


def files_at_the_top(*packages: str) -> int:
    """How many modules stand directly in these packages of weft, `__init__` apart."""
    return sum(
        path.name != "__init__.py" for package in packages for path in (WEFT / package).glob("*.py")
    )


def main() -> None:
    folder = ROOT / sys.argv[1] if len(sys.argv) > 1 else WEFT
    density = density_of_folder(folder)
    print(f"lines of code                    {density.lines}")
    print(f"tokens a line                    {density.tokens_per_line:.2f}")
    print(f"lines over {MAX_COLUMNS} columns          {density.long_lines}")
    for name in ("ternaries", "comprehensions", "multi_assignments", "comment_lines"):
        label = name.replace("_", " ") + " per 1,000"
        print(f"{label:32} {density.per_thousand(name):.1f}")
    twice = class_names_used_twice(folder)
    print(f"class names used twice           {len(twice)} {', '.join(sorted(twice))}")
    if folder == WEFT:
        top = files_at_the_top("scheduler", "memory", "executor")
        print(f"files at the top of the core     {top}")
        bare = density_without_magic_commas().tokens_per_line
        print(f"tokens a line without commas     {bare:.2f}")
        for name, size in sorted(sizes().items()):
            if size.attributes > MAX_ATTRIBUTES or size.methods > MAX_METHODS:
                print(f"large class {name:20} {size.attributes} attributes, {size.methods} methods")
        for name in ("Engine", "Scheduler", "Request", "Completion"):
            print(f"state of {name:24}{len(state(name))}")


if __name__ == "__main__":
    main()
