"""Streams of /generate repeat everything that came before. That must not cost the square of their
length."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise

import pytest

from tests.client.completions import make_completion
from tests.text.tokens import byte_tokenizer
from weft.messages.replies import Finish, TokenLogprobs
from weft.messages.sampling import SamplingParams
from weft.server.sglang.logprobs import NativeLogprobs
from weft.server.sglang.reply import FREE_LEN, SPACING, NativeReply
from weft.text.tokenizer import Tokenizer

NUM_TOP = 5


class Counting(NativeLogprobs):
    """Counts the entries that are written."""

    num_written = 0

    def _entry(self, logprob: float | None, token: int) -> tuple[float | None, int, str | None]:
        self.num_written += 1
        return super()._entry(logprob, token)


class Stream:
    """One completion, whose tokens come one by one."""

    def __init__(self, params: SamplingParams) -> None:
        self.tokenizer: Tokenizer = byte_tokenizer()
        self.completion = make_completion(params)
        self.logprobs = None
        if params.logprobs is not None:
            self.logprobs = Counting(self.tokenizer, params, [], with_text=True)
        self.reply = NativeReply(
            completions=[self.completion],
            as_list=False,
            logprobs=[self.logprobs],
            version=lambda: "1",
        )

    def events(self, num_tokens: int) -> Iterator[bytes]:
        for number in range(num_tokens):
            self.completion.push(97 + number % 26)
            if self.logprobs is not None:
                top = [(number + k) % 256 for k in range(NUM_TOP)]
                told = TokenLogprobs(id=1, logprob=-0.5, top_ids=top, top_logprobs=[-1.0] * NUM_TOP)
                self.completion.push_logprobs(told)
            if number == num_tokens - 1:
                self.completion.finish(Finish(id=1, reason="length"))
            delta = self.completion.take()
            assert delta is not None
            yield self.reply.events(delta)


def told(event: bytes) -> dict:
    return json.loads(event.removeprefix(b"data: "))


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(logprobs=NUM_TOP)])
@pytest.mark.parametrize("num_tokens", [2_000, 8_000, 32_000])
def test_all_events_together_are_a_constant_times_the_last(
    params: SamplingParams, num_tokens: int
) -> None:
    sizes = [len(event) for event in Stream(params).events(num_tokens)]
    small = sum(size for size in sizes if size <= FREE_LEN + 1_000)
    assert sum(sizes) - small <= (SPACING + 2) * sizes[-1]
    assert small <= 10_000 * FREE_LEN


def test_each_entry_is_written_once() -> None:
    stream = Stream(SamplingParams(logprobs=NUM_TOP))
    num_events = sum(1 for event in stream.events(3_000) if event)
    assert stream.logprobs is not None
    assert stream.logprobs.num_written == 3_000 * (1 + NUM_TOP)
    assert num_events > 100, "it is still a stream"


def test_every_event_has_all_that_came_before_and_the_last_one_everything() -> None:
    events = [
        told(event) for event in Stream(SamplingParams(logprobs=NUM_TOP)).events(1_000) if event
    ]
    for before, after in pairwise(events):
        assert after["text"].startswith(before["text"])
        assert len(after["output_ids"]) > len(before["output_ids"])
        assert len(after["meta_info"]["output_token_logprobs"]) == len(after["output_ids"])
        assert len(after["meta_info"]["output_top_logprobs"]) == len(after["output_ids"])
    last = events[-1]
    assert len(last["text"]) == len(last["output_ids"]) == 1_000
    assert last["meta_info"]["output_token_logprobs"][28] == [-0.5, 99, "c"]
    assert last["meta_info"]["finish_reason"]["type"] == "length"


def test_every_token_is_reported_at_once_while_the_answer_is_small() -> None:
    events = list(Stream(SamplingParams()).events(1_000))
    assert all(events)
