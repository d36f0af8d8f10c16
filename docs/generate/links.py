"""Checks the links of all pages: every file that a page links to is there, and so is every heading behind a `#`.

    python docs/generate/links.py    status 1 and a line for each link that leads nowhere

Addresses on the web are not asked: the check needs no network.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


def pages() -> list[Path]:
    """All pages of the repository, this site's and the others."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.md"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def dead_links(page: Path) -> Iterator[str]:
    """One line for each link of `page` that leads nowhere."""
    text = CODE.sub("", FENCE.sub("", page.read_text("utf-8")))
    for target in LINK.findall(text):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            yield f"{page.relative_to(ROOT)}: {target} is not there"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            yield f"{page.relative_to(ROOT)}: {target} has no such heading"


@cache
def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as GitHub and the site make them."""
    names: set[str] = set()
    text = FENCE.sub("", page.read_text("utf-8"))
    for heading in HEADING.findall(text):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        name = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        known = name
        number = 0
        while known in names:
            number += 1
            known = f"{name}-{number}"
        names.add(known)
    return names


def main() -> int:
    dead = [line for page in pages() for line in dead_links(page)]
    print("\n".join(dead))
    return 1 if dead else 0


if __name__ == "__main__":
    sys.exit(main())
