"""Finds the tokens that end a text or a turn, as the tokenizer's files name them. Missing or broken
files are ignored here: the code that loads the tokenizer reports them.

`tokenizer_config.json` or `special_tokens_map.json` has the token's name, `tokenizer.json` its id.
Fine-tuned models often change only the former: their `config.json` still has the end token of the
base model. So do many GGUF files, whose metadata name one end token. If no file names the tokens
that end a generation, they are also found by their text among the added tokens, as llama.cpp does,
and from the chat template: the token that it writes after the content of a message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from weft.json_types import JsonObject

# Added tokens with these texts end a turn, a message with calls, or a text.
KNOWN_ENDS = frozenset(
    {
        *("<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "<end_of_utterance>", "<|eot_id|>"),
        *("<|eom_id|>", "<|eot|>", "<|eom|>", "<|end_of_turn|>", "<|endofturn|>", "[|endofturn|]"),
        *("<|END_OF_TURN_TOKEN|>", "<EOT>", "<|EOT|>", "[EOT]", "<|return|>", "<|call|>"),
        *("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>"),
    }
)
# Where it is a token, a turn has several messages, each of which ends with <|end|>.
MANY_MESSAGES = "<|return|>"
MAX_TOKEN_LEN = 128  # characters of a token that a template may write after a content

# `content`, how it ends as an expression, and what leads to the text after it.
_AFTER_CONTENT = re.compile(
    r"""\bcontent\b ["']?\]? (?:\s*\|\s*trim)? \s* (?:-?\}\}|[+~])? [\s"']* (?:\{\{-?\s*["'])?""",
    re.VERBOSE,
)


class _Added(NamedTuple):
    """The added tokens of a tokenizer."""

    ids: Mapping[str, int]  # by text
    special: frozenset[str]


def implied_end_ids(folder: Path, named: Iterable[int]) -> tuple[int, ...]:
    """The ids of tokens that end a turn, though no file names them. `named`: those that files
    name."""
    added = _added(folder)
    found = {added.ids[text] for text in KNOWN_ENDS & added.ids.keys()}
    no_ends = set()
    if MANY_MESSAGES in added.ids and "<|end|>" in added.ids:
        no_ends.add(added.ids["<|end|>"])
    found -= no_ends
    template = _template(folder)
    # A template that writes one of them needs no other end.
    ends = {*named, *found}
    written = (text in template for text, id in added.ids.items() if id in ends)
    if not any(written) and "eos_token" not in template:
        found |= {added.ids[text] for text in _closing(template, added.special)}
    return tuple(sorted(found - no_ends))


def _closing(template: str, special: frozenset[str]) -> set[str]:
    """The special tokens that a template writes after the content of a message, without those that
    close a part of it, as `</think>`."""
    lens = sorted({len(text) for text in special if len(text) <= MAX_TOKEN_LEN}, reverse=True)
    found = set()
    for match in _AFTER_CONTENT.finditer(template):
        for size in lens:
            text = template[match.end() : match.end() + size]
            if text in special and not text.startswith(("</", "[/")):
                found.add(text)
                break
    return found


def _template(folder: Path) -> str:
    """The chat template; "" if there is none. Of several, the default one."""
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        template = _value(_parts(folder / "tokenizer_config.json").get("chat_template"))
    if isinstance(template, list):
        named = {each.get("name"): each for each in template if isinstance(each, dict)}
        template = named.get("default", {}).get("template")
    return template if isinstance(template, str) else ""


def _added(folder: Path) -> _Added:
    listed = _value(_parts(folder / "tokenizer.json").get("added_tokens"))
    tokens = listed if isinstance(listed, list) else []
    ids: dict[str, int] = {}
    special = set()
    for token in tokens:
        if not isinstance(token, dict):
            continue
        text = token.get("content")
        id = _as_id(token.get("id"))
        if not isinstance(text, str) or not text or id is None:
            continue
        ids[text] = id
        if token.get("special") is True:
            special.add(text)
    return _Added(ids, frozenset(special))


def turn_end_id(folder: Path) -> int | None:
    """The id of the tokenizer's `eos_token`; None if it names none, or one that is not in it."""
    content = _turn_end(folder)
    if content is None:
        return None
    added = _added(folder)
    if content in added.ids:
        return added.ids[content]
    model = _value(_parts(folder / "tokenizer.json").get("model"))
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        return _as_id(vocab.get(content))
    return None


def _turn_end(folder: Path) -> str | None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _value(_parts(folder / name).get("eos_token"))
        content = token
        if isinstance(token, dict):
            content = token.get("content")
        if isinstance(content, str) and content:
            return content
    return None


def _parts(path: Path) -> JsonObject:
    """The values of a JSON object, not decoded: most values of a tokenizer are not needed."""
    import msgspec  # imported here: the help of the command line does not need it

    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}


def _value(written: Any) -> Any:
    """A decoded value; None if it is missing or cannot be read."""
    import msgspec

    try:
        if written is None:
            return None
        return msgspec.json.decode(written)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _as_id(value: Any) -> int | None:
    if isinstance(value, int):
        return value
    return None
