"""What fewer bits cost: held-out loss and error of log probabilities of a model, as the engine serves it.

    python -m training.quality weft/bundled/weft-nano

Held-out documents are fed to the runner, 64 at a time, a token a step; what it says of each next token is compared with
that token, and with what float32 says.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from training import corpus
from weft.config.engine import EngineConfig
from weft.config.model import ModelConfig
from weft.executor.build import load_runner
from weft.plan.step import ForwardMode, Logprobs, Plan, Sampling

ROWS, LENGTH = 64, 256
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, KV int8": {"dtype": "bfloat16", "kv_dtype": "int8"},
    "int8": {"quantize": "int8"},
    "fp8, by torch": {"quantize": "fp8", "kernels": "torch"},
    "int4": {"quantize": "int4"},
    "int4, KV int8": {"quantize": "int4", "kv_dtype": "int8"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    folder = parser.parse_args().model
    texts = held_out(folder)
    exact: NDArray[np.float32] | None = None
    print(f"{texts.size:,} tokens of held-out documents")
    print(
        f"{'':20} {'loss, nats':>11} {'KL from float32':>16} {'error of log p':>15} {'same best':>10}"
    )
    for name, settings in VARIANTS.items():
        logprobs = np.concatenate(list(run(folder, texts, settings)))  # [T, vocab]
        if exact is None:
            exact = logprobs
        nexts = texts[:, 1:].T.reshape(-1)
        loss = -logprobs[np.arange(len(nexts)), nexts].mean()
        divergence = (np.exp(exact) * (exact - logprobs)).sum(axis=1).mean()
        error = np.sqrt(np.mean((exact - logprobs) ** 2))
        same = (exact.argmax(axis=1) == logprobs.argmax(axis=1)).mean()
        print(f"{name:20} {loss:11.4f} {divergence:16.6f} {error:15.4f} {same:10.2%}")


def held_out(folder: Path) -> NDArray[np.int32]:
    """[ROWS, LENGTH] tokens, from as many places of the held-out documents."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    _, documents = corpus.split(corpus.documents())
    ids = [token for document in documents for token in tokenizer.encode(document.text).ids]
    starts = np.linspace(0, len(ids) - LENGTH, ROWS).astype(int)
    return np.array([ids[start : start + LENGTH] for start in starts], dtype=np.int32)


def run(
    folder: Path, texts: NDArray[np.int32], settings: dict[str, Any]
) -> Iterator[NDArray[np.float32]]:
    """Log probabilities [ROWS, vocab] after each token but the last."""
    model = ModelConfig.from_folder(folder)
    runner = load_runner(
        EngineConfig(device="cpu", **settings),
        model,
        folder=folder,
        kv_tokens=ROWS * LENGTH,
        page_size=1,
        max_rows=ROWS,
        context_length=LENGTH,
    )
    rows = np.arange(ROWS, dtype=np.int32)
    zeros, ones = np.zeros(ROWS, np.float32), np.ones(ROWS, np.float32)
    for position in range(LENGTH - 1):
        plan = Plan(
            step=position,
            mode=ForwardMode.DECODE,
            rows=rows,
            starts=np.full(ROWS, position, np.int32),
            lens=np.ones(ROWS, np.int32),
            tokens=texts[:, position].copy(),
            slots=rows * LENGTH + position,
            samples=np.ones(ROWS, np.bool_),
            sampling=Sampling(
                temperature=zeros,
                top_p=ones,
                top_k=np.zeros(ROWS, np.int32),
                min_p=zeros,
                seeds=np.zeros(ROWS, np.int64),
                positions=np.full(ROWS, position + 1, np.int32),
                logprobs=Logprobs(rows, np.full(ROWS, model.vocab_size, np.int32)),
            ),
        )
        found = runner.launch(plan).result().logprobs
        assert found is not None
        logprobs = np.empty_like(found.top_logprobs)
        np.put_along_axis(logprobs, found.top_ids.astype(np.int64), found.top_logprobs, axis=1)
        yield logprobs
    runner.close()


if __name__ == "__main__":
    main()
