"""The bundled model tells of a prompt what transformers tells, however it is cut, cached and
batched."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import transformers

from weft import LLM, SamplingParams
from weft.llm import Output
from weft.weights.known import BUNDLED

TOLERANCE = 1e-3
TEXTS = [
    "Once upon a time there was a little engine that had to read a long prompt before it could say a word. "
    * 4,
    "The quick brown fox jumps over the lazy dog; then it sleeps.",
    "Ja",
]
TELL = SamplingParams(
    max_new_tokens=0, prompt_logprobs=3, logprob_token_ids=(5, 77), temperature=0.0
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        BUNDLED,
        threads=1,
        dtype="float32",
        chunked_prefill_size=64,
        kv_tokens=4_096,
        context_length=1_024,
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference() -> dict[str, torch.Tensor]:
    """Log probabilities after each token: [T, V]."""
    model = transformers.LlamaForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(BUNDLED)
    with torch.inference_mode():
        return {
            text: model(torch.tensor([tokenizer(text).input_ids])).logits[0].log_softmax(-1)
            for text in TEXTS
        }


def check(llm: LLM, output: Output, text: str, expected: torch.Tensor, start: int = 0) -> None:
    ids = llm.tokenizer.encode(text)
    told = output.prompt_logprobs
    assert [one.token for one in told] == ids[start:]
    assert told[0].logprob is None
    for place, one in enumerate(told[1:], start=start):
        row = expected[place]
        assert one.logprob is not None
        assert abs(one.logprob - row[ids[place + 1]]) < TOLERANCE
        assert one.rank == int((row > row[ids[place + 1]]).sum()) + 1
        assert max(abs(value - row[token]) for token, value in one.top) < TOLERANCE
        assert torch.allclose(
            torch.tensor([value for _, value in one.top]), row.topk(3).values, atol=TOLERANCE
        )
        assert torch.allclose(torch.tensor(one.of_ids), row[[5, 77]], atol=TOLERANCE)


def test_prompts_are_reported_as_transformers_tells_them(
    llm: LLM, reference: dict[str, torch.Tensor]
) -> None:
    """In one batch, the first in chunks; then one by one, with prefixes that are cached."""
    together = llm.generate(TEXTS, TELL)
    assert [output.completion_tokens for output in together] == [0] * len(TEXTS)
    for text, output in zip(TEXTS, together, strict=True):
        check(llm, output, text, reference[text])
    for start in (0, 17):
        fields = {"max_new_tokens": 4, "prompt_logprobs": 3, "prompt_logprobs_start": start}
        again = SamplingParams(**fields, logprob_token_ids=(5, 77), logprobs=0, n=2)
        for output in llm.generate(TEXTS[0], again):
            assert output.cached_tokens <= start
            assert (output.cached_tokens > 0) == (start > 0)
            check(llm, output, TEXTS[0], reference[TEXTS[0]], start)
            assert [len(token.id_logprobs) for token in output.logprobs] == [
                2
            ] * output.completion_tokens
