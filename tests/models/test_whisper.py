"""Whisper, compared with transformers: tokens by the greedy choice, and their log probabilities."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models import speaking
from tests.models.speaking import BEGIN, IDS, NO_TIMESTAMPS, TRANSCRIBE, SpeechModel
from weft import LLM, SamplingParams
from weft.arrays import FloatArray
from weft.messages.sampling import InvalidParam

PROMPTS = [
    [BEGIN, IDS["<|en|>"], TRANSCRIBE, NO_TIMESTAMPS],
    [BEGIN],
    [IDS["<|startofprev|>"], *b"what was said before", BEGIN, IDS["<|de|>"], TRANSCRIBE],
]
LENGTHS = [1_600, 20_000, 31_999, 32_000]
SETTINGS: dict[str, Any] = {"dtype": "float32", "page_size": 4, "threads": 1}
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> SpeechModel:
    return speaking.make(tmp_path_factory.mktemp("speaking"))


@pytest.fixture(scope="module", params=["torch", "auto"])
def llm(request: Any, spoken: SpeechModel) -> LLM:
    return LLM(str(spoken.folder), kernels=request.param, **SETTINGS)


def asked(samples: FloatArray, prompt: list[int]) -> dict[str, Any]:
    return {"prompt": prompt, "audios": [speaking.wav(samples)]}


def expected(spoken: SpeechModel, samples: FloatArray, ids: list[int]) -> torch.Tensor:
    """Log probabilities after each of the ids: [n, vocabulary]"""
    features = spoken.features(speaking.heard(samples))
    with torch.inference_mode():
        logits = spoken.model(input_features=features, decoder_input_ids=torch.tensor([ids])).logits
    found: torch.Tensor = logits[0].log_softmax(-1)
    return found


@pytest.mark.parametrize("length", LENGTHS)
def test_tokens_and_probabilities_are_those_of_transformers(
    spoken: SpeechModel, llm: LLM, length: int
) -> None:
    samples = speaking.sound(length)
    for prompt in PROMPTS:
        (output,) = llm.generate([asked(samples, prompt)], GREEDY)
        there = expected(spoken, samples, prompt + output.token_ids)[len(prompt) - 1 : -1]
        assert output.token_ids == there.argmax(-1).tolist()
        for token, entry, row in zip(output.token_ids, output.logprobs, there, strict=True):
            assert entry.logprob == pytest.approx(float(row[token]), abs=2e-4)


def test_an_answer_depends_on_no_neighbour_and_on_no_cached_prefix(llm: LLM) -> None:
    sounds = [speaking.sound(9_000 + 3_000 * seed, seed) for seed in range(3)]
    requests = [asked(samples, prompt) for samples in sounds for prompt in PROMPTS]
    together = [output.token_ids for output in llm.generate(requests, GREEDY)]
    alone = [llm.generate([request], GREEDY)[0].token_ids for request in requests]
    assert together == alone
    # The same prompt about different sounds gets different answers.
    assert len({tuple(tokens) for tokens in together}) > len(PROMPTS)


def test_a_prefix_is_cached_for_the_same_sound_alone(llm: LLM) -> None:
    prompt = [BEGIN, *range(20), TRANSCRIBE]
    one = asked(speaking.sound(12_345, 1), prompt)
    other = asked(speaking.sound(12_345, 2), prompt)
    assert llm.generate([one], GREEDY)[0].cached_tokens == 0
    assert llm.generate([one], GREEDY)[0].cached_tokens >= 20
    assert llm.generate([other], GREEDY)[0].cached_tokens == 0


def test_requests_that_memory_retracts_get_the_same_answers(spoken: SpeechModel) -> None:
    requests = [asked(speaking.sound(9_000, seed), PROMPTS[0]) for seed in range(8)]
    params = SamplingParams(max_new_tokens=60, temperature=0.0, ignore_eos=True)
    roomy = LLM(str(spoken.folder), **SETTINGS)
    wanted = [output.token_ids for output in roomy.generate(requests, params)]
    tight = LLM(
        str(spoken.folder),
        **SETTINGS,
        kv_tokens=100,
        max_running_requests=8,
        encoder_cache_tokens=speaking.NUM_POSITIONS,
        schedule_conservativeness=0.1,
    )
    found = [output.token_ids for output in tight.generate(requests, params)]
    assert tight._own.engine.scheduler.stats().total_retractions
    assert found == wanted


def test_a_prompt_needs_exactly_one_sound_that_fits(llm: LLM) -> None:
    (without,) = llm.generate([[BEGIN]], GREEDY)
    assert without.error == "this model answers about a sound, and the request has none"
    sound = speaking.wav(speaking.sound(8_000))
    (with_two,) = llm.generate([{"prompt": [BEGIN], "audios": [sound, sound]}], GREEDY)
    assert with_two.error == "this model needs one sound with each prompt; this one has 2"
    longer = asked(speaking.sound(33_000), [BEGIN])
    with pytest.raises(InvalidParam, match=r"lasts 2.06 s; a prompt takes at most 2 s"):
        llm.generate([longer], GREEDY)
