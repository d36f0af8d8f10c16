"""Random requests of every kind, with drafts and without: the answers must be the same, bit for
bit. `python -m tests.e2e.draft_proof --requests 200` takes some minutes; the suite runs a sample
(`test_draft_proof.py`).

Drafts come from the prefix cache, from the text, from somebody who knows nine tenths of the answer,
and from somebody who is always wrong. Each is computed, whatever it costs. The settings cut
prompts, share prefixes, mix prompts and running requests in a step, and leave so little memory that
requests are retracted. With `--overlap`, steps with drafts are planned before the drafts of the
last one are compared; those without drafts never are.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from tests.grammar.compiled_here import compiling_here
from tests.scheduler.accounts import audit
from weft import LLM, Grammar, SamplingParams
from weft.memory.prefix_cache import TOKEN_BYTES
from weft.messages.sampling import ThinkingMarks
from weft.messages.status import Stats
from weft.scheduler import build
from weft.scheduler.request import Request
from weft.scheduler.speculation import guessing as guessing_steps
from weft.scheduler.speculation import speculator
from weft.scheduler.speculation.sources import Known

CODE = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\n"
TEXTS = (
    CODE,
    CODE + CODE + "def add(a, b):\n",
    "import os\nimport sys\nimport os\nimport sys\n",
    "What does os.path.join do?",
    '{"name": "a", "size": 1}\n{"name": "b", "size": 2}\n',
)
SCHEMA = """{"type": "object", "required": ["kind", "names"], "properties": {"kind": {"enum": ["def", "return", "class"]},
  "names": {"type": "array", "minItems": 2, "items": {"type": "string", "maxLength": 6}}}}"""
GRAMMARS = (
    Grammar("regex", "[ab ]{4,12}"),
    Grammar("json_schema", SCHEMA),
    Grammar("choice", '["return a", "return b", "return a + b", "raise"]'),
)
# Tokens that the bundled model says often: "reasoning" that ends with one of them ends soon.
MARKS = ThinkingMarks((5,), (11,), is_open=True)
SOURCES = ("tree", "ngram", "knowing", "wrong")
HEADS = ("eagle3", "mtp")
NANO = "weft-nano"
VOCAB = 1_000  # of the tokens that somebody wrong guesses


class Ask(NamedTuple):
    text: str
    params: SamplingParams
    adapter: str = ""


class Guesser:
    """Guesses from `answers`, by seed; nine tenths of it are right. Without an answer all that it
    guesses is random."""

    option = "ngram"
    is_decided = False
    prior = 0.95

    def __init__(self, answers: dict[int, list[int]]) -> None:
        self._answers = answers

    def drafts(self, known: Known, num_tokens: int) -> bytes:
        seed = known.request.message.sampling.seed
        place = len(known.output) // TOKEN_BYTES
        rng = random.Random(f"{seed} {place}")
        if not self._answers:
            return packed([rng.randrange(VOCAB) for _ in range(num_tokens)])
        answer = self._answers.get(seed or 0, [])[place : place + num_tokens]
        return packed([rng.randrange(VOCAB) if rng.random() < 0.1 else one for one in answer])

    def forget(self, request: Request) -> None:
        pass


def packed(tokens: list[int]) -> bytes:
    return np.array(tokens, dtype=np.int32).tobytes()


def random_ask(rng: random.Random, seed: int) -> Ask:
    wish: dict[str, Any] = {
        "seed": seed,
        "max_new_tokens": rng.choice([1, 6, 20, 40]),
        "temperature": rng.choice([0.0, 0.0, 0.3, 0.7, 1.0, 1.2]),
    }

    def maybe(chance: float, **more: Any) -> None:
        if rng.random() < chance:
            wish.update(more)

    maybe(0.2, top_k=rng.choice([1, 5, 40]))
    maybe(0.2, top_p=rng.choice([0.5, 0.9]))
    maybe(0.2, min_p=0.05)
    maybe(0.2, frequency_penalty=0.6, presence_penalty=-0.3)
    maybe(0.2, repetition_penalty=1.3)
    maybe(0.2, logit_bias={11: 2.0, 20: -3.0})
    maybe(0.1, n=2)
    maybe(0.1, stop_token_ids=(11,))
    maybe(0.1, stop=("return", "\n\n"))
    maybe(0.1, ignore_eos=True)
    maybe(0.1, min_new_tokens=min(5, wish["max_new_tokens"]))
    maybe(0.1, bad_words=("return", " a + b"))
    maybe(0.2, logprobs=2)
    grammar = rng.choice(GRAMMARS)
    maybe(0.3, grammar=grammar)
    if rng.random() < 0.2:
        wish["thinking_marks"] = MARKS
        wish["thinking_budget"] = rng.choice([2, 8])
        wish["grammar"] = Grammar(grammar.kind, grammar.text, behind=MARKS)
    return Ask(rng.choice(TEXTS), SamplingParams(**wish))


def random_settings(rng: random.Random) -> dict[str, Any]:
    return {
        "max_running_requests": rng.choice([1, 3, 6]),
        "chunked_prefill_size": rng.choice([32, 64]),
        "mixed_chunk": rng.random() < 0.7,
        "page_size": rng.choice([1, 4, 16]),
        "max_draft": rng.choice([1, 3, 8, 20]),
        "context_length": 192,
        "kv_tokens": rng.choice([192, 2_048]),
        "schedule_conservativeness": 0.0,
    }


@contextmanager
def guessing(source: str, answers: dict[int, list[int]]) -> Iterator[str]:
    """Make an engine guess from this source, whatever it costs. Yields the option for it."""
    with pytest.MonkeyPatch.context() as patch:
        # How long steps take must not decide how much is guessed.
        patch.setattr(speculator, "least_chance", lambda *_: 0.01)
        patch.setattr(speculator, "steps_of_rest", lambda *_: 0)
        if source in ("knowing", "wrong"):
            known = answers if source == "knowing" else {}
            patch.setattr(build, "make_sources", lambda *_: [Guesser(known)])
            yield "ngram"
        elif source in HEADS:
            patch.setattr(guessing_steps.Guesser, "_count", lambda *args: min(3, args[-1]))
            yield source
        else:
            yield source


def answered(
    asks: list[Ask], speculative: str, settings: dict[str, Any]
) -> tuple[list[Any], Stats]:
    with compiling_here():
        llm = LLM(speculative=speculative, threads=1, **{"model": NANO, **settings})
    compile_first(llm, GRAMMARS)
    outputs = completed(llm, asks)
    # When half of them have ended, the others are aborted: nothing refers to the iterator any more.
    prompts = [llm.prompt(ask.text, ask.params, adapter=ask.adapter) for ask in asks]
    list(islice(llm.complete(prompts), len(asks) // 2))
    audit(llm._own.engine.scheduler)  # type: ignore[attr-defined]
    # What was said the first time is in the prefix cache the second time, or on disk.
    outputs += completed(llm, asks)
    audit(llm._own.engine.scheduler)  # type: ignore[attr-defined]
    return outputs, llm._own.engine.services.stats()  # type: ignore[attr-defined]


def completed(llm: LLM, asks: list[Ask]) -> list[Any]:
    """The outputs of requests that run side by side, in their order."""
    prompts = [llm.prompt(ask.text, ask.params, adapter=ask.adapter) for ask in asks]
    by_position = dict(llm.complete(prompts))
    return [output for position in range(len(asks)) for output in by_position[position]]


def compile_first(llm: LLM, grammars: Iterable[Grammar]) -> None:
    """Have grammars compiled, again if this machine was too busy to begin in time."""
    for grammar in grammars:
        one = SamplingParams(max_new_tokens=1, grammar=grammar)
        refused = [llm.generate("a", one)[0].error]
        while refused[-1]:
            assert len(refused) < 30, refused
            refused.append(llm.generate("a", one)[0].error)


def differences(one: list[Any], other: list[Any], *, bitwise: bool) -> list[int]:
    """The places of answers that are not the same. `bitwise`: their log probabilities count,
    too."""
    found = []
    for i, (left, right) in enumerate(zip(one, other, strict=True)):
        is_same = left.token_ids == right.token_ids and left.text == right.text
        is_same = is_same and left.finish_reason == right.finish_reason
        is_same = is_same and left.error == right.error
        if not is_same or (bitwise and chances(left) != chances(right)):
            found.append(i)
    return found


def chances(output: Any) -> list[Any]:
    """The log probabilities of an answer, without the numbers of its request: those depend on how
    often a grammar was asked for until it was compiled."""
    return [msgspec.structs.replace(one, id=0) for one in output.logprobs or ()]


def prove(
    seed: int, num_requests: int, sources: tuple[str, ...], draft_model: str = "", **settings: Any
) -> list[Stats]:
    """Answer random requests without drafts and with those of each source. `draft_model`: the head,
    if one of EAGLE-3 is among them. With `lora_paths`, two thirds have an adapter. Returns the
    engine's numbers, those without drafts first."""
    rng = random.Random(f"proof {seed}")
    settings = {**random_settings(rng), **settings}
    asks = [random_ask(rng, 1_000 * seed + i) for i in range(num_requests)]
    if "lora_paths" in settings:
        names = ("", *settings["lora_paths"])
        asks = [ask._replace(adapter=rng.choice(names)) for ask in asks]
    plain, stats = answered(asks, "off", {**settings, "overlap": False})
    # With few tokens, a grammar and bad words may exclude all of them.
    errors = [one.error for one in plain if one.error]
    assert all("exclude each other" in error for error in errors), f"world {seed}: {errors}"
    answers: dict[int, list[int]] = {}
    place = 0
    for ask in asks:
        answers[ask.params.seed or 0] = plain[place].token_ids
        place += ask.params.n
    found = [stats]
    for source in sources:
        with guessing(source, answers) as option:
            head = {"draft_model": draft_model} if source == "eagle3" else {}
            drafted, stats = answered(asks, option, {**settings, **head})
        # The kernels of torch add in another order where more tokens are computed together.
        wrong = differences(plain, drafted, bitwise=settings.get("kernels") != "torch")
        pairs = [(plain[i], drafted[i]) for i in wrong]
        assert not wrong, f"world {seed}, {settings}, {source}: answers {wrong}: {pairs}"
        found.append(stats)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200, help="for each source")
    parser.add_argument("--per-world", type=int, default=20, help="with the same settings")
    parser.add_argument("--kernels", default="auto", help="auto, or torch with float32")
    parser.add_argument("--head", default="", help="a folder with an EAGLE-3 head, instead")
    parser.add_argument("--overlap", action="store_true", help="with drafts, plan steps ahead")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    settings: dict[str, Any] = {"overlap": args.overlap}
    if args.kernels == "torch":
        settings |= {"kernels": "torch", "dtype": "float32"}
    began = time.monotonic()
    for seed in range(args.seed, args.seed + -(-args.requests // args.per_world)):
        sources = HEADS if args.head else SOURCES
        plain, *drafted = prove(seed, args.per_world, sources, args.head, **settings)
        told = [f"{plain.total_steps} steps, {plain.total_retractions} retractions"]
        for source, stats in zip(sources, drafted, strict=True):
            num = stats.total_drafts_tree + stats.total_drafts_ngram + stats.total_drafts_eagle3
            right = stats.total_accepted_tree + stats.total_accepted_ngram
            right += stats.total_accepted_eagle3
            told.append(f"{source} {right} of {num} right in {stats.total_steps}")
        print(f"{time.monotonic() - began:5.0f} s  world {seed}: {'; '.join(told)}", flush=True)
    print("all answers are the same")


if __name__ == "__main__":
    main()
