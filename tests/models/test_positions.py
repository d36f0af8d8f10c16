"""Tokens with three positions (M-RoPE) and with vectors for several layers (deepstack), against
transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.executor.driver import CONTEXT, Driver, Turn, asking, full_logprobs, ints, make_driver
from tests.models.many import VOCAB, Checkpoint, make_seeing
from weft.arrays import IntArray
from weft.config.model import ModelConfig
from weft.plan.inputs import InputVectors
from weft.plan.step import LAST_SAMPLED, Plan

TOLERANCE = 2e-4  # of log probabilities, float32
BEFORE = 5
ROWS = 4
COLUMNS = 6
BEHIND = 7
PICTURE = slice(BEFORE, BEFORE + ROWS * COLUMNS)
LENGTH = BEFORE + ROWS * COLUMNS + BEHIND
SHIFT = max(ROWS, COLUMNS) - ROWS * COLUMNS  # behind the picture, to the position in the sequence


class Case(NamedTuple):
    checkpoint: Checkpoint
    model: ModelConfig
    tokens: list[int]
    vectors: torch.Tensor  # [V, (1 + K) hidden]
    rotation: IntArray  # [3, LENGTH]


@pytest.fixture(scope="module", params=["qwen2.5-vl", "qwen3-vl", "qwen3.5-vl"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = make_seeing(request.param, folder)
    model = ModelConfig.from_folder(folder)
    random = np.random.default_rng(3)
    num = ROWS * COLUMNS
    generator = torch.Generator().manual_seed(4)
    width = (1 + model.decoder.deepstack) * model.hidden_size
    return Case(
        checkpoint,
        model,
        random.integers(0, VOCAB, LENGTH).tolist(),
        0.3 * torch.randn(num, width, generator=generator),
        rotation_of_picture(),
    )


def rotation_of_picture() -> IntArray:
    """Text, a picture, text."""
    row, column = np.divmod(np.arange(ROWS * COLUMNS), COLUMNS)
    picture = BEFORE + np.stack([np.zeros_like(row), row, column])
    before = np.tile(np.arange(BEFORE), (3, 1))
    behind = np.tile(np.arange(PICTURE.stop, LENGTH) + SHIFT, (3, 1))
    return np.concatenate((before, picture, behind), axis=1).astype(np.int32)


def expected(case: Case) -> torch.Tensor:
    """[LENGTH, VOCAB] log probabilities by transformers."""
    model = case.checkpoint.model.float()
    hidden = case.model.hidden_size
    tokens = torch.tensor([case.tokens])
    embedded = model.get_input_embeddings()(tokens).clone()
    embedded[0, PICTURE] = case.vectors[:, :hidden]
    more = {}
    if case.model.decoder.deepstack:
        seen = torch.zeros(1, LENGTH, dtype=torch.bool)
        seen[0, PICTURE] = True
        more["visual_pos_masks"] = seen
        more["deepstack_visual_embeds"] = list(case.vectors[:, hidden:].split(hidden, 1))
    positions = torch.from_numpy(case.rotation)[:, None].long()
    with torch.inference_mode():
        states = model.model.language_model(
            inputs_embeds=embedded, position_ids=positions, **more
        ).last_hidden_state
        return model.lm_head(states)[0].float().log_softmax(-1)


@pytest.fixture(params=["torch", "auto"])
def driver(request: pytest.FixtureRequest, case: Case) -> Iterator[Driver]:
    made = make_driver(case.model, case.checkpoint.folder, kernels=request.param)
    yield made
    made.runner.close()


def seen(case: Case, plan: Plan, first: int, row: int = 0) -> Plan:
    """The plan's tokens of a row, from the `first` of the prompt on, see the picture; other rows
    are text."""
    ends = np.cumsum(plan.lens)
    here = int(np.flatnonzero(plan.rows == row)[0])
    begin = int(ends[here] - plan.lens[here])
    rotation = np.empty((3, plan.num_tokens), np.int32)
    for request, end in enumerate(ends):
        num = int(plan.lens[request])
        rotation[:, end - num : end] = plan.starts[request] + np.arange(num)
    num = int(plan.lens[here])
    rotation[:, begin : begin + num] = case.rotation[:, first : first + num]
    places = [at for at in range(first, first + num) if PICTURE.start <= at < PICTURE.stop]
    if not places:
        return replace(plan, rotation=rotation)
    vectors = InputVectors(
        ints(begin + at - first for at in places),
        case.vectors[np.array(places) - PICTURE.start].numpy(),
    )
    return replace(plan, rotation=rotation, inputs=(vectors,))


def logprobs(driver: Driver, plan: Plan) -> torch.Tensor:
    return full_logprobs(driver.runner.launch(plan).result())


@pytest.mark.parametrize("chunk", [7, LENGTH])
def test_a_picture_is_read_as_transformers_reads_it(driver: Driver, case: Case, chunk: int) -> None:
    """Also in chunks that cut it, beside a request of text."""
    want = expected(case)
    for at in range(0, LENGTH, chunk):
        piece = case.tokens[at : at + chunk]
        plan = seen(case, driver.plan(Turn(1, [7, 8]), Turn(0, piece)), at)
        got = logprobs(driver, plan)[1]
        assert (got - want[at + len(piece) - 1]).abs().max() < TOLERANCE


def test_chunks_leave_the_bits_of_the_whole(driver: Driver, case: Case) -> None:
    """By our kernels; torch's products depend on the number of rows."""
    whole = logprobs(driver, seen(case, driver.plan(Turn(0, case.tokens)), 0))
    for at in range(0, LENGTH, 16):
        piece = case.tokens[at : at + 16]
        cut = logprobs(driver, seen(case, driver.plan(Turn(1, piece)), at, row=1))
    if driver.runner.kernels is None:
        assert (cut - whole).abs().max() < TOLERANCE
    else:
        assert torch.equal(cut, whole)


def test_text_with_three_equal_positions_has_the_bits_of_text(driver: Driver, case: Case) -> None:
    plain = driver.run(Turn(0, case.tokens))
    plan = driver.plan(Turn(1, case.tokens))
    rotation = np.tile(np.arange(LENGTH, dtype=np.int32), (3, 1))
    assert torch.equal(logprobs(driver, replace(plan, rotation=rotation)), plain)


def test_tokens_behind_a_picture_go_on_from_its_largest_position(
    driver: Driver, case: Case
) -> None:
    """Decoded one by one, which the kernels do in fused steps."""
    first = BEFORE + ROWS * COLUMNS + 1
    want = expected(case)
    plan = seen(case, driver.plan(Turn(0, case.tokens[:first])), 0)
    driver.runner.launch(asking(plan)).result()
    for at in range(first, LENGTH):
        plan = driver.plan(Turn(0, [case.tokens[at]]), Turn(1, [3]))
        plan = asking(seen(case, plan, at))
        assert not plan.inputs
        token = int(driver.runner.launch(plan).result().tokens[0])
        assert token == int(want[at].argmax())


def test_a_sampled_token_is_rotated_as_the_plan_says(driver: Driver, case: Case) -> None:
    prefill = asking(seen(case, driver.plan(Turn(0, case.tokens)), 0))
    first = driver.runner.launch(prefill)
    plan = driver.plan(Turn(0, [LAST_SAMPLED]))
    rotation = np.full((3, 1), LENGTH + SHIFT, np.int32)
    second = driver.runner.launch(asking(replace(plan, rotation=rotation)))
    again = [*case.tokens, int(first.result().tokens[0])]
    longer = case._replace(tokens=again, rotation=np.hstack((case.rotation, rotation)))
    plan = seen(longer, driver.plan(Turn(1, again)), 0, row=1)
    assert int(second.result().tokens[0]) == int(logprobs(driver, plan)[0].argmax())


def test_a_step_whose_rotation_lies_outside_of_the_context_is_refused(
    driver: Driver, case: Case
) -> None:
    for bad in (-1, CONTEXT):
        plan = asking(driver.plan(Turn(0, [5])))
        with pytest.raises(AssertionError):
            driver.runner.launch(replace(plan, rotation=np.full((3, 1), bad, np.int32))).result()
