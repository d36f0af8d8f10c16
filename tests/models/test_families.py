"""Every family gives what transformers gives, however the tokens are cut, cached and batched."""

from __future__ import annotations

import pytest
import torch

from tests.executor.driver import Turn
from tests.models.errors import TOLERANCE, relative_error
from weft.plan.step import LAST_SAMPLED


def rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


def test_prefill_of_several_prompts_in_one_step(reference, drive, prompt):
    prompts = [prompt(0, 37), prompt(1, 2), prompt(2, 61), prompt(3, 1)]
    actual = drive(reference.folder).run(*[Turn(row, tokens) for row, tokens in enumerate(prompts)])
    expected = torch.stack([reference.logprobs(tokens)[-1] for tokens in prompts])
    assert relative_error(actual, expected) < TOLERANCE


@pytest.mark.pairs
@pytest.mark.parametrize("chunk", [1, 7, 16, 50])
def test_prefill_in_chunks(reference, drive, prompt, chunk):
    tokens = prompt(4, 53)
    driver = drive(reference.folder)
    logprobs = [driver.run(Turn(2, tokens[i : i + chunk]))[0] for i in range(0, len(tokens), chunk)]
    ends = [min(i + chunk, len(tokens)) - 1 for i in range(0, len(tokens), chunk)]
    assert relative_error(torch.stack(logprobs), reference.logprobs(tokens)[ends]) < TOLERANCE


def test_prefix_computed_for_another_row(reference, drive, prompt):
    first = prompt(5, 40)
    second = prompt(6, 20)
    driver = drive(reference.folder)
    driver.run(Turn(1, first))
    driver.share(source=1, target=5, num=29)
    driver.share(source=1, target=6, num=11)
    actual = driver.run(Turn(5, second), Turn(6, second[:3]))
    expected = [
        reference.logprobs(first[:29] + second)[-1],
        reference.logprobs(first[:11] + second[:3])[-1],
    ]
    assert relative_error(actual, torch.stack(expected)) < TOLERANCE


def test_decode_of_requests_of_different_lengths(reference, drive, prompt):
    lens = [50, 3, 21, 22, 1]
    texts = [prompt(10 + i, n + 12) for i, n in enumerate(lens)]
    driver = drive(reference.folder)
    driver.run(
        *[Turn(row, text[:n]) for row, (text, n) in enumerate(zip(texts, lens, strict=True))]
    )
    steps = [
        driver.run(
            *[
                Turn(row, [text[n + i]])
                for row, (text, n) in enumerate(zip(texts, lens, strict=True))
            ]
        )
        for i in range(12)
    ]
    actual = torch.stack(steps, dim=1)  # [R, 12, VOCAB]
    expected = torch.stack(
        [reference.logprobs(text)[n:] for text, n in zip(texts, lens, strict=True)]
    )
    assert relative_error(actual, expected) < TOLERANCE


def test_decode_beside_prefill_chunks(reference, drive, prompt):
    decoding = prompt(20, 30)
    chunked = prompt(21, 48)
    driver = drive(reference.folder)
    driver.run(Turn(3, decoding[:24]))
    actual = [
        driver.run(Turn(0, chunked[8 * i : 8 * i + 8], i == 5), Turn(3, [decoding[24 + i]]))[-1]
        for i in range(6)
    ]
    assert relative_error(torch.stack(actual), reference.logprobs(decoding)[24:]) < TOLERANCE


def test_greedy_tokens_fed_back_on_the_device(reference, drive, prompt):
    """Steps are launched ahead: only the device knows the tokens that they begin with."""
    prompts = [prompt(30, 11), prompt(31, 25)]
    driver = drive(reference.folder)
    steps = [driver.launch(*[Turn(row, tokens) for row, tokens in enumerate(prompts)])]
    steps += [driver.launch(Turn(1, [LAST_SAMPLED]), Turn(0, [LAST_SAMPLED])) for _ in range(15)]
    first, *rest = [step.result().tokens.tolist() for step in steps]
    actual = [
        [first[0], *(tokens[1] for tokens in rest)],
        [first[1], *(tokens[0] for tokens in rest)],
    ]
    for tokens, generated in zip(prompts, actual, strict=True):
        expected = reference.logprobs(tokens + generated)[len(tokens) - 1 : -1].argmax(-1)
        assert generated == expected.tolist()


def test_bfloat16_is_as_exact_as_transformers(reference, drive, prompt):
    texts = [prompt(40 + i, 33) for i in range(6)]
    driver = drive(reference.folder, dtype="bfloat16")
    driver.run(*[Turn(row, text[:17]) for row, text in enumerate(texts)])
    steps = [
        driver.run(*[Turn(row, [text[17 + i]]) for row, text in enumerate(texts)])
        for i in range(16)
    ]
    actual = torch.stack(steps, dim=1)
    exact = torch.stack([reference.logprobs(text)[17:] for text in texts])
    theirs = torch.stack([reference.logprobs(text, rounded=True)[17:] for text in texts])
    assert 0 < rms(actual - exact) < 1.2 * rms(theirs - exact)


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("settings", "bound"),
    [
        pytest.param({"quantize": "int8"}, 0.15, id="int8"),
        pytest.param({"quantize": "int4"}, 0.8, id="int4"),
        pytest.param({"kv_dtype": "int8", "kernels": "auto"}, 0.04, id="KV int8"),
    ],
)
def test_fewer_bits_cost_little(reference, drive, prompt, settings, bound):
    """The error of log probabilities, in parts of how much they vary (nothing in common would be
    1.4). These random weights multiply every error; what it is on a trained model stands in
    docs/guides/cpu.md."""
    texts = [prompt(50 + i, 25) for i in range(6)]
    driver = drive(reference.folder, **settings)
    first = driver.run(*[Turn(row, text[:17]) for row, text in enumerate(texts)])
    steps = [first] + [
        driver.run(*[Turn(row, [text[17 + i]]) for row, text in enumerate(texts)]) for i in range(8)
    ]
    exact = torch.stack([reference.logprobs(text)[16:] for text in texts], dim=1)
    assert rms(torch.stack(steps) - exact) < bound * float(exact.std())


def test_kernels_give_a_token_the_same_bits_however_it_was_computed(reference, drive, prompt):
    """Alone or beside others, in one piece, in chunks, token by token, or behind a prefix of
    another request."""
    tokens = prompt(60, 40)
    other = prompt(61, 33)
    driver = drive(reference.folder, kernels="auto", dtype="bfloat16")
    whole = driver.run(Turn(0, tokens))[0]
    driver.run(Turn(1, tokens[:7]), Turn(2, other))
    chunked = driver.run(Turn(1, tokens[7:]), Turn(2, other[:1]))[0]
    driver.run(Turn(3, tokens[:1]))
    steps = [driver.run(Turn(3, [token]), Turn(2, [token])) for token in tokens[1:]]
    driver.share(source=1, target=4, num=25)
    behind = driver.run(Turn(2, other[:5]), Turn(4, tokens[25:]))[1]
    for logprobs in (chunked, steps[-1][0], behind):
        assert torch.equal(logprobs, whole)
