"""Log probabilities of one completion and its prompt in SGLang's lists.

An entry of a list is [logprob, token id, text or null].

Every event of a stream repeats the lists of the output so far. Therefore each entry is encoded as
JSON only once, when its token arrives, and the lists are stored as bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from weft.client.aux_outputs import prompt_logprobs
from weft.client.generation import Delta
from weft.json_types import JsonObject
from weft.messages.replies import AuxPiece
from weft.messages.sampling import SamplingParams
from weft.server.body import written
from weft.server.chat.answers import finite
from weft.server.errors import ApiError
from weft.text.tokenizer import Tokenizer

Entry = tuple[float | None, int, str | None]


def logprob_params(
    wanted: bool,
    start: int,
    num_top: int,
    ids: Sequence[int],
) -> JsonObject:
    """`return_logprob` and its related fields as sampling parameters.

    `start` -1: no log probabilities of the prompt.
    """
    if not wanted:
        return {}
    params: JsonObject = {"logprobs": num_top, "logprob_token_ids": tuple(ids)}
    if start >= 0:
        params["prompt_logprobs"] = num_top
        params["prompt_logprobs_start"] = start
    return params


def require_start(
    params: SamplingParams,
    ids: Sequence[int],
    *,
    after_history: bool,
) -> None:
    """Refuse a start after the end of the prompt.

    Only the engine knows the length of a session's history.
    """
    start = params.prompt_logprobs_start
    if start >= len(ids) and start and not after_history:
        message = f"logprob_start_len is {start:,}; the prompt has {len(ids):,} tokens"
        raise ApiError(400, message, param="logprob_start_len")


class JsonList:
    """A JSON list that grows at its end.

    Each item is encoded once, however often the list is sent.
    """

    def __init__(self) -> None:
        self._items = bytearray()  # each item followed by a comma

    def extend(self, items: Sequence[Any]) -> None:
        if items:
            self._items += msgspec.json.encode(items)[1:-1] + b","

    def __len__(self) -> int:
        """Size in bytes."""
        return len(self._items)

    def raw(self) -> msgspec.Raw:
        """The whole list, for an encoder to copy unchanged."""
        return msgspec.Raw(b"[" + self._items[:-1] + b"]")


class NativeLogprobs:
    """The lists of one completion, which grow with it.

    The log probabilities of the prompt are available before the first delta.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        aux_pieces: Sequence[AuxPiece],
        *,
        with_text: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._ids = params.logprob_token_ids
        self._of_prompt = params.prompt_logprobs is not None
        self._aux_pieces = aux_pieces
        self._with_text = with_text
        self._about_prompt: JsonObject = {}
        self._tokens = JsonList()
        self._top = JsonList()
        self._of_wanted = JsonList()

    def add(self, delta: Delta) -> None:
        tokens: list[Entry] = []
        top: list[list[Entry]] = []
        of_wanted: list[list[Entry]] = []
        for token, found in zip(delta.token_ids, delta.logprobs, strict=False):
            tokens.append(self._entry(found.logprob, token))
        for found in delta.logprobs:
            top.append(self._entries(zip(found.top_ids, found.top_logprobs, strict=True)))
            if self._ids:
                of_wanted.append(self._of_ids(found.id_logprobs))
        self._tokens.extend(tokens)
        self._top.extend(top)
        self._of_wanted.extend(of_wanted)

    @property
    def num_bytes(self) -> int:
        """Size of the output's lists as JSON, in bytes."""
        return len(self._tokens) + len(self._top) + len(self._of_wanted)

    def of_output(self) -> JsonObject:
        """The lists of all output so far."""
        meta: JsonObject = {
            "output_token_logprobs": self._tokens.raw(),
            "output_top_logprobs": self._top.raw(),
        }
        if self._ids:
            meta["output_token_ids_logprobs"] = self._of_wanted.raw()
        return meta

    def of_prompt(self) -> JsonObject:
        """The lists of the prompt from `logprob_start_len` on; the first token has no log
        probability.

        Called twice, and encoded once.
        """
        if not self._about_prompt:
            for name, value in self._prompt_lists().items():
                self._about_prompt[name] = written(value)
        return self._about_prompt

    def _prompt_lists(self) -> JsonObject:
        if not self._of_prompt:
            return {"input_token_logprobs": []}
        tokens: list[Entry] = []
        top: list[list[Entry] | None] = []
        of_wanted: list[list[Entry] | None] = []
        for own in prompt_logprobs(self._aux_pieces):
            is_known = own.logprob is not None
            tokens.append(self._entry(own.logprob, own.token))
            top.append(self._entries(own.top) if is_known else None)
            of_wanted.append(self._of_ids(own.of_ids) if is_known else None)
        lists: JsonObject = {"input_token_logprobs": tokens, "input_top_logprobs": top}
        if self._ids:
            lists["input_token_ids_logprobs"] = of_wanted
        return lists

    def _of_ids(self, logprobs: Sequence[float]) -> list[Entry]:
        return self._entries(zip(self._ids, logprobs, strict=False))

    def _entries(self, pairs: Iterable[tuple[int, float]]) -> list[Entry]:
        return [self._entry(logprob, token) for token, logprob in pairs]

    def _entry(self, logprob: float | None, token: int) -> Entry:
        text = self._tokenizer.token_text(token) if self._with_text else None
        if logprob is not None:
            logprob = finite(logprob)
        return logprob, token, text
