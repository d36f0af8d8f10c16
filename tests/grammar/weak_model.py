"""A custom tool whose texts are patches, and a model that writes whatever its grammar allows."""

from __future__ import annotations

import re

import numpy as np

from weft.grammar.llg import LlgCompiler
from weft.grammar.protocol import Compiled
from weft.server.chat.custom_tools import input_of
from weft.text.parsers.events import CallArguments, CallBegin
from weft.text.parsers.formats import ToolFormat
from weft.text.parsers.output import ParsedOutput
from weft.text.tokenizer import Tokenizer

EOS = 0
MAX_TOKENS = 600
# Files are added, removed, moved and changed by lines with a sign in front, as coding agents'
# patches are.
PATCH = """
start: head change+ tail
head: "*** Begin Patch" LF
tail: "*** End Patch" LF?

change: added | removed | updated
added: "*** Add File: " path LF new_line+
removed: "*** Delete File: " path LF
updated: "*** Update File: " path LF moved? lines?
path: /(.+)/
new_line: "+" /(.*)/ LF -> line
moved: "*** Move to: " path LF
lines: (place | line)+ last?
place: ("@@" | "@@ " /(.+)/) LF
line: ("+" | "-" | " ") /(.*)/ LF
last: "*** End of File" LF

%import common.LF
"""
PATCH_TOOL = {
    "type": "custom",
    "custom": {
        "name": "apply_patch",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": PATCH}},
    },
}
SHELL = {
    "type": "function",
    "function": {
        "name": "shell",
        "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}},
    },
}


def is_patch(text: str) -> bool:
    """Whether a text is a patch, read line by line without the grammar."""
    lines = text.removesuffix("\n").split("\n")
    if lines[0] != "*** Begin Patch" or lines[-1] != "*** End Patch" or len(lines) < 3:
        return False
    kind = ""
    for number, line in enumerate(lines[1:-1], start=1):
        head = re.fullmatch(r"\*\*\* (Add|Delete|Update) File: .+", line)
        if head:
            kind = head[1]
            if kind == "Add" and not lines[number + 1].startswith("+"):
                return False
        elif kind == "Add":
            if not line.startswith("+"):
                return False
        elif kind != "Update" or not re.fullmatch(
            r"\*\*\* Move to: .+|@@|@@ .+|[-+ ].*|\*\*\* End of File", line
        ):
            return False
    return bool(kind)


class WeakModel:
    """Writes random tokens that are allowed, and likes those that end lines and texts."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._weights = np.ones(tokenizer.vocab_size)
        [self._line_feed] = tokenizer.encode("n", add_special_tokens=False)  # behind a backslash
        for token in range(tokenizer.vocab_size):
            text = tokenizer.token_text(token)
            if text in ("\\", "\n", '"'):
                self._weights[token] = 1_000.0
            elif text in ("</", "**", " E", "}"):
                self._weights[token] = 100.0

    def write(
        self, compiler: LlgCompiler, tokenizer: Tokenizer, grammar: Compiled, begin: str
    ) -> str | None:
        """A text that begins with `begin`; None if it has not ended in time."""
        matcher = grammar.matcher.fork()
        mask = grammar.mask[None].copy()
        ids = tokenizer.encode(begin, add_special_tokens=False)
        for token in ids:
            assert mask[0, token // 32] >> (token % 32) & 1, "the grammar refuses the beginning"
            matcher.consume(token)
            compiler.fill([matcher], mask)
        for _ in range(MAX_TOKENS):
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if EOS in allowed:
                return tokenizer.decode(ids, skip_special_tokens=False)
            weights = self._weights[allowed]
            token = int(self._rng.choice(allowed, p=weights / weights.sum()))
            if ids and tokenizer.token_text(ids[-1]) == "\\" and self._line_feed in allowed:
                token = self._line_feed
            matcher.consume(token)
            assert not matcher.error
            ids.append(token)
            if matcher.is_complete:
                return tokenizer.decode(ids, skip_special_tokens=False)
            compiler.fill([matcher], mask)
        return None


def inputs(text: str, format: ToolFormat) -> list[str]:
    """The texts of the calls of apply_patch in an answer."""
    parser = ParsedOutput(None, format.parser({"apply_patch", "shell"}, eager=False))
    calls: dict[int, list[str]] = {}
    for event in parser.push(text, is_last=True):
        if isinstance(event, CallBegin) and event.name == "apply_patch":
            calls[event.call] = []
        elif isinstance(event, CallArguments) and event.call in calls:
            calls[event.call].append(event.text)
    return [input_of("".join(call)) for call in calls.values()]
