"""The kernels that choose tokens against the torch twin, `weft/ops/sampling.py`, for every
instruction set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest
import torch

from tests.executor.driver import logprobs_of, sampler_plan
from tests.ops.conftest import SETS
from tests.ops.draws import FILTERS, Columns, columns
from weft.executor.outputs.sampler import sample
from weft.ops.cpp.library import Library
from weft.ops.cpp.sampling import CppSamplerOps, argmax
from weft.ops.noise import gumbel, row_keys
from weft.ops.sampling import SampledTokens, TorchSamplerOps
from weft.plan.logits import LogitBias, Penalties
from weft.plan.outputs import SampledLogprobsRequest

pytestmark = pytest.mark.pairs

INF = float("inf")
TWIN = TorchSamplerOps()
# One lane, odd sizes around vectors, blocks (256) and pieces (4,096), and several pieces.
SIZES = [1, 2, 7, 31, 33, 255, 257, 1_000, 4_095, 4_097, 9_001]


def logits(rows: int, vocab: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


@cache
def drawn_by_twin(vocab: int, spread: float) -> tuple[torch.Tensor, Columns, SampledTokens]:
    """Each filter on rows without and with ties, and with forbidden tokens."""
    draws = columns(FILTERS * 3, first_seed=vocab)
    x = logits(len(draws.seeds), vocab, spread=spread)
    x[:16] = x[:16].round()
    x[-16:, ::3] = -INF
    x[-16:, vocab // 2] = 1.0
    return x, draws, TWIN.tokens(x, draws)


def assert_same(
    x: torch.Tensor, draws: Columns, actual: SampledTokens, expected: SampledTokens
) -> None:
    """Tokens may differ where their scores do not, within the error of a logarithm in float32."""
    assert torch.equal(actual.max_logits, expected.max_logits)
    differ = np.flatnonzero((actual.tokens != expected.tokens).numpy())
    assert len(differ) < 5
    for row in differ:
        keys = torch.from_numpy(row_keys(draws.seeds[[row]], draws.positions[[row]]))
        scores = (x[row] - x[row].max()).double() / draws.temperature[row] + gumbel(
            keys, x.shape[1]
        )[0].double()
        assert abs(float(scores[actual.tokens[row]] - scores[expected.tokens[row]])) < 1e-4


@pytest.fixture
def sampler(kernels: Library) -> CppSamplerOps:
    return CppSamplerOps(kernels)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("vocab", SIZES)
def test_argmax_is_the_first_of_the_largest(kernels, vocab):
    x = logits(5, vocab)
    x[1] = x[1].round()
    x[2] = -INF
    x[3] = 4.0
    x[4, -1] = INF
    tokens, max_logits = argmax(kernels, x)
    expected = x.max(dim=-1)
    assert torch.equal(max_logits, expected.values)
    assert torch.equal(tokens, expected.indices)


def test_argmax_reads_rows_with_gaps(kernels):
    wide = torch.full((3, 100), 50.0)
    wide[:, :37] = logits(3, 37)
    assert torch.equal(argmax(kernels, wide[:, :37]).tokens, wide[:, :37].argmax(dim=-1))


@pytest.mark.parametrize("place", [0, 100, 4_096, 9_000])
def test_a_nan_is_the_peak_of_its_row(kernels, place):
    x = logits(3, 9_001)
    x[1, place] = float("nan")
    x[1, 50] = INF
    tokens, max_logits = argmax(kernels, x)
    assert max_logits.isnan().tolist() == [False, True, False]
    assert int(tokens[1]) == place


@pytest.mark.parametrize("vocab", SIZES)
def test_a_mask_forbids_tokens_of_its_row(sampler, vocab):
    """Masks with a word too few and with one too many; words of nothing but ones or zeros are
    frequent."""
    generator = torch.Generator().manual_seed(vocab)
    for num_words in {max(1, vocab // 32), -(-vocab // 32), -(-vocab // 32) + 1}:
        x = logits(5, vocab)
        masks = torch.randint(
            -(2**31), 2**31 - 1, (3, num_words), generator=generator, dtype=torch.int32
        )
        masks[1, ::2], masks[2, ::3] = -1, 0
        rows = torch.tensor([4, 0, 2])
        expected = x.clone()
        TWIN.mask(expected, masks, rows)
        sampler.mask(x, masks, rows)
        assert torch.equal(x, expected)
        assert torch.equal(x[[1, 3]], logits(5, vocab)[[1, 3]])


def penalties(
    num_rows: int, vocab: int, length: int, seed: int = 0
) -> tuple[Penalties, torch.Tensor]:
    """Of every second row, in falling order, about `length` tokens of history; and the last tokens
    of all rows. Among the penalties are those that are off."""
    generator = np.random.default_rng(seed)
    index = np.arange(num_rows - 1, -1, -2, dtype=np.int32)
    num = len(index)
    lens = generator.integers(0, 2 * length + 1, num)
    offsets = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    seen = Penalties(
        index=index,
        frequency=generator.choice([0.0, 0.3, -1.7, 2.0], num).astype(np.float32),
        presence=generator.choice([0.0, 0.7, -0.4], num).astype(np.float32),
        repetition=generator.choice([1.0, 1.1, 0.7, 10.0], num).astype(np.float32),
        history=(generator.random(int(offsets[-1])) ** 2 * vocab).astype(np.int32),
        offsets=offsets,
        output_starts=(offsets[:-1] + generator.random(num) * (lens + 1)).astype(np.int32),
        lacks_last=generator.random(num) < 0.5,
    )
    return seen, torch.from_numpy(generator.integers(0, vocab, num_rows))


@pytest.mark.parametrize("vocab", SIZES)
def test_penalties_are_those_of_the_twin_bit_for_bit(sampler, threads, vocab):
    for num_threads, length in ((1, 3), (2, 40), (3, 700)):
        threads(num_threads)
        seen, last = penalties(13, vocab, length, seed=vocab + length)
        wide = torch.full((13, vocab + 3), 7.0)
        wide[:, :vocab] = logits(13, vocab)
        wide[2, 0] = wide[4, vocab // 2] = -INF
        wide[6, ::2] = -0.0
        expected = wide.clone()
        TWIN.penalise(expected[:, :vocab], seen, last)
        sampler.penalise(wide[:, :vocab], seen, last)
        assert torch.equal(wide.view(torch.int32), expected.view(torch.int32))


def test_penalties_of_a_row_that_is_not_finite_harm_no_other(sampler):
    seen, last = penalties(9, 300, 50)
    x = logits(9, 300)
    good = logits(9, 300)
    x[4] = float("nan")
    sampler.penalise(x, seen, last)
    sampler.penalise(good, seen, last)
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(x[others], good[others])
    assert x[4].isnan().all()


@pytest.mark.parametrize("vocab", SIZES)
def test_every_filter_draws_what_the_twin_draws(sampler, vocab):
    for spread in (0.1, 3.0):
        x, draws, expected = drawn_by_twin(vocab, spread)
        assert_same(x, draws, sampler.tokens(x, draws), expected)


def test_thousands_of_draws_are_those_of_the_twin(library):
    sampler = CppSamplerOps(library(""))
    for filters in ((1.0, 0, 1.0, 0.0), (0.8, 0, 0.95, 0.0), (1.2, 50, 0.9, 0.02)):
        draws = columns([filters] * 1_500)
        x = logits(1_500, 300)
        assert_same(x, draws, sampler.tokens(x, draws), TWIN.tokens(x, draws))


def test_tokens_of_equal_logit_are_kept_together(sampler):
    x = torch.tensor([[3.0, 1.0, 3.0, 3.0, 0.0]]).repeat(300, 1)
    assert set(sampler.tokens(x, columns([(1.0, 2, 0.5, 0.0)] * 300)).tokens.tolist()) == {0, 2, 3}
    x[:] = -7.0
    assert set(sampler.tokens(x, columns([(1.0, 1, 0.1, 1.0)] * 300)).tokens.tolist()) == {
        0,
        1,
        2,
        3,
        4,
    }


@pytest.mark.parametrize(("top_k", "top_p"), [(500, 1.0), (0, 0.5), (900, 0.5)])
@pytest.mark.parametrize("below", [1e-5, 2.0, 300.0])
def test_the_threshold_is_exact_where_logits_hardly_differ(sampler, below, top_k, top_p):
    """One large logit and a thousand others, each one bit of a float from the next: all in one bin
    of the histogram."""
    first = np.float32(-below).view(np.int32)
    x = torch.from_numpy((first + np.arange(1_001)).astype(np.int32).view(np.float32).copy())
    x[0] = 0.0
    x = x[torch.randperm(1_001, generator=torch.Generator().manual_seed(1))].repeat(200, 1)
    draws = columns([(1.0, top_k, top_p, 0.0)] * 200)
    assert torch.equal(sampler.tokens(x, draws).tokens, TWIN.tokens(x, draws).tokens)


def test_draws_follow_the_distribution(library):
    """Chi-square with 7 degrees of freedom, over the positions of one seed."""
    x = logits(1, 8, spread=1.0)
    num = 20_000
    draws = columns([(0.9, 0, 1.0, 0.0)] * num)
    draws.seeds[:], draws.positions[:] = 42, np.arange(num)
    counts = np.bincount(
        CppSamplerOps(library("")).tokens(x.repeat(num, 1), draws).tokens, minlength=8
    )
    expected = (x[0] / 0.9).double().softmax(-1).numpy() * num
    assert ((counts - expected) ** 2 / expected).sum() < 24.3  # once in a thousand


def test_a_draw_depends_on_its_row_alone(sampler, threads):
    """Not on other rows, not on the number of threads, not on whether one or all of them work on
    the row."""
    draws = columns(FILTERS)
    x = logits(len(FILTERS), 9_001, spread=1.0)
    together = sampler.tokens(x, draws).tokens.tolist()
    for num_threads in (1, 3):
        threads(num_threads)
        assert sampler.tokens(x, draws).tokens.tolist() == together
        alone = [int(sampler.tokens(x[i : i + 1], draws[i : i + 1]).tokens) for i in range(len(x))]
        assert alone == together


def test_every_instruction_set_draws_the_same(library):
    draws = columns([one for one in FILTERS if one[0] < 1e30] * 20)
    x = logits(len(draws.seeds), 2_000, spread=1.0)
    drawn = []
    for name in SETS:
        try:
            drawn.append(CppSamplerOps(library(name)).tokens(x, draws).tokens.tolist())
        except pytest.skip.Exception:
            continue
    assert len(drawn) > 1
    assert all(one == drawn[0] for one in drawn)


def test_the_sampler_gives_the_same_by_kernels_and_by_torch(sampler):
    """With bias, penalties and log probabilities around the choice."""
    x = logits(4, 500)
    num = np.arange(4, dtype=np.int32)
    results = []
    for one in (sampler, TWIN):
        bias = LogitBias(num[:2], num[:2] + 100, np.array([50.0, -INF], np.float32))
        wanted = SampledLogprobsRequest(num[1:], num[1:])
        draws = columns(FILTERS[:4])
        seen, last = penalties(4, 500, 100)
        draws_of = dict(vars(draws))
        plan = sampler_plan(draws_of.pop("positions"), bias, seen, wanted, **draws_of)
        results.append(sample(one, x.clone(), plan, last).result())
    ours, twins = results
    assert ours.tokens.tolist() == twins.tokens.tolist()
    assert ours.invalid is twins.invalid is None
    assert np.array_equal(logprobs_of(ours).top_ids, logprobs_of(twins).top_ids)
    assert np.allclose(logprobs_of(ours).top_logprobs, logprobs_of(twins).top_logprobs, atol=1e-5)
    assert np.allclose(logprobs_of(ours).logprob, logprobs_of(twins).logprob, atol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), INF, -INF])
def test_a_row_that_is_not_finite_harms_no_other(sampler, bad):
    draws = columns(FILTERS)
    x = logits(len(FILTERS), 300)
    good = sampler.tokens(x, draws).tokens
    x[5] = bad
    x[7, 200:] = bad
    tokens, max_logits = sampler.tokens(x, draws)
    others = [i for i in range(len(FILTERS)) if i not in (5, 7)]
    assert torch.equal(tokens[others], good[others])
    assert max_logits[others].isfinite().all()
    assert not max_logits[5].isfinite()
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < 300


@pytest.mark.parametrize("vocab", SIZES)
def test_logprobs_are_those_of_a_log_softmax_in_double(sampler, vocab):
    x = logits(6, vocab, spread=4.0)
    x[3] = x[3].round()
    x[4, ::2] = -INF
    x[4, -1] = 0.0
    chosen = SampledTokens(torch.arange(6) % vocab, x.amax(-1))
    rows = torch.tensor([5, 0, 3, 4])
    wide = x[rows].double().log_softmax(-1)
    for num_top in {0, min(5, vocab), min(20, vocab), vocab}:
        logprob, top_ids, top_logprobs = sampler.logprobs(x, chosen, rows, num_top)
        order = wide.sort(dim=-1, descending=True, stable=True)
        assert torch.allclose(
            logprob.double(), wide[torch.arange(4), chosen.tokens[rows]], atol=1e-6, rtol=1e-6
        )
        assert torch.equal(top_ids.long(), order.indices[:, :num_top])
        assert torch.allclose(
            top_logprobs.double(), order.values[:, :num_top], atol=1e-6, rtol=1e-6
        )


def test_logprobs_of_a_row_that_is_not_finite_harm_no_other(sampler):
    x = logits(3, 300)
    x[0, 5], x[2] = float("nan"), -INF
    chosen = SampledTokens(torch.tensor([0, 1, 2]), x.amax(-1))
    logprob, top_ids, top_logprobs = sampler.logprobs(x, chosen, torch.tensor([0, 1, 2]), 4)
    assert torch.equal(top_ids[1].long(), x[1].topk(4).indices)
    assert torch.allclose(top_logprobs[1], x[1].log_softmax(-1).topk(4).values, atol=1e-6)
    assert logprob.isnan().tolist() == [True, False, True]
    assert 0 <= int(top_ids.min()) <= int(top_ids.max()) < 300
