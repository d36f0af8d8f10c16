"""Hooks of mkdocs: what the sources say in a way that GitHub and the tests read, as the site's theme wants it."""

from __future__ import annotations

import re
from typing import Any

FENCE_WITH_FILE = re.compile(r"^(```+)(\w+) ([\w./-]+)$", re.MULTILINE)


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """A block that begins with ```python FILE gets the file as its title."""
    return FENCE_WITH_FILE.sub(r'\1\2 title="\3"', markdown)
