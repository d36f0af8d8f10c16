"""Vectors for the tokens of prompts, and hidden states, under everything that happens to requests.

The oracle takes the first value of a vector for the token's id, so that outputs depend on vectors;
its hidden state of a token is its position and the hash of all tokens up to it.
"""

from __future__ import annotations

import random
import zlib

import msgspec
import numpy as np
import pytest

from tests.scheduler.oracle_runner import OracleRunner, expected_output, extend_hash
from tests.scheduler.recorded import RecordedWorld
from tests.scheduler.world import VOCAB, World
from tests.seeds import seeds
from weft.arrays import IntArray
from weft.journal.replay import Replay
from weft.messages.replies import AuxPiece, HiddenStatesPiece, StepOutput
from weft.messages.requests import Abort, BatchGenerate, GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.plan.inputs import InputVectors
from weft.plan.logits import Penalties
from weft.plan.outputs import HiddenStatesRequest, TokenStates
from weft.plan.step import Plan, Result, find
from weft.scheduler.features.hidden import HiddenStatesFeature
from weft.scheduler.features.penalties import PenaltiesFeature
from weft.scheduler.features.vectors import InputVectorsFeature
from weft.scheduler.settings import SchedulerSettings

SIZE = 3  # of a hidden state


def settings(**changes: object) -> SchedulerSettings:
    values: dict[str, object] = {
        "num_pages": 200,
        "page_size": 1,
        "max_running_requests": 8,
        "context_length": 120,
        "vocab_size": VOCAB,
        "hidden_size": SIZE,
        "mixed_chunk": False,
        "aging_s": 0.0,
    }
    return SchedulerSettings(**{**values, **changes})  # type: ignore[arg-type]


def state_of(tokens: list[int]) -> int:
    state = 0
    for token in tokens:
        state = extend_hash(state, token)
    return state % 1_000_003


class VectorOracle(OracleRunner):
    def execute(self, plan: Plan) -> Result:
        vectors = find(plan.inputs, InputVectors)
        if vectors is not None:
            assert not plan.tokens[vectors.index].any(), (
                "a vector stands for a token that has an id"
            )
            tokens = plan.tokens.copy()
            tokens[vectors.index] = vectors.rows[:, 0]
            for name, value in (("tokens", tokens), ("inputs", ())):
                object.__setattr__(plan, name, value)
        result = super().execute(plan)
        asked = find(plan.outputs, HiddenStatesRequest)
        if asked is None:
            return result
        positions: IntArray = np.concatenate(
            [np.arange(start, start + n) for start, n in zip(plan.starts, plan.lens, strict=True)]
        )
        states = self.state[plan.slots] % 1_000_003
        every = np.stack([positions, states, states], axis=1).astype(np.float32)
        states = TokenStates(every[asked.places])
        return Result(tokens=result.tokens, outputs=(states,))


class VectorWorld(World):
    def __init__(self, settings: SchedulerSettings, **more: object) -> None:
        self.vectors = InputVectorsFeature(SIZE)
        super().__init__(
            settings, features=(HiddenStatesFeature(), self.vectors, PenaltiesFeature()), **more
        )  # type: ignore[arg-type]
        self.runner.__class__ = VectorOracle
        self.told: dict[int, list[tuple[int, np.ndarray]]] = {}

    def ask(self, prompt: list[int], *, as_vectors: bool = False, **sampling: object) -> int:
        """Send a request whose prompt comes as ids, or as vectors that mean these."""
        id = len(self.sent)
        params = SamplingParams(**{"ignore_eos": True, "max_new_tokens": 6, **sampling})  # type: ignore[arg-type]
        rows = np.array([[token, 0, 0] for token in prompt], dtype=np.float32)
        message = GenerateRequest(
            id=id,
            rid=f"r{id}",
            input_ids=np.array(
                [0 if as_vectors else token for token in prompt], dtype=np.int32
            ).tobytes(),
            sampling=params,
            recompute_from=params.recompute_from,
            vectors=rows.tobytes() if as_vectors else b"",
            shares_kv=not as_vectors,
        )
        self.sent[id], self.prompts[id], self.outputs[id], self.told[id] = message, prompt, [], []
        self.take_in(message)
        return id

    def receive(self, output: StepOutput) -> None:
        for one in output.aux:
            assert isinstance(one, HiddenStatesPiece)
            assert one.id not in self.finished, "a state after the final word"
            rows = np.frombuffer(one.vectors, dtype=np.float32).reshape(one.num_tokens, SIZE)
            self.told[one.id].append((one.start, rows))
        super().receive(output)

    def check_outputs(self) -> None:
        for id, message in self.sent.items():
            expected = expected_output(
                self.prompts[id], message.sampling.max_new_tokens or 0, VOCAB, set()
            )
            assert self.outputs[id] == expected[: len(self.outputs[id])]
            if self.finished[id].reason == "length":
                assert self.outputs[id] == expected
                self.check_states(id)

    def check_states(self, id: int) -> None:
        whole, wanted = self.prompts[id] + self.outputs[id], self.sent[id].sampling.hidden_states
        positions = [start + i for start, rows in self.told[id] for i in range(len(rows))]
        states = [row for _, rows in self.told[id] for row in rows.tolist()]
        if wanted == "all":
            assert positions == list(range(max(len(whole) - 1, len(self.prompts[id]))))
        elif wanted == "last":
            assert positions[-1] == max(len(whole) - 1, len(self.prompts[id])) - 1
        else:
            assert not positions
        for position, row in zip(positions, states, strict=True):
            state = np.float32(state_of(whole[: position + 1]))
            assert row == [position, state, state]


@pytest.mark.parametrize("seed", seeds(10, 40))
def test_vectors_and_states_survive_any_schedule(seed: int) -> None:
    """Chunks, mixed steps, overlap, retractions, aborts and failing steps; every third world is
    short of memory."""
    draw = random.Random(seed)
    page_size = draw.choice([1, 2, 4])
    world = VectorWorld(
        settings(
            num_pages=(90 if seed % 3 else 44) // page_size,
            page_size=page_size,
            chunked_prefill_size=draw.choice([-1, 4, 7, 16]),
            mixed_chunk=draw.random() < 0.5,
            prefix_cache=draw.random() < 0.8,
            schedule_conservativeness=0.1,
        ),
        depth=draw.choice([0, 1, 2]),
        fail_steps={draw.randrange(5, 60)} if seed % 4 == 0 else set(),
    )
    family = [draw.randrange(1, VOCAB) for _ in range(24)]
    zeros = [0] * 24
    for _ in range(draw.randrange(8, 20)):
        prompt = [*draw.choice([family, zeros])[: draw.randrange(1, 24)], draw.randrange(VOCAB)]
        id = world.ask(
            prompt,
            as_vectors=draw.random() < 0.5,
            hidden_states=draw.choice([None, "last", "all"]),
            max_new_tokens=draw.choice([0, 1, 5, 14]),
            presence_penalty=draw.choice([0.0, 1.0]),
        )
        if draw.random() < 0.1:
            world.abort(Abort(ids=(id,)))
        for _ in range(draw.randrange(3)):
            world.step()
    world.run_dry()
    world.check_idle()
    world.check_outputs()
    assert not world.vectors.by_id


def test_retracted_requests_keep_their_vectors_and_tell_no_state_twice() -> None:
    world = VectorWorld(settings(num_pages=100, context_length=100, schedule_conservativeness=0.0))
    for token in range(4):
        world.ask([token] * 2, as_vectors=True, hidden_states="all", max_new_tokens=60)
    world.run_dry()
    world.check_outputs()
    assert world.scheduler.counters.num_retractions


def test_nothing_that_vectors_computed_is_found_by_ids_or_the_other_way_round() -> None:
    world = VectorWorld(settings(chunked_prefill_size=4))
    for as_vectors in (False, True, False, True, True):
        world.ask([0] * 20, as_vectors=as_vectors)
        world.run_dry()
    world.ask([9] * 20, as_vectors=True)  # the same ids as those before, and other vectors
    world.run_dry()
    world.check_outputs()
    assert [world.finished[id].cached_tokens for id in range(6)] == [0, 0, 19, 0, 0, 0]
    cached = 20 + 6 - 1  # of the two requests with ids, and of no other
    assert len(world.scheduler.kv.cache.tree.owned_pages()) == cached


def test_states_of_the_last_token_leave_the_cached_prefix_alone() -> None:
    world = VectorWorld(settings())
    for wanted in (None, "last", "all"):
        world.ask([7] * 20, hidden_states=wanted)
        world.run_dry()
    world.check_outputs()
    assert [world.finished[id].cached_tokens for id in range(3)] == [0, 19, 0]


def test_penalties_do_not_count_the_ids_that_stand_for_vectors() -> None:
    world = VectorWorld(settings())
    plans: list[Plan] = []
    execute = world.runner.execute
    world.runner.execute = lambda plan: (plans.append(plan), execute(plan))[1]  # type: ignore[method-assign, func-returns-value]
    world.ask([4] * 5, as_vectors=True, repetition_penalty=1.5)
    world.ask([4] * 3, repetition_penalty=1.5)
    world.run_dry()
    first, last = (find(plan.logits, Penalties) for plan in (plans[0], plans[-1]))
    assert first is not None
    assert last is not None
    assert first.history.tolist() == [4, 4, 4]
    assert first.output_starts.tolist() == [0, 3]
    assert last.history.tolist() == [*world.outputs[0][:-1], 4, 4, 4, *world.outputs[1][:-1]]


def test_vectors_that_do_not_fit_are_refused() -> None:
    part = InputVectorsFeature(SIZE)
    message = GenerateRequest(
        id=0, rid="r", input_ids=bytes(8), sampling=SamplingParams(), vectors=bytes(20)
    )
    refusal = part.refusal(message)
    assert refusal is not None
    assert refusal.message == "the input embeddings have 5 values; 2 tokens of 3 are needed"


def test_what_a_step_gives_travels_in_messages_of_bounded_size() -> None:
    given: list[AuxPiece] = [
        HiddenStatesPiece(id=i, start=0, num_tokens=1, vectors=bytes(40)) for i in range(5)
    ]
    output = StepOutput(ids=b"12345678", tokens=b"1234", aux=given)
    assert output.pieces(200) == [output]
    *first, last = output.pieces(100)
    assert [len(piece.aux) for piece in first] == [2, 2, 1]
    assert [one for piece in first for one in piece.aux] == given
    assert last == StepOutput(ids=b"12345678", tokens=b"1234")


@pytest.mark.parametrize("puts_aside", [False, True])
def test_a_journal_leaves_vectors_out_and_is_replayed_all_the_same(puts_aside: bool) -> None:
    world = RecordedWorld(settings(chunked_prefill_size=4), depth=1)
    if puts_aside:
        world.put_aside_often()
    rows = np.full((9, SIZE), 7.0, dtype=np.float32).tobytes()
    ids = np.zeros(9, dtype=np.int32).tobytes()
    params = SamplingParams(max_new_tokens=4, hidden_states="all", ignore_eos=True)
    one = GenerateRequest(
        id=0,
        rid="a",
        input_ids=ids,
        vectors=rows,
        shares_kv=False,
        sampling=params,
        recompute_from=0,
    )
    others = [msgspec.structs.replace(one, id=id, input_ids=b"", vectors=b"") for id in (1, 2)]
    batch = BatchGenerate(prompts=[ids], requests=others, prompt_of=[0, 0], vectors={0: rows})
    seen: list[Plan] = []
    execute = world.runner.execute
    world.runner.execute = lambda plan: (seen.append(plan), execute(plan))[1]  # type: ignore[method-assign, func-returns-value]
    world.engine.submit(one)
    world.engine.submit(batch)
    while world.engine.has_work:
        world.engine.step()
    given = [op for plan in seen for op in plan.inputs]
    assert sum(len(op.index) for op in given if isinstance(op, InputVectors)) == 27
    records = [record for file in world.records.files for record in file]
    states = [zlib.decompress(Replay(file).began.state) for file in world.records.parts[1:]]
    assert not any(rows[:24] in record for record in (*records, *states))
    world.replay(check=True)
