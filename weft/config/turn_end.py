"""The token that a tokenizer says ends a text or a turn. Files that are missing or broken say
nothing here: whoever loads the tokenizer tells what is wrong with them.

`tokenizer_config.json` or `special_tokens_map.json` has its name, `tokenizer.json` its id.
Fine-tunes often change only the former: their `config.json` still names the end of the base model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.json_types import JsonObject


def turn_end_id(folder: Path) -> int | None:
    """The id of the tokenizer's `eos_token`.
    None if it names none, or one that it does not have.
    """
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
    """The values of a JSON object as they are written: most of a tokenizer is not looked at."""
    import msgspec  # here: the help of the command line does without it

    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}


def _value(written: Any) -> Any:
    """The value of one of them; None for none, and for one that cannot be read."""
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
