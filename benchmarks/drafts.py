"""How much faster drafts make a model, in turns with none, in one process.

python benchmarks/drafts.py weft-nano --draft-model weft-nano-draft
python benchmarks/drafts.py weft-nano --draft-model weft-nano-draft --requests 32 --tokens 100
python benchmarks/drafts.py FOLDER --temperature 0 --same
python benchmarks/drafts.py FOLDER --temperature 0 --edit
python benchmarks/drafts.py FOLDER --wrong

Each round sends other prompts, or with --same always those of the first. With --edit they are
code that repeats itself; with --wrong every guess is wrong. The outputs must be equal.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np

from weft import LLM, SamplingParams
from weft.scheduler import scheduler
from weft.scheduler.request import Request
from weft.scheduler.speculation.sources import Known

FUNCTION = """def total_{0}(prices, rate_{1}):
    amount = 0
    for price in prices:
        amount = amount + price * rate_{1}
    if amount > {0}:
        raise ValueError("amount is too large")
    return amount
"""


class WrongGuesses:
    """A source of one token again and again, of which much is expected."""

    option = "ngram"
    is_decided = False
    prior = 0.7

    def drafts(self, known: Known, num_tokens: int) -> bytes:
        return np.full(num_tokens, 7, np.int32).tobytes()

    def forget(self, request: Request) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure drafts in turns with none.")
    parser.add_argument("model")
    parser.add_argument("--draft-model", default="")
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--same", action="store_true")
    parser.add_argument("--edit", action="store_true")
    parser.add_argument("--wrong", action="store_true")
    asked = parser.parse_args()
    settings: dict[str, Any] = {"threads": asked.threads, "kv_tokens": 16_384}
    plain = LLM(asked.model, speculative="off", **settings)
    if asked.wrong:
        scheduler.make_sources = lambda *_: [WrongGuesses()]  # type: ignore[assignment, list-item]
    drafting = LLM(asked.model, draft_model=asked.draft_model, **settings)
    gains: list[float] = []
    for i in range(asked.rounds):
        number = 0 if asked.same else i
        plain_s, outputs = run(plain, asked, number)
        drafting_s, others = run(drafting, asked, number)
        assert outputs == others, "drafts have changed an output"
        gains.append(plain_s / drafting_s)
        told = f"{1_000 * plain_s:.2f} ms a token without drafts, {1_000 * drafting_s:.2f} with"
        print(f"round {i}: {told}, {gains[-1]:.2f} times as fast", flush=True)
    print(f"median behind the first round: {statistics.median(gains[1:]):.2f}")


def run(llm: LLM, asked: argparse.Namespace, number: int) -> tuple[float, list[list[int]]]:
    """Seconds of a token of each request, and the tokens."""
    prompts: list[str] = []
    params: list[SamplingParams] = []
    for i in range(asked.requests):
        question = f"What does function number {i} of module {number} do?"
        prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        if asked.edit:
            # Small models go on with what stands there twice.
            prompt = 2 * FUNCTION.format(number, i) + f"def total_{number}("
        prompts.append(prompt)
        params.append(
            SamplingParams(
                max_new_tokens=asked.tokens,
                temperature=asked.temperature,
                seed=100 * number + i,
                ignore_eos=True,
            )
        )
    began_s = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - began_s
    return seconds / asked.tokens, [one.token_ids for one in outputs]


if __name__ == "__main__":
    main()
