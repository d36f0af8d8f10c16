"""How much faster drafts make a model, in turns with none, in one process.

python benchmarks/drafts.py weft-nano --draft-model weft-nano-draft
python benchmarks/drafts.py weft-nano --draft-model weft-nano-draft --requests 32 --tokens 100
python benchmarks/drafts.py FOLDER --temperature 0 --same
python benchmarks/drafts.py FOLDER --temperature 0 --edit
python benchmarks/drafts.py FOLDER --wrong
python benchmarks/drafts.py weft-nano --draft-model weft-nano-draft --more-layers 60

Each round sends other prompts, or with --same always those of the first. With --edit they ask for
a text once more with one word replaced, until the model ends it (for models of instructions in
ChatML); with --wrong every guess is wrong. With --more-layers the model has layers that change
nothing: it says the same in steps as long as those of a larger one. With --cached, prompts are in
the prefix cache before the time is measured. The outputs must be equal.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

import weft
from weft import LLM, SamplingParams
from weft.scheduler import build
from weft.scheduler.pace.step_cost import StepLoad
from weft.scheduler.request import Request
from weft.scheduler.speculation.sources import Known

# What --edit lets the model write once more, with one word changed: "{0}" is the number of the round.
DOCUMENTS = (
    """The lighthouse stands on a small island {0} miles from the harbour. It was built in 1871 after three
ships were lost in one winter. Until 1968 a keeper lived there with his family; since then the light has
worked by itself. Visitors may climb its 142 steps on Sundays between May and September. From the top one
sees the whole bay, the old fish market and, on clear days, the mountains in the north. The boat leaves
the harbour every hour and takes twenty minutes.
""",
    """Dear Mrs. Hall,

thank you for your order number {0} of 3 March. The blue chairs that you have chosen are not in stock at
the moment. We expect new ones on 17 March and will send them to you on the same day. If you do not want
to wait, you can choose another colour: green and white chairs are there and cost the same. Please write
to us until Friday what you prefer.

Kind regards,
Peter Smith
""",
    """The old bakery in our street opens at {0} in the morning. Mr. Berger bakes bread, rolls and apple cakes
there with his two daughters. Before school the children buy a warm roll for the way, and at noon people
from the offices come for soup. On Saturdays one has to wait in a long line until one's turn comes, but
nobody minds, because everybody knows everybody. In August the bakery is closed for three weeks.
""",
)
EDIT = """<|im_start|>user
Repeat this text exactly, but write "{1}" instead of "{0}":

{2}<|im_end|>
<|im_start|>assistant
"""
REPLACED = (("island", "rock"), ("chairs", "tables"), ("bakery", "shop"))


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
    parser.add_argument("--cached", action="store_true")
    parser.add_argument("--more-layers", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if asked.more_layers:
            model = Path(weft.__file__).parent / "bundled" / asked.model
            deepen(model, Path(folder), asked.more_layers)
            asked.model = folder
        measure(asked)


def deepen(model: Path, folder: Path, num_layers: int) -> None:
    """Write a bundled model with more layers, whose outputs are zeros."""
    for file in model.iterdir():
        shutil.copy(file, folder)
    config = json.loads((model / "config.json").read_text())
    num_before = config["num_hidden_layers"]
    config["num_hidden_layers"] = num_before + num_layers
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(model / "model.safetensors")
    first = {name: one for name, one in tensors.items() if ".layers.0." in name}
    for layer in range(num_before, num_before + num_layers):
        for name, tensor in first.items():
            is_output = "o_proj" in name or "down_proj" in name
            copy = torch.zeros_like(tensor) if is_output else tensor.clone()
            tensors[name.replace(".layers.0.", f".layers.{layer}.")] = copy
    save_file(tensors, folder / "model.safetensors")


def measure(asked: argparse.Namespace) -> None:
    settings: dict[str, Any] = {"threads": asked.threads, "kv_tokens": 16_384}
    plain = LLM(asked.model, speculative="off", **settings)
    if asked.wrong:
        build.make_sources = lambda *_: [WrongGuesses()]  # type: ignore[assignment, list-item]
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
    tell_costs(drafting)


def tell_costs(llm: LLM) -> None:
    """What was guessed, and what the scheduler has learnt of the time that it takes."""
    engine: Any = llm._own.engine
    stats = engine.services.stats()
    sources = ("prediction", "tree", "draft", "ngram")
    num = sum(getattr(stats, f"total_drafts_{source}") for source in sources)
    right = sum(getattr(stats, f"total_accepted_{source}") for source in sources)
    pace = engine.scheduler.pace
    cost = pace.model()
    print(f"{right} of {num} guesses were right; {stats.total_steps} steps")
    print(
        f"a step: {1e3 * cost.seconds(StepLoad(1, 200)):.2f} ms, of which {1e3 * cost.token_s:.3f} "
        f"for each token; a step of the draft model: {1e3 * pace.draft_cost.step_s:.2f} ms "
        f"and {1e3 * pace.draft_cost.pass_s:.2f} for each pass"
    )


def run(llm: LLM, asked: argparse.Namespace, number: int) -> tuple[float, list[list[int]]]:
    """Seconds of a token of each request, and the tokens."""
    prompts: list[str] = []
    params: list[SamplingParams] = []
    for i in range(asked.requests):
        question = f"What does function number {i} of module {number} do?"
        prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        if asked.edit:
            prompt = edit_of(number + i)
        prompts.append(prompt)
        params.append(
            SamplingParams(
                max_new_tokens=asked.tokens,
                temperature=asked.temperature,
                seed=100 * number + i,
                ignore_eos=not asked.edit,
            )
        )
    if asked.cached:
        first = [SamplingParams(max_new_tokens=1, temperature=0, seed=one.seed) for one in params]
        llm.generate(prompts, first)
    began_s = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - began_s
    num_tokens = max(len(one.token_ids) for one in outputs)
    return seconds / num_tokens, [one.token_ids for one in outputs]


def edit_of(number: int) -> str:
    """A prompt that asks for one of the documents with a word replaced."""
    kind = number % len(DOCUMENTS)
    old, new = REPLACED[kind]
    return EDIT.format(old, new, DOCUMENTS[kind].format(number + 2))


if __name__ == "__main__":
    main()
