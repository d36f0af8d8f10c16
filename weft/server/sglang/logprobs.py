"""Log probabilities of one completion and its prompt in SGLang's lists: [logprob, token id, text or
null].

An answer repeats the lists of the output as far as they have come. Each entry is written as JSON
once, when its token comes, and the lists are kept as bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from weft.client.aux_outputs import PromptToken, prompt_logprobs
from weft.client.generation import Delta
from weft.messages.replies import Extra
from weft.messages.sampling import SamplingParams
from weft.server.body import written
from weft.server.errors import ApiError
from weft.server.openai.answers import finite
from weft.text.tokenizer import Tokenizer

Entry = tuple[float | None, int, str | None]


def logprob_params(wanted: bool, start: int, num_top: int, ids: Sequence[int]) -> dict[str, Any]:
    """`return_logprob` and the fields beside it as sampling parameters.

    `start` -1: none of the prompt.
    """
    if not wanted:
        return {}
    of_prompt = {} if start < 0 else {"prompt_logprobs": num_top, "prompt_logprobs_start": start}
    return {"logprobs": num_top, "logprob_token_ids": tuple(ids), **of_prompt}


def require_start(params: SamplingParams, ids: Sequence[int], *, behind_history: bool) -> None:
    """Refuse a start behind the prompt.

    How long the history of a session is, the engine alone knows.
    """
    start = params.prompt_logprobs_start
    if start >= len(ids) and start and not behind_history:
        raise ApiError(
            400,
            f"logprob_start_len is {start:,}; the prompt has {len(ids):,} tokens",
            param="logprob_start_len",
        )


class JsonList:
    """A list of JSON that grows at its end.

    An item is encoded once, however often the list is told.
    """

    def __init__(self) -> None:
        self._items = bytearray()  # each with a comma behind it

    def extend(self, items: Sequence[Any]) -> None:
        if items:
            self._items += msgspec.json.encode(items)[1:-1] + b","

    def __len__(self) -> int:
        """Bytes."""
        return len(self._items)

    def raw(self) -> msgspec.Raw:
        """All of it, for an encoder to take over as it is."""
        return msgspec.Raw(b"[" + self._items[:-1] + b"]")


class NativeLogprobs:
    """Grows with its completion. What was `given` of the prompt is there before the first delta."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        given: Sequence[Extra],
        *,
        with_text: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._ids = params.logprob_token_ids
        self._of_prompt = params.prompt_logprobs is not None
        self._given = given
        self._with_text = with_text
        self._about_prompt: dict[str, Any] = {}
        self._tokens = JsonList()
        self._top = JsonList()
        self._of_wanted = JsonList()

    def add(self, delta: Delta) -> None:
        found = delta.logprobs
        self._tokens.extend(
            [
                self._entry(one.logprob, token)
                for token, one in zip(delta.token_ids, found, strict=False)
            ]
        )
        self._top.extend(
            [self._entries(zip(one.top_ids, one.top_logprobs, strict=True)) for one in found]
        )
        if self._ids:
            self._of_wanted.extend([self._of_ids(one.id_logprobs) for one in found])

    @property
    def num_bytes(self) -> int:
        """Of the output's lists as they are told."""
        return len(self._tokens) + len(self._top) + len(self._of_wanted)

    def of_output(self) -> dict[str, Any]:
        """Of everything so far."""
        meta: dict[str, Any] = {
            "output_token_logprobs": self._tokens.raw(),
            "output_top_logprobs": self._top.raw(),
        }
        if self._ids:
            meta["output_token_ids_logprobs"] = self._of_wanted.raw()
        return meta

    def of_prompt(self) -> dict[str, Any]:
        """From `logprob_start_len` on; the first has no log probability.

        Asked for twice, and made once.
        """
        if not self._about_prompt:
            self._about_prompt = {
                name: written(value) for name, value in self._prompt_lists().items()
            }
        return self._about_prompt

    def _prompt_lists(self) -> dict[str, Any]:
        if not self._of_prompt:
            return {"input_token_logprobs": []}
        tokens = prompt_logprobs(self._given)
        meta: dict[str, Any] = {
            "input_token_logprobs": [self._entry(one.logprob, one.token) for one in tokens],
            "input_top_logprobs": [_known(one, self._entries(one.top)) for one in tokens],
        }
        if self._ids:
            meta["input_token_ids_logprobs"] = [
                _known(one, self._of_ids(one.of_ids)) for one in tokens
            ]
        return meta

    def _of_ids(self, logprobs: Sequence[float]) -> list[Entry]:
        return self._entries(zip(self._ids, logprobs, strict=False))

    def _entries(self, pairs: Iterable[tuple[int, float]]) -> list[Entry]:
        return [self._entry(logprob, token) for token, logprob in pairs]

    def _entry(self, logprob: float | None, token: int) -> Entry:
        text = self._tokenizer.token_text(token) if self._with_text else None
        return None if logprob is None else finite(logprob), token, text


def _known(token: PromptToken, entries: list[Entry]) -> list[Entry] | None:
    return None if token.logprob is None else entries
