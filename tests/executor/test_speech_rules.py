"""The rules about tokens that are times, compared with the logits processor of transformers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from tests.executor.driver import ints, sampler_plan
from weft.executor.outputs.sampler import sample
from weft.messages.sampling import InvalidParam, SpeechRules
from weft.ops.sampling import TorchSamplerOps
from weft.plan.logits import TimestampRules
from weft.scheduler.features.speech import NUM_RANGES, forbidden_ranges

VOCAB = 120
END = 60
FIRST = 70
MAX_INITIAL = 20
PROMPT = [3, 4]
RULES = SpeechRules(first_timestamp=FIRST, end=END, max_initial=MAX_INITIAL)


def chosen(logits: torch.Tensor, output: list[int], rules: SpeechRules = RULES) -> int:
    ranges = forbidden_ranges(rules, ints(output), VOCAB)
    assert len(ranges) <= NUM_RANGES
    padded = np.zeros((1, NUM_RANGES, 2), dtype=np.int32)
    padded[0, : len(ranges)] = ranges
    plan = sampler_plan(range(1), TimestampRules(ints([0]), ints([FIRST]), padded))
    sampled = sample(TorchSamplerOps(), logits[None].clone(), plan, torch.tensor([0]))
    return int(sampled.tokens[0])


@pytest.mark.parametrize("seed", range(30))
def test_each_token_is_the_one_that_transformers_would_choose(seed: int) -> None:
    config = SimpleNamespace(
        no_timestamps_token_id=FIRST - 1,
        eos_token_id=END,
        bos_token_id=END,
        max_initial_timestamp_index=MAX_INITIAL,
    )
    processor = WhisperTimeStampLogitsProcessor(config, begin_index=len(PROMPT))
    generator = torch.Generator().manual_seed(seed)
    output: list[int] = []
    for _ in range(40):
        logits = 3 * torch.randn(VOCAB, generator=generator)
        logits[FIRST:] -= 2.0  # so that text is likelier at times
        ids = torch.tensor([PROMPT + output])
        there = int(processor(ids, logits[None].clone())[0].argmax())
        assert chosen(logits, output) == there
        output.append(there)
    assert any(id >= FIRST for id in output)
    assert any(id < END for id in output)


def test_without_times_none_is_chosen() -> None:
    logits = torch.zeros(VOCAB)
    logits[FIRST + 5] = 9.0
    logits[7] = 1.0
    rules = SpeechRules(first_timestamp=FIRST, end=END, forbids_times=True)
    assert chosen(logits, [], rules) == 7


def test_tokens_outside_of_the_vocabulary_are_refused() -> None:
    with pytest.raises(InvalidParam, match="speech"):
        SpeechRules(suppress=(VOCAB,)).check(VOCAB)
    with pytest.raises(InvalidParam, match="at most 640 alignment heads"):
        SpeechRules(alignment_heads=((0, 0),) * 641).check(VOCAB)
