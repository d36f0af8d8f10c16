"""Snapshots of the engine (`Picture`) for the live page: JSON objects with columns for the steps,
rows and nodes of the prefix tree.

The first tokens of the tree's nodes become text here, because the engine has no tokenizer. Texts of
clients and models stay plain text: the page only displays them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import msgspec
import numpy as np

from weft.client.memory_lines import owners, pins, stores
from weft.json_types import JsonObject
from weft.messages.picture import (
    Picture,
    QueueColumns,
    RowColumns,
    StepColumns,
    TreeColumns,
)
from weft.text.tokenizer import Tokenizer

MAX_TEXTS = 2_048  # heads of nodes whose text is cached
HIDDEN = "▣"  # replaces tokens of pictures, videos and sounds

STEP_COLUMNS = ("number", "mode", "rows", "prompts", "tokens", "waiting", "ms")
NO_STEPS: dict[str, list[float]] = {name: [] for name in STEP_COLUMNS}

TextOf = Callable[[bytes], str]


class HeadTexts:
    """The text of the first tokens of a node. The latest texts are cached for the next pictures."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._texts: OrderedDict[bytes, str] = OrderedDict()

    def __call__(self, head: bytes) -> str:
        text = self._texts.get(head)
        if text is None:
            text = text_of_ids(head, self._tokenizer, self._vocab_size)
            self._texts[head] = text
            if len(self._texts) > MAX_TEXTS:
                self._texts.popitem(last=False)
        return text


def text_of_ids(tokens: bytes, tokenizer: Tokenizer, vocab_size: int) -> str:
    """The text of packed tokens (int32). A run of ids outside of the vocabulary, which belong to
    pictures, videos and sounds, becomes `HIDDEN`."""
    pieces: list[str] = []
    known: list[int] = []
    for token in np.frombuffer(tokens, dtype=np.int32).tolist():
        if 0 <= token < vocab_size:
            known.append(token)
            continue
        pieces.append(tokenizer.decode(known, skip_special_tokens=False))
        known = []
        if not pieces[-1] or pieces[-1][-1] != HIDDEN:
            pieces.append(HIDDEN)
    pieces.append(tokenizer.decode(known, skip_special_tokens=False))
    return "".join(pieces)


def ids_as_text(head: bytes) -> str:
    """The ids as text, for journals, which have no tokenizer."""
    ids = np.frombuffer(head, dtype=np.int32).tolist()
    return " ".join(map(str, ids))


def shown(
    picture: Picture,
    text_of: TextOf,
) -> JsonObject:
    """The JSON object of one engine's picture."""
    fields: JsonObject = {
        "rank": picture.rank,
        "at_s": picture.at_s,
        "paused": picture.paused,
        "input": picture.input_state,
        # All numbers, also zeros, which an encoded message omits.
        "stats": msgspec.structs.asdict(picture.stats),
        "steps": _steps(picture.steps),
        "rows": _rows(picture.rows),
        "queue": _queue(picture.queue),
        "owners": owners(picture.stats),
        "stores": stores(picture.stats),
        "pins": pins(picture.pins),
    }
    if picture.tree is not None:
        fields["tree"] = shown_tree(picture.tree, text_of)
    return fields


def _steps(steps: StepColumns) -> JsonObject:
    return {
        "number": _longs(steps.numbers),
        "mode": _ints(steps.modes),
        "rows": _ints(steps.num_rows),
        "prompts": _ints(steps.num_prompts),
        "tokens": _ints(steps.num_tokens),
        "waiting": _ints(steps.num_waiting),
        "ms": _rounded(steps.seconds, 1_000.0),
    }


def _rows(rows: RowColumns) -> JsonObject:
    return {
        "rid": rows.rids,
        "tenant": rows.tenants,
        "service": rows.services,
        "decoding": _ints(rows.is_decoding),
        "prompt": _ints(rows.prompt_len),
        "cached": _ints(rows.cached_len),
        "computed": _ints(rows.kv_len),
        "fill": _ints(rows.fill_len),
        "output": _ints(rows.num_output),
        "max": _ints(rows.max_len),
        "age": _rounded(rows.age_s, 1.0),
        "cause": rows.causes,
        "missed": _ints(rows.missed_len),
    }


def _queue(queue: QueueColumns) -> JsonObject:
    return {
        "rid": queue.rids,
        "service": queue.services,
        "why": queue.reasons,
        "age": _rounded(queue.age_s, 1.0),
    }


def shown_tree(tree: TreeColumns, text_of: TextOf) -> JsonObject:
    """The columns of a tree, one entry for each node in each, and what is known of the walk."""
    return {
        "round": tree.round,
        "nodes": tree.num_nodes,
        "whole": tree.is_whole,
        "parent": _ints(tree.parents),
        "node": _ints(tree.numbers),
        "tokens": _ints(tree.num_tokens),
        "below": _longs(tree.num_below),
        "age": _longs(tree.ages),
        "locks": _ints(tree.locks),
        "pins": _ints(tree.pins),
        "text": [text_of(head) for head in tree.heads],
    }


def _ints(packed: bytes) -> list[int]:
    values: list[int] = np.frombuffer(
        packed,
        dtype=np.int32,
    ).tolist()
    return values


def _longs(packed: bytes) -> list[int]:
    values: list[int] = np.frombuffer(
        packed,
        dtype=np.int64,
    ).tolist()
    return values


def _rounded(packed: bytes, factor: float) -> list[float]:
    """Seconds times `factor`, rounded to three decimal places."""
    values = (
        np.frombuffer(
            packed,
            dtype=np.float32,
        ).astype(np.float64)
        * factor
    )
    rounded: list[float] = np.round(values, 3).tolist()
    return rounded
