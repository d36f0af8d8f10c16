"""The kernels that choose tokens, in Triton's interpreter, against `TorchSamplerOps`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.executor.driver import ReadyBitmask, logprobs_of, sampler_plan
from tests.ops.draws import FILTERS, columns
from tests.seeds import every_second
from weft.executor.outputs.sampler import sample
from weft.ops import noise, sampling
from weft.ops.sampling import TorchSamplerOps
from weft.ops.triton import cut
from weft.ops.triton import sampling as ours
from weft.ops.triton.sampling import TritonSamplerOps
from weft.plan.logits import GrammarMask, LogitOp, Penalties
from weft.plan.outputs import AuxRequest, SampledLogprobsRequest
from weft.plan.step import Plan

pytestmark = [  # what numpy says to rows that are not finite
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning"),
]

INF = float("inf")
TWIN = TorchSamplerOps()
OURS = TritonSamplerOps()
BLOCK = 256  # logits: as in service there are several blocks, the last one not full
SIZES = [1, 31, BLOCK + 1, 1_000]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ours, cut):
        monkeypatch.setattr(module, "VOCAB_BLOCK", BLOCK)


def logits(num: int, vocab_size: int) -> Tensor:
    return torch.randn(num, vocab_size, generator=torch.Generator().manual_seed(vocab_size)).mul_(3)


@pytest.mark.parametrize("vocab_size", every_second(SIZES))
def test_the_same_tokens_are_drawn_as_by_torch(vocab_size: int) -> None:
    wanted = columns(FILTERS)
    x = logits(len(FILTERS), vocab_size)
    before = x.clone()
    want = TWIN.tokens(x.clone(), wanted)
    got = OURS.tokens(x, wanted)
    assert got.tokens.tolist() == want.tokens.tolist()
    assert torch.equal(got.max_logits, want.max_logits)
    assert torch.equal(x, before)


@pytest.mark.parametrize("vocab_size", [31, 1_000])
def test_the_same_tokens_are_kept_as_by_sorting(vocab_size: int) -> None:
    warm = [each for each in FILTERS if each[0] > 0]
    wanted = columns(warm)
    x = logits(len(warm), vocab_size)
    x[:, ::3] = x[:, ::3].round()  # equal ones
    x[4], x[7, 5:] = 0.0, -INF  # so that no bound helps; so that k are not there
    max_logits = x.max(dim=-1).values
    scaled = (x - max_logits[:, None]) / torch.from_numpy(wanted.temperature)[:, None]
    want = sampling.threshold(scaled.clone(), wanted.top_k, wanted.top_p, wanted.min_p)
    assert want is not None
    got = torch.empty(len(warm))
    cut.threshold(x, max_logits, sampling.sampling_tensors(x.device, wanted), got)
    assert torch.equal(scaled >= got[:, None], scaled >= want[:, None])


def test_noise_is_that_of_the_twin() -> None:
    """With equal logits the noise alone chooses."""
    wanted = columns([(1.0, 0, 1.0, 0.0)] * 8)
    flat = torch.zeros(8, 3_000)
    keys = torch.from_numpy(noise.row_keys(wanted.seeds, wanted.positions))
    want = noise.gumbel(keys, flat.shape[1])
    assert want.isfinite().all()
    assert OURS.tokens(flat, wanted).tokens.tolist() == want.argmax(-1).tolist()


def test_the_largest_hash_gives_small_noise_and_not_minus_infinity() -> None:
    """That of this seed and token would round to 1."""
    wanted = columns([(1.0, 0, 1.0, 0.0)])
    wanted.seeds[0], wanted.positions[0], token = 36_483, 5, 271
    x = torch.full((1, 300), -INF)
    x[0, token] = 0.0
    assert OURS.tokens(x, wanted).tokens.tolist() == [token]


def test_the_first_of_equal_logits_is_taken_without_temperature() -> None:
    x = torch.zeros(1, 2 * BLOCK)
    x[0, [70, BLOCK + 3]] = 1.0
    assert OURS.tokens(x, columns([(0.0, 0, 1.0, 0.0)])).tokens.tolist() == [70]


@pytest.mark.parametrize("where", [0, BLOCK + 5])
@pytest.mark.parametrize("value", [torch.nan, INF])
def test_a_row_that_is_not_finite_is_invalid_and_harms_no_other(where: int, value: float) -> None:
    """Through the sampler, as it serves."""
    x = logits(3, BLOCK + 9)
    x[1, where] = value
    good = sample(TWIN, x.clone(), plan([(0.7, 20, 0.9, 0.0)] * 3), torch.zeros(3))
    got = sample(OURS, x, plan([(0.7, 20, 0.9, 0.0)] * 3), torch.zeros(3))
    assert got.invalid.tolist() == [False, True, False]
    assert got.tokens.tolist() == good.tokens.tolist()


def test_masks_log_probabilities_and_forbidden_rows_are_as_in_torch() -> None:
    num = 5
    vocab_size = BLOCK + 77
    x = logits(num, vocab_size)
    random = np.random.default_rng(0)
    words = random.integers(
        -(2**31), 2**31, (3, vocab_size // 32), dtype=np.int32
    )  # the last tokens have no bit
    words[1] = 0
    step = plan(
        [(1.0, 0, 0.9, 0.0)] * num,
        GrammarMask(np.array([0, 2, 4], np.int32), ReadyBitmask(words)),
        SampledLogprobsRequest(np.array([0, 1, 4], np.int32), np.array([5, 0, 3], np.int32)),
    )
    want, got = (
        sample(sampler, x.clone(), step, torch.zeros(num)).result() for sampler in (TWIN, OURS)
    )
    assert got.tokens.tolist() == want.tokens.tolist()
    assert got.invalid is not None
    assert got.invalid.tolist() == [False, False, True, False, False]
    assert np.array_equal(logprobs_of(got).top_ids, logprobs_of(want).top_ids)
    np.testing.assert_allclose(logprobs_of(got).logprob, logprobs_of(want).logprob, atol=1e-5)
    np.testing.assert_allclose(
        logprobs_of(got).top_logprobs, logprobs_of(want).top_logprobs, atol=1e-5
    )


def plan(filters: list[tuple[float, int, float, float]], *ops: LogitOp | AuxRequest) -> Plan:
    draws = dict(vars(columns(filters)))
    return sampler_plan(draws.pop("positions"), *ops, **draws)


def test_penalties_are_those_of_the_twin() -> None:
    num = 4
    vocab_size = 50
    x = logits(num, vocab_size)
    last = torch.tensor([7, 3, 3, 49])
    random = np.random.default_rng(0)
    seen = Penalties(
        index=np.array([0, 1, 3], np.int32),
        frequency=np.array([0.5, 0.0, -0.3], np.float32),
        presence=np.array([0.0, 1.0, 0.2], np.float32),
        repetition=np.array([1.3, 1.0, 0.7], np.float32),
        history=random.integers(0, vocab_size, 60).astype(np.int32),
        offsets=np.array([0, 20, 45, 60], np.int32),
        output_starts=np.array([15, 20, 50], np.int32),
        lacks_last=np.array([True, False, True]),
    )
    want = x.clone()
    got = x.clone()
    TWIN.penalise(want, seen, last)
    OURS.penalise(got, seen, last)
    assert torch.equal(got, want)
    assert not torch.equal(got, x)
