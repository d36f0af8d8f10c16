"""Hooks of mkdocs: what the sources say in a way that GitHub and the tests read, as the site's theme wants it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\((\.\./[^()\s]+)\)")
FENCE_WITH_FILE = re.compile(r"^(```+)(\w+) ([\w./-]+)$", re.MULTILINE)


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """A block that begins with ```python FILE gets the file as its title."""
    markdown = without_links_out(markdown, ROOT / "docs" / kwargs["page"].file.src_uri)
    return FENCE_WITH_FILE.sub(r'\1\2 title="\3"', markdown)


def without_links_out(markdown: str, page: Path) -> str:
    """`page` with links to files outside of docs/ as plain texts: the site has no such files."""

    def shown(link: re.Match[str]) -> str:
        target = (page.parent / link[2].partition("#")[0]).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return link[0]
        return link[1]

    return LINK.sub(shown, markdown)
