"""Figures of the C++ sources: the width of lines, statements on a line, words of comments.

They are read without a compiler: comments and strings are taken out, and brackets are counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

CPP = Path(__file__).parents[2] / "weft" / "ops" / "cpp"
MAX_COLUMNS = 100
# What a comment says in other words: the field's, or those of plain English.
WORDS = {
    "one behind the other": "concatenated, contiguous",
    "behind": "after",
    "nobody": "no thread, no other",
    "in the stead of": "instead of",
    "so many": "this many",
    "so much": "this much",
    "so few": "this few",
    "ask for": "prefetch",
    "asks for": "prefetches",
    "asked for": "prefetched",
    "asking for": "prefetching",
}
COMMENT = re.compile(r"//(.*)")
STRING = re.compile(r'"(?:[^"\\]|\\.)*"|\'[^\']\'')
FOR = re.compile(r"\bfor \(")
IN_BRACES = re.compile(r"\{[^{}]*\}")
IN_BRACKETS = re.compile(r"\([^()]*\)|\[[^\[\]]*\]|(?<=\w)<[\w:, *]*>")
DECLARED = re.compile(
    r"^\s*(?:[\w:]+[*&]* )+[*&]?\w+ ?(?:=[^,]*)?, [*&]?\w+ ?(?:=[^=,]*)?(?:,.*)?;"
)


def sources() -> list[Path]:
    return sorted((*CPP.glob("*.h"), *CPP.glob("*.cpp")))


def long_lines(source: str) -> Iterator[int]:
    """The numbers of lines that are too wide."""
    for number, line in enumerate(source.splitlines(), 1):
        if len(line) > MAX_COLUMNS:
            yield number


def folded_lines(source: str) -> Iterator[int]:
    """The numbers of lines that have two statements, or declare two variables. The heads of loops
    and lambdas within one line count as parts of their statement."""
    for number, line in enumerate(source.splitlines(), 1):
        code = STRING.sub("0", COMMENT.sub("", line))
        if code.lstrip().startswith("#"):
            continue
        loop = FOR.search(code)
        if loop:
            code = code[: loop.start()] + _after_bracket(code, loop.end())
        code = _without(IN_BRACES, code)
        if code.count(";") > 1 or DECLARED.match(_without(IN_BRACKETS, code)):
            yield number


def other_words(source: str) -> Iterator[tuple[int, str]]:
    """Words of comments that `WORDS` says in another way, with the numbers of their lines."""
    for number, line in enumerate(source.splitlines(), 1):
        comment = COMMENT.search(line)
        if comment:
            for word in WORDS:
                if re.search(rf"\b{word}\b", comment[1], re.IGNORECASE):
                    yield number, word


def _without(part: re.Pattern[str], code: str) -> str:
    while True:
        shorter = part.sub("", code)
        if shorter == code:
            return code
        code = shorter


def _after_bracket(code: str, start: int) -> str:
    """What follows the bracket that is open at `start`; nothing if it is closed in a later line."""
    depth = 1
    for index in range(start, len(code)):
        depth += (code[index] == "(") - (code[index] == ")")
        if depth == 0:
            return code[index + 1 :]
    return ""
