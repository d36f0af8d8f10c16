"""The text of a completion, however its tokens arrive, against the text of all of them at once."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.client.completions import make_completion
from tests.text.naive_stops import naive
from weft.client.generation import Delta
from weft.messages.replies import Finish
from weft.messages.sampling import SamplingParams


@given(
    steps=st.lists(
        st.lists(st.sampled_from([*"abö🎉".encode(), 0x80, 0xC3]), max_size=4), max_size=20
    ),
    stops=st.lists(st.text(st.sampled_from("abö🎉\ufffd"), min_size=1, max_size=3), max_size=3),
    include=st.booleans(),
    taken=st.sets(st.integers(0, 20)),
)
@settings(max_examples=250, deadline=None)
def test_text_is_that_of_all_tokens_up_to_the_stop_string(
    steps: list[list[int]], stops: list[str], include: bool, taken: set[int]
) -> None:
    one = make_completion(SamplingParams(stop=tuple(stops), include_stop=include))
    generation = one.generation
    deltas: list[Delta] = []
    ids: list[int] = []
    for number, step in enumerate(steps):
        for token in step:
            if one.stopped_by is None:
                ids.append(token)
                one.push(token)
        if number in taken:
            deltas += generation.take()
    one.finish(Finish(id=1, reason="length", completion_tokens=len(ids)))
    deltas += generation.take()
    assert generation.take() == []

    everything = bytes(token for step in steps for token in step).decode("utf-8", "replace")
    text, matched = naive(everything, stops, include) if stops else (everything, None)
    end = deltas[-1].end
    assert end is not None
    assert "".join(delta.text for delta in deltas) == text
    assert [token for delta in deltas for token in delta.token_ids] == ids
    assert (end.reason, end.matched) == (("stop", matched) if matched else ("length", None))
    assert end.completion_tokens == len(ids) == deltas[-1].num_tokens


def test_with_an_interval_tokens_wait_for_others_but_the_first_and_the_last_do_not() -> None:
    one = make_completion(SamplingParams(), stream_interval=3)
    generation = one.generation
    found = []
    for token in b"abcdefgh":
        one.push(token)
        found += [delta.text for delta in generation.take()]
    assert found == ["a", "bcd", "efg"]
    one.finish(Finish(id=1, reason="length", completion_tokens=8))
    assert [delta.text for delta in generation.take()] == ["h"]


def test_a_pushing_consumer_is_called_for_each_delta_until_it_declines() -> None:
    one = make_completion(SamplingParams())
    generation = one.generation
    found: list[str] = []

    def push() -> bool:
        found.extend(delta.text for delta in generation.take())
        return len(found) < 2

    async def go() -> list[Delta]:
        pushing = asyncio.create_task(generation.push_to(push))
        await asyncio.sleep(0)
        for token in b"abc":
            one.push(token)
            generation.wake()
        assert found == ["a", "b"]  # and no task has run
        await pushing
        return await anext(generation)

    assert [delta.text for delta in asyncio.run(go())] == ["c"]
