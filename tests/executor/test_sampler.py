from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.executor.driver import ReadyBitmask, ints, logprobs_of, sampler_plan
from weft.executor.outputs.sampler import SamplerOutput
from weft.executor.outputs.sampler import sample as sample_by
from weft.ops.noise import gumbel, row_keys
from weft.ops.sampling import TorchSamplerOps, threshold
from weft.plan.logits import (
    ANY,
    NOTHING_LEFT,
    AllowedTokens,
    FixedTokens,
    GrammarMask,
    LogitBias,
    LogitOp,
    Penalties,
)
from weft.plan.outputs import SampledLogprobsRequest
from weft.plan.step import Plan

NONE = torch.zeros(0, dtype=torch.int64)


def floats(values) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def logits(rows: int, vocab: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def sample(x: torch.Tensor, plan: Plan, last: torch.Tensor) -> SamplerOutput:
    return sample_by(TorchSamplerOps(), x, plan, last)


def tokens(x: torch.Tensor, *ops: LogitOp, positions=None, last=NONE, **changes) -> list[int]:
    positions = range(len(x)) if positions is None else positions
    return (
        sample(x.clone(), sampler_plan(positions, *ops, **changes), last).result().tokens.tolist()
    )


def kept_twin(
    x: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    """Which tokens may be drawn, [V] bool: filter after filter, each on the renormalised rest."""
    x = x.astype(np.float64) / temperature
    kept = np.ones(len(x), dtype=bool)
    if 0 < top_k < len(x):
        kept &= x >= np.sort(x)[-top_k]
    probabilities = np.exp(x - x.max()) * kept
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities)
    before = np.cumsum(probabilities[order]) - probabilities[order]
    inside = np.zeros_like(kept)
    inside[order[before < top_p]] = True
    kept &= inside
    return kept & (probabilities >= min_p * probabilities.max())


FILTERS = [
    # temperature, top_k, top_p, min_p
    (1.0, 0, 1.0, 0.0),
    (0.3, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 7, 1.0, 0.0),
    (1.7, 5_000, 1.0, 0.0),
    (1.0, 0, 0.8, 0.0),
    (3.0, 0, 0.97, 0.0),
    (1.0, 0, 0.01, 0.0),
    (0.8, 20, 0.7, 0.0),
    (1.0, 0, 1.0, 0.1),
    (1.5, 30, 0.9, 0.05),
    (0.0, 3, 0.5, 0.5),
    (1e-7, 0, 1.0, 0.0),
]


@pytest.mark.parametrize("vocab", [11, 300, 2_000])
def test_threshold_keeps_what_the_filters_keep_one_after_the_other(vocab):
    filters = [
        (t, k, p, m)
        for t in (0.5, 1.0, 3.0)
        for k in (0, 1, 6, 400)
        for p in (0.01, 0.6, 1)
        for m in (0, 0.2, 1)
    ]
    x = logits(len(filters), vocab)
    temperature, top_k, top_p, min_p = (np.array(column) for column in zip(*filters, strict=True))
    scaled = (x - x.amax(-1, keepdim=True)) / torch.from_numpy(floats(temperature))[:, None]
    cut = threshold(scaled, ints(top_k), floats(top_p), floats(min_p))
    assert cut is not None
    for row, limits in enumerate(filters):
        assert np.array_equal(scaled[row] >= cut[row], kept_twin(x[row].numpy(), *limits)), limits


def test_threshold_of_filters_that_are_off_is_none():
    assert threshold(logits(2, 50), ints([0, 50]), floats([1, 1]), floats([0, 0])) is None


@pytest.mark.parametrize("vocab", [11, 2_000])
@pytest.mark.parametrize("together", [True, False])
def test_every_filter_keeps_what_its_twin_keeps(vocab, together):
    """The draw is then the largest of logit + noise among those, whether the rows are in one batch
    or alone."""
    count = len(FILTERS)
    x = logits(count, vocab)
    seeds = np.arange(count) * 1_001 - 5
    positions = np.arange(count) * 3 + 1
    columns = dict(
        zip(
            ("temperature", "top_k", "top_p", "min_p"),
            map(np.array, zip(*FILTERS, strict=True)),
            strict=True,
        )
    )
    columns = {name: ints(v) if name == "top_k" else floats(v) for name, v in columns.items()}
    if together:
        actual = tokens(x, positions=positions, seeds=seeds, **columns)
    else:
        slices = [slice(i, i + 1) for i in range(count)]
        actual = [
            tokens(
                x[s],
                positions=positions[s],
                seeds=seeds[s],
                **{name: v[s] for name, v in columns.items()},
            )[0]
            for s in slices
        ]
    noise = (
        gumbel(torch.from_numpy(row_keys(seeds, positions.astype(np.int32))), vocab)
        .double()
        .numpy()
    )
    for row, (temperature, *limits) in enumerate(FILTERS):
        if temperature == 0:
            assert actual[row] == int(x[row].argmax())
            continue
        kept = kept_twin(x[row].numpy(), temperature, *limits)
        scores = np.where(kept, x[row].double().numpy() / temperature + noise[row], -np.inf)
        assert actual[row] == int(scores.argmax())


def test_tokens_of_equal_logit_are_kept_together():
    x = torch.tensor([[3.0, 1.0, 3.0, 3.0, 0.0]]).repeat(400, 1)
    drawn = tokens(
        x, temperature=floats([1.0] * 400), top_k=ints([2] * 400), top_p=floats([0.5] * 400)
    )
    assert set(drawn) == {0, 2, 3}


@pytest.mark.parametrize("vocab", [8, 300])
def test_draws_follow_the_distribution(vocab):
    """Chi-square over many positions of one seed."""
    draws = 20_000
    temperature = 0.9
    x = logits(1, vocab, spread=1.0)
    drawn = tokens(
        x.repeat(draws, 1),
        temperature=floats([temperature] * draws),
        seeds=np.full(draws, 42, dtype=np.int64),
    )
    expected = (x[0] / temperature).double().softmax(-1).numpy() * draws
    counts = np.bincount(drawn, minlength=vocab)
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - (vocab - 1)) < 4 * np.sqrt(2 * (vocab - 1))


def test_a_draw_depends_on_seed_and_position_alone():
    x = logits(1, 500, spread=0.1).repeat(3, 1)
    hot = floats([1.0] * 3)
    first = tokens(x, positions=[4, 5, 6], temperature=hot, seeds=np.array([1, 1, 2]))
    again = tokens(x, positions=[6, 5, 4], temperature=hot, seeds=np.array([2, 1, 1]))
    assert first == again[::-1]
    assert len(set(first)) == 3


def test_more_candidates_are_sorted_where_the_distribution_is_flat():
    """Half the mass of 3,000 nearly equal tokens is far more than is sorted at first."""
    x = logits(1, 3_000, spread=0.01).repeat(300, 1)
    drawn = tokens(x, temperature=floats([1.0] * 300), top_p=floats([0.5] * 300))
    kept = kept_twin(x[0].numpy(), 1.0, 0, 0.5, 0.0)
    assert 1_400 < kept.sum() < 1_600
    assert kept[drawn].all()
    assert len(set(drawn)) > 200


def test_penalties():
    x = torch.tensor(
        [[1.0, -1.0, 2.0, 0.5, 4.0], [1.0, 1.0, 1.0, 1.0, 1.0], [1.0, -1.0, 2.0, 0.5, 4.0]]
    )
    penalties = Penalties(
        index=ints([2, 0]),
        frequency=floats([0.5, 0.0]),
        presence=floats([0.25, 0.0]),
        repetition=floats([1.0, 2.0]),
        history=ints(
            [0, 2, 4, 4, 1, 0, 1]
        ),  # request 2: prompt 0 2, output 4 4 1; request 0: prompt 0, output 1
        offsets=ints([0, 5, 7]),
        output_starts=ints([2, 6]),
        lacks_last=np.array([False, True]),
    )
    everything = SampledLogprobsRequest(ints([0, 1, 2]), ints([5, 5, 5]))
    last = torch.tensor([3, 0, 0])  # only request 0 lacks it
    result = sample(x, sampler_plan(range(3), penalties, everything), last).result()
    expected = torch.tensor([[0.5, -2.0, 2.0, 0.25, 4.0], [1.0] * 5, [1.0, -1.75, 2.0, 0.5, 2.75]])
    assert torch.allclose(x, expected)
    assert np.allclose(
        np.sort(expected.log_softmax(-1).numpy())[:, ::-1],
        logprobs_of(result).top_logprobs,
        atol=1e-6,
    )


def test_bias_is_added_and_can_forbid():
    x = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    bias = LogitBias(ints([0, 2, 2]), ints([0, 2, 0]), floats([-np.inf, 1.5, -1.0]))
    assert tokens(x, bias) == [1, 0, 2]


def test_logprobs_are_taken_before_temperature():
    x = logits(4, 50)
    wanted = SampledLogprobsRequest(ints([3, 1]), ints([0, 3]))
    hot = floats([5.0] * 4)
    result = sample(x.clone(), sampler_plan(range(4), wanted, temperature=hot), NONE).result()
    expected = x.log_softmax(-1)
    assert np.allclose(
        logprobs_of(result).logprob,
        [expected[3, result.tokens[3]], expected[1, result.tokens[1]]],
        atol=1e-6,
    )
    assert logprobs_of(result).top_ids[1].tolist() == x[1].topk(3).indices.tolist()
    assert np.allclose(logprobs_of(result).top_logprobs[1], expected[1].topk(3).values, atol=1e-6)


def test_logprobs_without_top_tokens():
    result = sample(
        logits(2, 9), sampler_plan(range(2), SampledLogprobsRequest(ints([1]), ints([0]))), NONE
    ).result()
    assert logprobs_of(result).top_ids.shape == logprobs_of(result).top_logprobs.shape == (1, 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_invalid_and_harms_no_other(temperature, bad):
    x = logits(4, 200)
    changes = {
        "temperature": floats([temperature] * 4),
        "top_p": floats([0.9, 1, 0.9, 1]),
        "top_k": ints([0, 5, 5, 0]),
    }
    good = tokens(x, **changes)
    broken = x.clone()
    broken[1, 17] = bad
    broken[2] = -torch.inf
    result = sample(broken, sampler_plan(range(4), **changes), NONE).result()
    assert result.invalid is not None
    assert result.invalid.tolist() == [False, True, True, False]
    assert result.tokens.tolist() == [good[0], 0, 0, good[3]]


def test_a_row_whose_tokens_are_all_forbidden_is_told_from_one_that_is_not_finite() -> None:
    x = logits(3, 32)
    x[1, 17] = torch.nan
    # Only token 3 is allowed, and a bias forbids it in the first two rows.
    allowed = AllowedTokens(ints([0, 1, 2]), np.array([[1 << 3]] * 3, dtype=np.int32))
    bias = LogitBias(ints([0, 1]), ints([3, 3]), floats([-np.inf, np.nan]))
    result = sample(x, sampler_plan(range(3), bias, allowed), NONE).result()
    assert result.invalid is not None
    assert result.invalid.tolist() == [True, True, False]
    assert result.faults == ((0, NOTHING_LEFT),)
    assert result.tokens[2] == 3


def test_result_of_a_good_step_names_no_invalid_rows():
    assert sample(logits(2, 9), sampler_plan(range(2)), NONE).result().invalid is None


def test_large_vocabulary_is_drawn_from_in_blocks():
    """150,000 entries a row: more than one block, and a threshold that only some rows have."""
    x = logits(5, 150_000, spread=1.0)
    columns = {
        "temperature": floats([1, 0, 1, 1, 1]),
        "top_p": floats([1, 1, 0.9, 1, 1]),
        "top_k": ints([0, 0, 0, 40, 0]),
    }
    together = tokens(x, **columns, seeds=np.arange(5))
    alone = [
        tokens(
            x[i : i + 1],
            positions=[i],
            seeds=np.array([i]),
            **{name: v[i : i + 1] for name, v in columns.items()},
        )[0]
        for i in range(5)
    ]
    assert together == alone
    assert together[3] in x[3].topk(40).indices


def test_a_mask_is_obeyed_by_its_rows_and_log_probabilities_are_taken_behind_it() -> None:
    x = logits(4, 70)
    x[1, 3] = x[3, 3] = 90.0  # nobody would choose anything else
    words = np.zeros((2, 3), dtype=np.int32)
    words[0, 0], words[1, 2] = (
        np.uint32(1 << 31 | 1 << 5).view(np.int32),
        1 << 3,
    )  # tokens 5 and 31; 67
    mask = GrammarMask(ints([1, 3]), ReadyBitmask(words))
    asked = SampledLogprobsRequest(index=ints([1, 3]), num_top=ints([3, 1]))
    for temperature in (0.0, 1.0):
        how = sampler_plan(range(4), mask, asked, temperature=floats([temperature] * 4))
        result = sample(x.clone(), how, NONE).result()
        free = tokens(x, temperature=floats([temperature] * 4))
        assert result.tokens[[0, 2]].tolist() == [free[0], free[2]]
        assert result.tokens[1] in (5, 31)
        assert result.tokens[3] == 67
        assert result.invalid is None
        assert set(logprobs_of(result).top_ids[0, :2].tolist()) == {5, 31}
        assert np.exp(logprobs_of(result).top_logprobs[0]).sum() == pytest.approx(1.0)
        assert logprobs_of(result).logprob[1] == pytest.approx(0.0)


def test_a_request_whose_mask_could_not_be_filled_is_invalid_with_that_reason_and_no_other_is() -> (
    None
):
    words = np.array([[1 << 4], [-1]], dtype=np.int32)
    mask = GrammarMask(ints([0, 2]), ReadyBitmask(words, {1: "nothing may follow"}))
    result = sample(logits(4, 20), sampler_plan(range(4), mask), NONE).result()
    assert result.invalid is not None
    assert result.invalid.tolist() == [False, False, True, False]
    assert result.faults == ((2, "nothing may follow"),)
    assert result.tokens[0] == 4


def test_a_bias_may_hold_only_after_a_token_that_the_device_alone_knows():
    bias = LogitBias(
        ints([0, 1, 2, 0]),
        ints([3, 3, 3, 4]),
        floats([-np.inf, -np.inf, -np.inf, 1.0]),
        ints([7, 7, ANY, 8]),
    )
    x = torch.tensor([[0.0, 0, 0, 2, 1.5]]).repeat(3, 1)
    last = torch.tensor([7, 8, 9])
    assert tokens(x, bias, last=last) == [4, 3, 4]
    assert tokens(x, bias, last=torch.tensor([8, 7, 9])) == [4, 4, 4]


def test_a_fixed_token_outweighs_every_mask_and_has_all_of_the_probability():
    words = np.array([[1 << 2], [1 << 2]], dtype=np.int32)
    plan = sampler_plan(
        range(2),
        FixedTokens(ints([1]), ints([4])),
        AllowedTokens(ints([0, 1]), words),
        GrammarMask(ints([0, 1]), ReadyBitmask(words)),
        SampledLogprobsRequest(ints([0, 1]), ints([1, 1])),
    )
    done = sample(logits(2, 9), plan, NONE).result()
    assert done.tokens.tolist() == [2, 4]
    assert done.invalid is None
    assert logprobs_of(done).logprob.tolist() == [0.0, 0.0]


def test_both_masks_have_to_allow_a_token():
    few = AllowedTokens(ints([0]), ints([[0b0110]]))
    others = GrammarMask(ints([0]), ReadyBitmask(ints([[0b1100]])))
    assert tokens(torch.tensor([[9.0, 8, 1, 7]]), few, others) == [2]


def test_several_biases_of_a_step_add_up():
    x = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    first = LogitBias(ints([0, 1]), ints([1, 2]), floats([0.75, 1.5]))
    second = LogitBias(ints([1, 0]), ints([2, 1]), floats([1.0, 0.5]), ints([ANY, 7]))
    assert tokens(x, first, second, last=torch.tensor([7, 7])) == [1, 2]
    assert tokens(x, first, second, last=torch.tensor([8, 8])) == [0, 2]
