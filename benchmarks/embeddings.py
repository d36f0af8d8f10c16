"""Compares the vectors that weft makes with those of transformers, for a real model, and measures both, in seconds on
the clock and of the processor.

    python benchmarks/embeddings.py FOLDER [--texts 512] [--threads 2]

FOLDER is an encoder in the sentence-transformers layout, mean pooling (all-MiniLM-L6-v2). Both compute in float32.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
import transformers

from weft import LLM

WORDS = ("the", "a", "cat", "dog", "runs", "sleeps", "under", "bridge", "river", "of", "in", "Paris", "42", "war")
BATCH = 32  # of transformers, sorted by length as sentence-transformers does


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
            [texts[i] for i in places], padding=True, truncation=True, max_length=max_len, return_tensors="pt"
        )
        with torch.inference_mode():
            hidden = model(**inputs).last_hidden_state
        mask = inputs["attention_mask"][..., None].float()
        vectors = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))
        found[places] = vectors.numpy()
    watch.tell()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    texts = make_texts(args.texts)
    llm = LLM(str(args.folder), dtype="float32", threads=args.threads)
    llm.embed(texts[:32])
    watch = Watch("weft")
    actual = np.stack(llm.embed(texts, truncate=True))
    watch.tell()
    expected = reference(args.folder, texts, llm.model.max_position)
    num = sum(min(len(llm.tokenizer.encode(text)), llm.model.max_position) for text in texts)
    print(f"{len(texts)} texts, {num:,} tokens")
    print(
        f"largest difference {np.abs(actual - expected).max():.2e}, least cosine {(actual * expected).sum(1).min():.8f}"
    )


if __name__ == "__main__":
    main()
