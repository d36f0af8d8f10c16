"""Counts words that have meant too many things, in the Python files of weft: in names
(`num_places`), comments and texts.

python -m tests.shape.words [WORD ...] the counts, or the names in which a word stands and their
files
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

from tests.shape.measure import TEXTS

WEFT = Path(__file__).parents[2] / "weft"
# At most so often; what gets fewer lowers its number here.
MOST = {
    "told": 15,
    "place": 80,
    "turn": 420,
    "stage": 135,
    "held": 50,
    "ending": 48,
    "books": 5,
    "given": 157,
    "whole": 281,
    "behind": 50,
    "joins": 5,
}
NAME = re.compile(r"[^\W\d]\w*")
TRACE = re.compile("|".join(MOST), re.IGNORECASE)  # without it a name has none of them
# Phrases that readers of English as a second language stumble over: what stands after the colon is
# clearer.
PHRASES = {
    "one behind the other": "concatenated",
    "nobody but": "only",
    "in the stead of": "instead of",
    "bytes before their use": "bytes ahead",
}


def words_of(name: str) -> list[str]:
    """The parts of a name: `numPlaces`, `num_places` -> num, places."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_")


def counts() -> dict[str, Counter[str]]:
    """By word, the names and "text" in which it stands, and how often."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for path in sorted(WEFT.rglob("*.py")):
        source = path.read_text()
        for name, count in Counter(NAME.findall(TEXTS.sub(" ", source))).items():
            for word in set(words_of(name)) & set(MOST) if TRACE.search(name) else ():
                found[word][name] += count
        for word in re.findall(r"[a-z]+", "\n".join(TEXTS.findall(source))):
            if word in MOST:
                found[word]["text"] += 1
    return found


def phrases() -> list[str]:
    """Where one of `PHRASES` stands, in Python, C++ and Markdown."""
    found = []
    pattern = re.compile("|".join(PHRASES))
    for kind in ("*.py", "*.h", "*.cpp", "*.md"):
        for path in sorted(WEFT.rglob(kind)):
            words = " ".join(path.read_text().replace("//", " ").replace("#", " ").split())
            found += [f"{path.relative_to(WEFT)}: {match[0]}" for match in pattern.finditer(words)]
    return found


if __name__ == "__main__":
    for word, names in counts().items():
        if not sys.argv[1:]:
            print(f"{word:<8}{names.total():>6}")
        elif word in sys.argv[1:]:
            print(word, *(f"{count:>6} {name}" for name, count in names.most_common()), sep="\n")
