"""The device path of GPUs on a fake one (`fake_gpu.py`): that it does what the CPU's does, and
touches nothing too early. None of this shows that CUDA does what the fake does."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.executor.driver import (
    KV_TOKENS,
    MODEL,
    Driver,
    Turn,
    full_logprobs,
    ints,
    make_driver,
)
from tests.executor.fake_gpu import POISON, FakeEvent, FakeGpu, TooEarly, fake_kernels
from tests.executor.gpu_driver import drawn, gpu_driver
from tests.launch.tiny_model import write_tiny_model
from weft.arrays import IntArray
from weft.assemble.build import build_engine
from weft.config.amounts import GB
from weft.config.engine import EngineConfig
from weft.config.machine import GpuCard, Machine
from weft.config.model import ModelConfig
from weft.config.resolve import resolve
from weft.engine.engine import Engine
from weft.executor.gpu import build
from weft.executor.gpu.staging import ALIGNMENT, RING, H2DBuffer, offsets, split
from weft.journal.recorder import RecordedEngine
from weft.messages.replies import StepOutput
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.plan.device import GetWeight
from weft.plan.logits import GrammarMask
from weft.plan.step import LAST_SAMPLED
from weft.scheduler.speculation import speculator

TEXT = list(range(1, 21))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gpu = FakeGpu()
    monkeypatch.setattr(build, "find_gpu", lambda: gpu)
    monkeypatch.setattr(build, "gpu_kernels", fake_kernels)
    return gpu


@pytest.fixture
def driver(gpu: FakeGpu) -> Iterator[Driver]:
    driver = gpu_driver()
    yield driver
    driver.runner.close()


@pytest.fixture
def cpu() -> Iterator[Driver]:
    driver = make_driver()
    yield driver
    driver.runner.close()


# H2DBuffer


def test_buffers_are_written_again_only_when_their_copy_is_through() -> None:
    gpu = FakeGpu()
    with gpu.stream():
        staging = H2DBuffer(gpu)
        sent = [
            (number, staging.send([ints([number] * 3), ints([-number])]))
            for number in range(3 * RING)
        ]
        gpu.synchronize()
    for number, packed in sent:
        assert [part.tolist() for part in split(packed, [3, 1])] == [[number] * 3, [-number]]


def test_a_buffer_that_is_written_too_early_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    with gpu.stream():
        staging = H2DBuffer(gpu)
        monkeypatch.setattr(FakeEvent, "synchronize", lambda event: None)
        for number in range(RING + 1):
            staging.send([ints([number])])
        with pytest.raises(TooEarly):
            gpu.synchronize()


def test_a_step_larger_than_the_buffers_gets_a_larger_one() -> None:
    gpu = FakeGpu()
    with gpu.stream():
        long = np.arange(200_000)
        assert torch.equal(H2DBuffer(gpu).send([long])[: len(long)], torch.from_numpy(long).int())


def test_every_array_begins_where_kernels_read_without_being_compiled_anew() -> None:
    begins, total = offsets([1, 0, 16, 17, 5])
    assert begins == [0, 16, 16, 32, 64]
    assert total == 64 + ALIGNMENT


# Steps


def test_a_gpu_computes_what_the_cpu_does(driver: Driver, cpu: Driver, gpu: FakeGpu) -> None:
    """Prompts, chunks, a shared prefix, steps of both kinds, and decode steps of every size, eager
    and as graphs."""

    def story(each: Driver) -> list[torch.Tensor]:
        first = each.run(Turn(0, TEXT[:9], samples=False), Turn(1, TEXT))
        mixed = each.run(Turn(0, TEXT[9:]), Turn(1, [LAST_SAMPLED]))
        each.share(1, 2, 16)
        shared = each.run(Turn(2, TEXT[5:9]))
        rows = ([2], [0, 2], [1, 0, 2], [0, 1], [2, 1, 0])
        decodes = [each.run(*(Turn(row, [LAST_SAMPLED]) for row in some)) for some in rows]
        each.run(Turn(3, TEXT[:2]), Turn(4, TEXT[:3]))
        return [
            first,
            mixed,
            shared,
            *decodes,
            each.run(*(Turn(row, [LAST_SAMPLED]) for row in range(5))),
        ]

    for actual, expected in zip(story(driver), story(cpu), strict=True):
        assert torch.allclose(actual, expected, atol=1e-4)
    assert gpu.num_replays == 5, "the last step is of more requests than any graph"


def test_the_next_step_is_launched_before_the_result_is_there(
    driver: Driver, cpu: Driver, gpu: FakeGpu
) -> None:
    expected = [
        cpu.launch(turn).result().tokens.tolist()
        for turn in (Turn(0, TEXT), *[Turn(0, [LAST_SAMPLED])] * 4)
    ]
    driver.run(Turn(7, TEXT))
    before = gpu.num_through
    steps = [
        driver.launch(Turn(0, TEXT)),
        *(driver.launch(Turn(0, [LAST_SAMPLED])) for _ in range(RING - 2)),
    ]
    assert gpu.num_through == before, "nothing was waited for"
    assert not any(step.done() for step in steps)
    actual = []
    while len(actual) < 5:
        step = steps.pop(0)
        actual.append(step.result().tokens.tolist())
        assert step.done()
        assert not any(later.done() for later in steps), "a result waits for its own step alone"
        steps.append(driver.launch(Turn(0, [LAST_SAMPLED])))
    assert actual == expected


def test_a_result_that_is_read_too_early_is_poison(driver: Driver) -> None:
    step = driver.launch(Turn(0, TEXT))
    poison = int.from_bytes(bytes([POISON]) * 4, "little")
    assert step._output.result().tokens.tolist() == [poison]  # type: ignore[attr-defined]
    assert step.result().tokens[0] < MODEL.vocab_size


def test_a_step_sends_its_numbers_in_one_copy(driver: Driver, gpu: FakeGpu) -> None:
    driver.run(Turn(0, TEXT), Turn(1, TEXT))
    for turns in ([Turn(0, [LAST_SAMPLED])], [Turn(1, [LAST_SAMPLED]), Turn(2, TEXT)]):
        before = gpu.num_copies
        plan = driver.plan(*turns)
        driver.runner.launch(replace(plan, outputs=())).result()
        assert gpu.num_copies - before == 3, "numbers there; tokens and whether they are valid back"


def test_a_step_that_fails_says_so_and_the_next_one_works(driver: Driver) -> None:
    expected = driver.run(Turn(0, TEXT))
    bad = driver.plan(Turn(1, TEXT))
    failed = driver.runner.launch(replace(bad, tokens=ints([10_000] * len(TEXT))))
    following = driver.launch(Turn(2, TEXT))
    assert failed.done()
    with pytest.raises(IndexError):
        failed.result()
    assert torch.equal(full_logprobs(following.result()), expected)


def test_draws_travel_with_the_step(driver: Driver, cpu: Driver) -> None:
    """In steps of every kind, also where a graph has been filled up: `StagedSamplerOps` believes
    the device alone."""
    for turns in (
        [Turn(row, TEXT[row:]) for row in range(3)],
        [Turn(row, [LAST_SAMPLED]) for row in range(3)],
        [Turn(1, [LAST_SAMPLED])],
        [Turn(row, [LAST_SAMPLED]) for row in (2, 0)],
    ):
        assert drawn(driver, *turns) == drawn(cpu, *turns)


class Late:
    """A mask that is not there before a graph has been replayed."""

    def __init__(self, gpu: FakeGpu, words: IntArray) -> None:
        self._gpu = gpu
        self._words = words
        self._replays = gpu.num_replays
        self.num_asked = 0

    @property
    def words(self) -> IntArray:
        assert self._gpu.num_replays == self._replays + 1, "the layers have not been launched"
        self.num_asked += 1
        return self._words

    @property
    def faults(self) -> dict[int, str]:
        assert self._gpu.num_replays == self._replays + 1, "the layers have not been launched"
        return {}


def test_the_layers_are_launched_before_a_mask_is_there(gpu: FakeGpu) -> None:
    """Of prompts and of decode steps. The token is the one that the mask allows."""
    driver = gpu_driver("1,2", cuda_graph_prompt=32)
    for turns in (
        [Turn(0, TEXT[:7]), Turn(1, TEXT[:9])],
        [Turn(0, [LAST_SAMPLED]), Turn(1, [LAST_SAMPLED])],
    ):
        plan = driver.plan(*turns)
        late = Late(gpu, ints([[0, 1 << 5]]))
        step = driver.runner.launch(replace(plan, logits=(GrammarMask(ints([1]), late),)))
        assert late.num_asked == 1
        assert step.result().tokens[1] == 32 + 5
    driver.runner.close()


# Graphs


def test_graphs_are_captured_from_the_largest_and_the_smallest_that_fits_is_replayed(
    gpu: FakeGpu,
) -> None:
    driver = gpu_driver("1,4")
    assert gpu.sizes == [4, 1]
    rows = range(5)
    driver.run(*(Turn(row, TEXT[:3]) for row in rows))
    for num, replays in ((1, 1), (2, 2), (4, 3), (5, 3)):
        driver.run(*(Turn(row, [LAST_SAMPLED]) for row in rows[:num]))
        assert gpu.num_replays == replays
    driver.runner.close()


def test_padding_touches_nothing_but_the_row_of_its_own(driver: Driver) -> None:
    driver.run(*(Turn(row, TEXT[:5]) for row in range(4)))
    rows, pool = driver.steps._rows, driver.steps._attention._pool  # type: ignore[attr-defined]
    before = [
        rows.slots.clone(),
        rows.last_tokens.clone(),
        *(tensor.clone() for tensor in pool.tensors),
    ]
    driver.run(*(Turn(row, [LAST_SAMPLED]) for row in (0, 2, 3)))
    new = [driver.slots[row][-1] for row in (0, 2, 3)]
    table = before[0].clone()
    table[[0, 2, 3], 5] = torch.tensor(new, dtype=torch.int32)
    assert torch.equal(rows.slots[:-1], table[:-1])
    assert rows.last_tokens[[1, 4, 5, 6, 7]].equal(before[1][[1, 4, 5, 6, 7]])
    kept = [slot for slot in range(KV_TOKENS) if slot not in new]
    assert all(
        torch.equal(now[kept], then[kept])
        for now, then in zip(pool.tensors, before[2:], strict=True)
    )


def test_steps_that_are_no_plain_decode_are_no_graphs(driver: Driver, gpu: FakeGpu) -> None:
    driver.run(Turn(0, TEXT))
    driver.run(Turn(0, [LAST_SAMPLED]), Turn(1, TEXT))
    assert gpu.num_replays == 0


def test_short_prompts_and_mixed_steps_are_graphs_by_their_tokens(
    gpu: FakeGpu, cpu: Driver
) -> None:
    """Chunks that sample nothing, single tokens among longer ones, and steps that are too long."""
    driver = gpu_driver("2", cuda_graph_prompt=24)
    assert gpu.sizes == [24, 2]

    def story(each: Driver) -> list[torch.Tensor]:
        first = each.run(Turn(0, TEXT[:7], samples=False), Turn(1, TEXT[:9]), Turn(2, [5]))
        each.launch(Turn(3, TEXT[:4], samples=False)).result()
        mixed = each.run(
            Turn(1, [LAST_SAMPLED]), Turn(0, TEXT[7:]), Turn(3, [LAST_SAMPLED], samples=False)
        )
        each.share(0, 4, 12)
        shared = each.run(Turn(4, TEXT[12:17]), Turn(2, [LAST_SAMPLED]))
        return [
            first,
            mixed,
            shared,
            each.run(Turn(5, [*TEXT, *TEXT])),
            each.run(Turn(0, [LAST_SAMPLED])),
        ]

    for actual, expected in zip(story(driver), story(cpu), strict=True):
        assert torch.allclose(actual, expected, atol=1e-4)
    assert gpu.num_replays == 5, "all but the long prompt"
    driver.runner.close()


def test_a_row_that_changes_under_a_decode_step_changes_before_the_graph(
    driver: Driver, cpu: Driver
) -> None:
    for each in (driver, cpu):
        each.run(Turn(0, TEXT), Turn(1, TEXT))
        each.slots[1] = [*each.slots[0][:8], *each.slots[1][8:]]
        each.writes.append((1, 0, each.slots[0][:8]))
    actual, expected = (
        each.run(Turn(1, [LAST_SAMPLED]), Turn(0, [LAST_SAMPLED])) for each in (driver, cpu)
    )
    assert torch.allclose(actual, expected, atol=1e-4)
    assert driver.steps._rows.slots[1, :8].tolist() == driver.slots[0][:8]


def test_without_graphs_nothing_is_captured_and_the_result_is_the_same(
    gpu: FakeGpu, cpu: Driver
) -> None:
    driver = gpu_driver("", cuda_graph=False)
    for each in (driver, cpu):
        each.run(Turn(0, TEXT), Turn(1, TEXT[:4]))
    actual, expected = (
        each.run(Turn(0, [LAST_SAMPLED]), Turn(1, [LAST_SAMPLED])) for each in (driver, cpu)
    )
    assert torch.allclose(actual, expected, atol=1e-4)
    assert not gpu.sizes
    driver.runner.close()


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda x: x[x > 0], "by a mask: the host waits"),
        (lambda x: x.nonzero(), "nonzero: the host waits"),
        (lambda x: x * float(x.sum()), "_local_scalar_dense: the host waits"),
        (lambda x: x if x.any() else -x, "the host waits"),
        (lambda x: x.unique(), "_unique2: the host waits"),
        (lambda x: x + torch.tensor([1.0, 2.0, 3.0]), "a tensor of the host"),
        (lambda x: x + torch.from_numpy(np.ones(3, np.float32)), "a tensor of the host"),
        (lambda x: torch.repeat_interleave(x, x.long()), "a size that only the device knows"),
    ],
)
def test_what_a_stream_that_is_captured_refuses_is_refused(
    work: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    gpu = FakeGpu()
    x = torch.ones(3)
    gc.disable()
    try:
        with gpu.stream(), pytest.raises(AssertionError, match=message):
            gpu.capture(lambda: (work(x),))
    finally:
        gc.enable()


# Between steps


def test_what_is_done_between_steps_is_through_before_the_next(
    driver: Driver, gpu: FakeGpu
) -> None:
    before = gpu.num_synchronized
    reply = driver.runner.control(GetWeight("model.norm.weight", 4)).result()
    assert reply.ok
    assert gpu.num_synchronized == before + 1


# The whole engine


def with_graphs(folder: Path, graphs: bool, **settings: Any) -> EngineConfig:
    """Settings of a small engine on the fake GPU, with graphs or without."""
    asked = EngineConfig(
        model=str(folder),
        load_format="dummy",
        cuda_graph=graphs,
        cuda_graph_sizes="1,2,4" if graphs else "",
        cuda_graph_prompt=32,
        max_running_requests=6,
        chunked_prefill_size=24,
        dtype="float32",
        kv_tokens=400,
        **settings,
    )
    machine = Machine(1, 8 * GB, 8 * GB, (GpuCard("fake", 8 * GB, 8 * GB),))
    return resolve(asked, ModelConfig.from_folder(folder), machine).config


@pytest.mark.parametrize("graphs", [True, False])
def test_outputs_do_not_depend_on_overlap(gpu: FakeGpu, tmp_path: Path, graphs: bool) -> None:
    """Greedy and drawn, prompts in chunks, beside each other and behind cached prefixes."""
    folder = write_tiny_model(tmp_path)
    outputs = []
    for overlap in (False, True):
        config = with_graphs(folder, graphs, overlap=overlap)
        assert config.device == "cuda"
        assert config.page_size == 1
        engine = build_engine(config, folder).engine
        replays = gpu.num_replays
        outputs.append(generate(engine, gpu))
        assert (gpu.num_replays > replays + 10) == graphs
    plain, overlapped = outputs
    assert plain.tokens == overlapped.tokens
    assert len({len(tokens) for tokens in plain.tokens.values()}) > 1
    assert plain.most_in_flight == 0
    assert overlapped.most_in_flight > 0


@pytest.mark.parametrize("graphs", [True, False])
def test_outputs_do_not_depend_on_drafts_that_are_compared_on_the_device(
    gpu: FakeGpu, tmp_path: Path, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are planned, and launched, before it is known what counts of the step before."""
    folder = write_tiny_model(tmp_path)
    monkeypatch.setattr(speculator, "least_chance", lambda *_: 0.01)
    monkeypatch.setattr(speculator, "steps_of_rest", lambda *_: 0)
    outputs = []
    for sources in ("off", "tree,ngram"):
        config = with_graphs(folder, graphs, speculative=sources, max_draft=4)
        assert config.overlap
        engine = build_engine(config, folder).engine
        # What was said the first time is in the prefix cache the second time.
        outputs.append([generate(engine, gpu, first) for first in (0, 100)])
    plain, drafted = outputs
    assert [one.tokens for one in plain] == [one.tokens for one in drafted]
    assert drafted[1].most_in_flight > 0
    stats = engine.services.stats()  # type: ignore[union-attr]
    assert stats.total_accepted_tree + stats.total_accepted_ngram > 50


class Generated(NamedTuple):
    tokens: dict[int, list[int]]
    most_in_flight: int  # copies that were still to come when a call of `step` returned


def generate(engine: Engine | RecordedEngine, gpu: FakeGpu, first: int = 0) -> Generated:
    """Ten requests, numbered from `first` on, some of which begin alike; a third of them drawn."""
    rng = np.random.default_rng(1)
    common = rng.integers(0, 256, 40)
    tokens: dict[int, list[int]] = {}
    for number in range(10):
        prompt = np.concatenate(
            (common[: 8 * (number % 5)], rng.integers(0, 256, int(rng.integers(1, 50))))
        )
        how = (
            {"temperature": 1.0, "top_p": 0.9, "seed": number}
            if number % 3 == 0
            else {"temperature": 0.0}
        )
        sampling = SamplingParams(max_new_tokens=int(rng.integers(1, 30)), ignore_eos=True, **how)  # type: ignore[arg-type]
        request = GenerateRequest(
            id=first + number,
            rid=f"r{number}",
            input_ids=prompt.astype(np.int32).tobytes(),
            sampling=sampling,
        )
        assert engine.submit(request) is None
    most = 0
    while engine.has_work:
        for reply in engine.step():
            if not isinstance(reply, StepOutput):
                continue
            assert all(finish.reason == "length" for finish in reply.finished)
            ids = np.frombuffer(reply.ids, np.int64).tolist()
            new = np.frombuffer(reply.tokens, np.int32).tolist()
            for number, token in zip(ids, new, strict=True):
                tokens.setdefault(number - first, []).append(token)
        most = max(most, gpu.num_copies - gpu.num_through)
    return Generated(tokens, most)
