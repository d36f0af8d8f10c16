"""The table of open completions, against a plain one: at every moment it finds by id, by request,
by batch, and has no more of a generation in the engine than its share."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.client.completions import METRICS, TOKENIZER
from weft.client.deferred import ShareLimits
from weft.client.deliveries import OpenCompletions
from weft.client.front_times import FrontTimes
from weft.client.generation import Completion, CompletionSpec, Generation
from weft.messages.replies import Finish
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.text.stop.stopping import Stops

NAMES = ["a", "b", "c"]  # of requests and of batches: the same ones for both
LIMITS = ShareLimits(num_rows=2, step_tokens=0, page_size=1)


def begin(opened: OpenCompletions, id: int, generation: Generation, rid: str, group: str) -> None:
    request = GenerateRequest(id=id, rid=rid, group=group, sampling=SamplingParams())
    spec = CompletionSpec(
        request=request,
        choice=len(generation.completions),
        prompt_len=1,
        latency=METRICS.completions.latencies[0],
        started_s=0.0,
        arrived_s=0.0,
        stream_interval=1,
        front=FrontTimes(0.0),
    )
    stops = Stops(request.sampling).matcher()
    opened.add(Completion(spec, generation, TOKENIZER.detokenizer(), stops))


def end(opened: OpenCompletions, completion: Completion) -> None:
    completion.finish(Finish(id=completion.spec.request.id, reason="length"), "")
    opened.remove(completion)


def requests_of(generation: Generation) -> list[GenerateRequest]:
    return [completion.spec.request for completion in generation.completions]


def new_generation() -> Generation:
    return Generation(stream=True, on_close=lambda generation: None)


class Model:
    """What the table should have, in lists that are searched each time."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.opened = OpenCompletions()
        self.open: dict[int, Completion] = {}
        self.in_engine: set[int] = set()
        self.waiting: dict[int, None] = {}  # in order
        self.next_id = 1

    def submit(self) -> None:
        """A request with several completions; nothing waits of small ones."""
        generation = new_generation()
        rid = self.rng.choice(["", *NAMES])
        group = self.rng.choice(["", *NAMES])
        for _ in range(self.rng.randrange(1, 6)):
            begin(self.opened, self.next_id, generation, rid, group)
            self.next_id += 1
        self.open |= {one.spec.request.id: one for one in generation.completions}
        sent = self.opened.defer(generation, requests_of(generation), LIMITS)
        ids = [request.id for request in requests_of(generation)]
        assert [request.id for request in sent] == ids[: LIMITS.num_rows]
        self.in_engine |= {request.id for request in sent}
        self.waiting |= dict.fromkeys(ids[LIMITS.num_rows :])

    def end_one(self) -> None:
        """The engine has ended one, and whoever may follow it does."""
        id = self.rng.choice(sorted(self.in_engine))
        completion = self.open.pop(id)
        self.in_engine.remove(id)
        end(self.opened, completion)
        self.send()

    def drop_one(self) -> None:
        """Somebody aborts one: it ends here if it waits, else the engine has to end it."""
        id = self.rng.choice(sorted(self.open))
        is_here = self.opened.drop_deferred(self.open[id])
        assert is_here == (id in self.waiting)
        if is_here:
            del self.waiting[id]
            end(self.opened, self.open.pop(id))
            self.send()

    def leave(self) -> None:
        """The client of one request has gone."""
        generation = self.open[self.rng.choice(sorted(self.open))].generation
        self.opened.forget_deferred(generation)
        for completion in generation.completions:
            id = completion.spec.request.id
            self.waiting.pop(id, None)
            self.in_engine.discard(id)
            if self.open.pop(id, None) is not None:
                end(self.opened, completion)

    def send(self) -> None:
        following: list[int] = []
        num_there: dict[Generation, int] = {}
        for id in self.in_engine:
            generation = self.open[id].generation
            num_there[generation] = num_there.get(generation, 0) + 1
        for id in list(self.waiting):
            generation = self.open[id].generation
            if num_there.get(generation, 0) < LIMITS.num_rows:
                num_there[generation] = num_there.get(generation, 0) + 1
                following.append(id)
                del self.waiting[id]
        assert [request.id for request in self.opened.take_deferred()] == following
        self.in_engine |= set(following)

    def check(self) -> None:
        assert self.opened.by_id == self.open
        for name in NAMES:
            expected = {
                id: completion
                for id, completion in self.open.items()
                if name in (completion.spec.request.rid, completion.spec.request.group)
            }
            found = self.opened.named(name)
            assert {one.spec.request.id: one for one in found} == expected
            assert len(found) == len(expected)
        assert self.opened.named("") == []
        assert self.opened.named("nobody") == []
        waiting = {self.open[id].generation for id in self.waiting}
        assert waiting <= set(self.opened.deferred)
        assert self.opened.is_empty == (not self.open)


@pytest.mark.parametrize("seed", range(6))
def test_it_has_what_a_plain_table_has_after_whatever_happens(seed: int) -> None:
    rng = random.Random(f"open completions {seed}")
    model = Model(rng)
    for _ in range(150):
        model.check()
        steps: list[Callable[[], None]] = [model.submit]
        if model.in_engine:
            steps += [model.end_one] * 3
        if model.open:
            steps += [model.drop_one, model.leave]
        rng.choice(steps)()
    while model.in_engine:
        model.check()
        model.end_one()
    assert not model.waiting
    assert model.opened.is_empty


def test_names_are_forgotten_with_the_last_completion_that_has_them() -> None:
    opened = OpenCompletions()
    generation = new_generation()
    begin(opened, 1, generation, "a", "b")
    begin(opened, 2, generation, "", "b")
    first, second = generation.completions
    end(opened, first)
    assert opened.named("a") == []
    assert opened.named("b") == [second]
    assert not opened.is_empty
    end(opened, second)
    assert opened.is_empty


def test_one_that_waits_in_vain_keeps_the_table_from_being_empty() -> None:
    """Its generation has ended without being told: what is left would be kept for ever."""
    opened = OpenCompletions()
    generation = new_generation()
    for id in (1, 2, 3):
        begin(opened, id, generation, "", "")
    opened.defer(generation, requests_of(generation), LIMITS)
    opened.by_id.clear()
    assert not opened.is_empty
    opened.forget_deferred()
    assert opened.is_empty


def test_a_generation_that_ends_leaves_nothing_waiting() -> None:
    opened = OpenCompletions()
    generation = new_generation()
    for id in (1, 2, 3):
        begin(opened, id, generation, "", "")
    opened.defer(generation, requests_of(generation), LIMITS)
    for completion in generation.completions:
        assert generation in opened.deferred
        end(opened, completion)
    assert not opened.deferred


def test_prompts_follow_when_earlier_ones_have_a_token() -> None:
    """Half a step has 4 tokens, each prompt has 3."""
    opened = OpenCompletions()
    generation = new_generation()
    for id in (1, 2, 3):
        begin(opened, id, generation, "", "")
    ids = bytes(4 * 3)
    requests = [
        GenerateRequest(id=id, rid="", input_ids=bytes([id]) + ids[1:], sampling=SamplingParams())
        for id in (1, 2, 3)
    ]
    limits = ShareLimits(num_rows=8, step_tokens=4, page_size=1)
    assert [one.id for one in opened.defer(generation, requests, limits)] == [1]
    assert opened.take_deferred() == []
    opened.note_first_token(generation.completions[1])  # not that one
    assert opened.take_deferred() == []
    opened.note_first_token(generation.completions[0])
    assert [one.id for one in opened.take_deferred()] == [2]
    assert generation in opened.deferred
    opened.note_first_token(generation.completions[1])
    assert [one.id for one in opened.take_deferred()] == [3]
    assert generation not in opened.deferred
    opened.note_first_token(generation.completions[2])  # of one that keeps nothing back
