"""Log probabilities of one completion and its prompt in SGLang's lists: [logprob, token id, text or null]."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from weft.messages.replies import Extra, TokenLogprobs
from weft.messages.sampling import SamplingParams
from weft.server.errors import ApiError
from weft.server.openai.translate import finite
from weft.text.generation import Delta
from weft.text.prompt_logprobs import PromptToken, prompt_logprobs
from weft.text.tokenizer import Tokenizer

Entry = tuple[float | None, int, str | None]


def logprob_params(wanted: bool, start: int, num_top: int, ids: Sequence[int]) -> dict[str, Any]:
    """`return_logprob` and the fields beside it as sampling parameters. `start` -1: none of the prompt."""
    if start < -1:
        raise ApiError(400, f"logprob_start_len is {start}; it must be at least -1", param="logprob_start_len")
    if not wanted:
        return {}
    of_prompt = {} if start < 0 else {"prompt_logprobs": num_top, "prompt_logprobs_start": start}
    return {"logprobs": num_top, "logprob_token_ids": tuple(ids), **of_prompt}


def require_start(params: SamplingParams, ids: Sequence[int], *, behind_history: bool) -> None:
    """Refuse a start behind the prompt. How long the history of a session is, the engine alone knows."""
    start = params.prompt_logprobs_start
    if start >= len(ids) and start and not behind_history:
        raise ApiError(
            400, f"logprob_start_len is {start:,}; the prompt has {len(ids):,} tokens", param="logprob_start_len"
        )


class NativeLogprobs:
    """Grows with its completion. What was `given` of the prompt is there before the first delta."""

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, given: Sequence[Extra], *, with_text: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._ids = params.logprob_token_ids
        self._of_prompt = params.prompt_logprobs is not None
        self._given = given
        self._with_text = with_text
        self._tokens: list[int] = []
        self._found: list[TokenLogprobs] = []

    def add(self, delta: Delta) -> None:
        self._tokens += delta.token_ids
        self._found += delta.logprobs

    def of_output(self) -> dict[str, Any]:
        """Of everything so far."""
        found = self._found
        meta: dict[str, Any] = {
            "output_token_logprobs": [
                self._entry(one.logprob, token) for token, one in zip(self._tokens, found, strict=False)
            ],
            "output_top_logprobs": [self._entries(zip(one.top_ids, one.top_logprobs, strict=True)) for one in found],
        }
        if self._ids:
            meta["output_token_ids_logprobs"] = [self._of_ids(one.id_logprobs) for one in found]
        return meta

    def of_prompt(self) -> dict[str, Any]:
        """From `logprob_start_len` on; the first has no log probability."""
        if not self._of_prompt:
            return {"input_token_logprobs": []}
        tokens = prompt_logprobs(self._given)
        meta: dict[str, Any] = {
            "input_token_logprobs": [self._entry(one.logprob, one.token) for one in tokens],
            "input_top_logprobs": [_known(one, self._entries(one.top)) for one in tokens],
        }
        if self._ids:
            meta["input_token_ids_logprobs"] = [_known(one, self._of_ids(one.of_ids)) for one in tokens]
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
