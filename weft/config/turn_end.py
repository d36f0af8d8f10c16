"""Finds the token that ends a text or a turn, as the tokenizer's files name it. Missing or broken
files are ignored here: the code that loads the tokenizer reports them.

`tokenizer_config.json` or `special_tokens_map.json` has the token's name, `tokenizer.json` its id.
Fine-tuned models often change only the former: their `config.json` still has the end token of the
base model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.json_types import JsonObject


def turn_end_id(folder: Path) -> int | None:
    """The id of the tokenizer's `eos_token`; None if it names none, or one that is not in it."""
    content = _turn_end(folder)
    if content is None:
        return None
    tokenizer = _parts(folder / "tokenizer.json")
    added = _value(tokenizer.get("added_tokens"))
    if not isinstance(added, list):
        added = []
    for token in added:
        if isinstance(token, dict) and token.get("content") == content:
            return _as_id(token.get("id"))
    model = _value(tokenizer.get("model"))
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
