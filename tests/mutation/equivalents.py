"""Lists of mutants: those that no test can tell from the original (`equivalent.txt`), and faults
that no test noticed once (`planted.txt`)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tests.mutation.operators import Mutant, functions_of


class Key(NamedTuple):
    path: str
    function: str
    before: str
    after: str


EQUIVALENT = Path(__file__).parent / "equivalent.txt"
PLANTED = Path(__file__).parent / "planted.txt"


def key_of(mutant: Mutant, source: str) -> Key:
    return Key(mutant.path, mutant.function, *mutant.changed(source))


def read_list(text: str) -> dict[Key, str]:
    """The reasons of the listed ones. Each is a line with file and function, one with what stands
    there before (-), one with what stands there then (+), and the reason, indented; a reason holds
    for all above it that have none."""
    found: dict[Key, str] = {}
    without: list[Key] = []
    path = function = before = ""
    for line in text.splitlines():
        if line.startswith("weft/"):
            path, _, function = line.partition(" ")
        elif line.startswith("- "):
            before = line[2:]
        elif line.startswith("+"):
            without.append(Key(path, function.strip(), before, line[2:]))
        elif line.startswith("  "):
            for key in without:
                found[key] = line.strip()
            without = []
    assert not without, f"no reason is given for {without[0]}"
    return found


def planted(key: Key, source: str) -> Mutant:
    """The mutant that a listed fault is. `key.before` must stand in its function once."""
    lines = source.encode().splitlines(keepends=True)
    first = 0
    start = 0
    end = len(lines)
    if key.function:
        first, start, end = functions_of(source)[key.function]
    before = sum(map(len, lines[:start]))
    text = b"".join(lines[start:end])
    wanted = key.before.encode()
    assert text.count(wanted) == 1, (
        f"{key.before!r} stands {text.count(wanted)} times in {key.path} {key.function}"
    )
    at = before + text.index(wanted)
    line = source.encode()[:at].count(b"\n") + 1
    return Mutant(key.path, key.function, first, line, at, at + len(wanted), key.after, "planted")
