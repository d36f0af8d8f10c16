"""Answers in SGLang's form: each event of a stream repeats all previous output.

If the event of every token repeated everything, the cost of a stream would be quadratic in its
length. Therefore the output of a completion is stored as it is written, and the longer it is, the
more new output is needed before the next event (`GrowingOutput.is_due`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from weft.client.aux_outputs import hidden_states
from weft.client.generation import Completion, Delta
from weft.json_types import JsonObject
from weft.server.body import json_bytes, written
from weft.server.chat.answers import event, meta_cached_details, meta_info
from weft.server.chat.causes import cause_of_prompts
from weft.server.sglang.logprobs import JsonList, NativeLogprobs

FREE_LEN = 32_768  # bytes of an answer that every event of a stream may repeat
SPACING = 32  # above it, 1 / SPACING of the last event must be new


class GrowingOutput:
    """The output of one completion so far, and its size in the last event."""

    def __init__(self, logprobs: NativeLogprobs | None) -> None:
        self.logprobs = logprobs
        self._texts: list[str] = []
        self._ids = JsonList()
        self._text_len = 0  # characters
        self._last_len = 0

    @property
    def is_opened(self) -> bool:
        """Whether an event has contained it."""
        return self._last_len > 0

    @property
    def is_due(self) -> bool:
        """Whether there is enough new output for an event: always up to `FREE_LEN` bytes, above it
        at least `1 / SPACING` of the last event.

        Then all events of one completion above `FREE_LEN` together have at most `SPACING + 1` times
        the bytes of the last one.
        """
        size = self._size()
        return size <= FREE_LEN or size - self._last_len >= self._last_len // SPACING

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._text_len += len(delta.text)
        self._ids.extend(delta.token_ids)
        if self.logprobs is not None:
            self.logprobs.add(delta)

    def snapshot(self) -> tuple[str, msgspec.Raw]:
        """All text and ids so far; the event that contains them is being written."""
        self._texts = ["".join(self._texts)]
        self._last_len = max(self._size(), 1)
        return self._texts[0], self._ids.raw()

    def _size(self) -> int:
        """The approximate bytes of an event with all output so far."""
        size = self._text_len + len(self._ids)
        if self.logprobs is not None:
            size += self.logprobs.num_bytes
        return size


class NativeReply:
    """The `Reply` to a request of `/generate`."""

    def __init__(
        self,
        *,
        completions: Sequence[Completion],
        as_list: bool,
        logprobs: Sequence[NativeLogprobs | None],
        version: Callable[[], str],
    ) -> None:
        self._completions = completions
        self._as_list = as_list
        self._version = version  # the version of the current weights
        self._growing = [GrowingOutput(own) for own in logprobs]

    def full_body(self, deltas: Sequence[Delta]) -> bytes:
        for delta in deltas:
            self._growing[delta.choice].add(delta)
        answers = [written(self._answer(delta)) for delta in deltas]
        return json_bytes(answers if self._as_list else answers[0])

    def events(self, delta: Delta) -> bytes:
        growing = self._growing[delta.choice]
        growing.add(delta)
        if growing.is_opened and delta.end is None and not growing.is_due:
            return b""
        answer = self._answer(delta)
        if self._as_list:
            answer["index"] = delta.choice
        return event(answer)

    def closing(self) -> bytes:
        return b""

    def _answer(self, delta: Delta) -> JsonObject:
        completion = self._completions[delta.choice]
        growing = self._growing[delta.choice]
        meta = meta_info(completion, delta, self._version())
        if delta.end is not None and completion.spec.request.sampling.hidden_states:
            meta["hidden_states"] = hidden_states(
                completion.aux_outputs, delta.end.prompt_tokens, delta.num_tokens
            )
        if delta.end is not None and completion.spec.request.tells_cache:
            meta |= meta_cached_details(completion)
        if delta.end is not None and completion.spec.request.tells_cause_to is not None:
            meta |= {"cache_cause": cause_of_prompts([completion])}
        logprobs = growing.logprobs
        if logprobs is not None:
            if not growing.is_opened or delta.end is not None:  # long and constant
                meta |= logprobs.of_prompt()
            meta |= logprobs.of_output()
        text, ids = growing.snapshot()
        return {
            "text": text,
            "output_ids": ids,
            "meta_info": meta,
        }
