"""The beginning of a JSON object as an object: what is complete of it.

APIs that have the arguments of a call as an object need one, even if the completion was truncated
within them. Clients that read a stream of pieces complete them in the same way.
"""

from __future__ import annotations

import re

_TOKEN = re.compile(
    r"""\s*(?:(?P<string>"(?:[^"\\]|\\.)*")|(?P<word>[^\s"\[\]{},:]+)|(?P<mark>[\[\]{},:]))""",
    re.DOTALL,
)
_WORD = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_CLOSING = {"{": "}", "[": "]"}


def completed_object(beginning: str) -> str:
    """The members that are complete in the beginning of an object, as a JSON object.

    A string or a word that is truncated is left out, with its key.
    """
    closing: list[str] = []  # the brackets that are still missing, the innermost last
    end = 0  # of the text that is kept
    missing = ""  # the brackets that are missing there
    before = ""  # the mark before the token
    position = 0
    while (token := _TOKEN.match(beginning, position)) is not None:
        position = token.end()
        mark = token["mark"]
        if mark in _CLOSING:
            closing.append(_CLOSING[mark])
        elif mark is not None and closing and mark == closing[-1]:
            closing.pop()
        elif mark is not None:
            before = mark
            continue
        elif token["word"] and not _WORD.fullmatch(token["word"]):
            break
        elif closing and closing[-1] == "}" and before != ":":
            continue  # a key
        before = mark or ""
        end = position
        missing = "".join(reversed(closing))
    return beginning[:end] + missing or "{}"
