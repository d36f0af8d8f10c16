"""Compares the vectors that weft makes with those of transformers, for a real model, and measures both, in seconds on
the clock and of the processor.

    python benchmarks/embeddings.py FOLDER [--texts 512] [--threads 2]
    python benchmarks/embeddings.py FOLDER --table [--rounds 5] [--most-tokens 16384] [--threads 2] [--clock cpu]

FOLDER is an encoder in the sentence-transformers layout, mean pooling (all-MiniLM-L6-v2). Both compute in float32.
--table gives inputs a second for batches of inputs of one length: weft by its kernels, also with int8 weights, weft by
torch, and transformers, in turns. --clock cpu counts seconds of the processor, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import transformers

from weft import LLM

WORDS = (
    "the",
    "a",
    "cat",
    "dog",
    "runs",
    "sleeps",
    "under",
    "bridge",
    "river",
    "of",
    "in",
    "Paris",
    "42",
    "war",
)
BATCH = 32  # of transformers, sorted by length as sentence-transformers does
BATCHES, LENS = (1, 8, 32, 256), (16, 128, 512)
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}

Embed = Callable[[Sequence[list[int]]], object]


class Watch:
    def __init__(self, name: str) -> None:
        self._name, self._wall, self._cpu = name, time.perf_counter(), time.process_time()

    def tell(self) -> None:
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        print(f"{self._name:13} {wall:6.2f} s, {cpu:6.2f} s of the processor")


def make_texts(num: int) -> list[str]:
    """Sentences of 3 to 120 words, the same each time."""
    generator = np.random.default_rng(0)
    lens = np.exp(generator.uniform(np.log(3), np.log(120), num)).astype(int)
    return [" ".join(generator.choice(WORDS, length)) for length in lens]


def reference(folder: Path, texts: list[str], max_len: int) -> np.ndarray:
    """Mean of the last hidden states, to length 1."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    found = np.empty((len(texts), model.config.hidden_size), np.float32)
    watch = Watch("transformers")
    for start in range(0, len(order), BATCH):
        places = order[start : start + BATCH]
        inputs = tokenizer(
            [texts[i] for i in places],
            padding=True,
            truncation=True,
            max_length=max_len,
            return_tensors="pt",
        )
        with torch.inference_mode():
            hidden = model(**inputs).last_hidden_state
        mask = inputs["attention_mask"][..., None].float()
        vectors = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))
        found[places] = vectors.numpy()
    watch.tell()
    return found


def table(
    folder: Path, rounds: int, threads: int, most_tokens: int, clock: Callable[[], float]
) -> None:
    """Inputs a second, the median of `rounds` in turns; behind it how many times those of transformers."""
    kernels = LLM(str(folder), dtype="float32", threads=threads)
    found: dict[str, Embed] = {
        "kernels": kernels.embed,
        "int8": LLM(str(folder), dtype="float32", threads=threads, quantize="int8").embed,
        "torch": LLM(str(folder), dtype="float32", threads=threads, kernels="torch").embed,
        "transformers": by_transformers(folder),
    }
    generator = np.random.default_rng(0)
    for length in (one for one in LENS if one <= kernels.config.context_length):
        for batch in (one for one in BATCHES if one * length <= most_tokens):
            inputs = [generator.integers(1_000, 20_000, length).tolist() for _ in range(batch)]
            taken: dict[str, list[float]] = {name: [] for name in found}
            for turn in range(rounds + 1):
                for name, embed in found.items():
                    start = clock()
                    embed(inputs)
                    if turn:  # the first is to warm up
                        taken[name].append(clock() - start)
            medians = {name: statistics.median(times) for name, times in taken.items()}
            cells = [
                f"{name} {batch / t:8.1f} ({medians['transformers'] / t:.2f})"
                for name, t in medians.items()
            ]
            print(f"{batch:4} x {length:3}:", ", ".join(cells), flush=True)


def by_transformers(folder: Path) -> Embed:
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    def embed(inputs: Sequence[list[int]]) -> list[np.ndarray]:
        vectors = []
        for start in range(0, len(inputs), BATCH):
            with torch.inference_mode():
                hidden = model(
                    input_ids=torch.tensor(inputs[start : start + BATCH])
                ).last_hidden_state
                vectors.append(torch.nn.functional.normalize(hidden.mean(1)).numpy())
        return vectors

    return embed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most-tokens", type=int, default=16_384, help="of a batch in the table")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.table:
        table(args.folder, args.rounds, args.threads, args.most_tokens, CLOCKS[args.clock])
    else:
        compare(args.folder, args.texts, args.threads)


def compare(folder: Path, num_texts: int, threads: int) -> None:
    texts = make_texts(num_texts)
    llm = LLM(str(folder), dtype="float32", threads=threads)
    llm.embed(texts[:32])
    watch = Watch("weft")
    actual = np.stack(llm.embed(texts, truncate=True))
    watch.tell()
    expected = reference(folder, texts, llm.model.max_position)
    num = sum(min(len(llm.tokenizer.encode(text)), llm.model.max_position) for text in texts)
    print(f"{len(texts)} texts, {num:,} tokens")
    print(
        f"largest difference {np.abs(actual - expected).max():.2e}, least cosine {(actual * expected).sum(1).min():.8f}"
    )


if __name__ == "__main__":
    main()
