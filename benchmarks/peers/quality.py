"""What a peer makes of the text of `weft bench quality`. quality.py MODEL --peer COMMAND [options]

The command is that of a program which answers as `read_llama.py` does. The same tokens of the same text are read, the
model is compared with weft's own float32, and the same figures are printed: the line above is weft's.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from engine import ANSWER

from weft.arrays import FloatArray, IntArray
from weft.bench.quality import CHUNK_LEN, QualityOptions, Reader, compare, other_config, read_texts
from weft.config.engine import EngineConfig
from weft.config.options import Command, Settings, option


class Peer:
    """Another engine that reads texts, in its own process: to `compare`, it is like a Reader."""

    def __init__(self, command: str) -> None:
        self._process = subprocess.Popen(
            shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def logprobs(self, tokens: IntArray) -> Iterator[FloatArray]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = " ".join(str(token) for token in tokens)
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        while answer and not answer.startswith(ANSWER.encode()):  # the engine's own talk
            answer = self._process.stdout.readline()
        if not answer:
            sys.exit("the peer has ended")
        vocab_size = int(answer.removeprefix(ANSWER.encode()))
        for start in range(0, len(tokens) - 1, CHUNK_LEN):
            num = min(CHUNK_LEN, len(tokens) - 1 - start)
            content = self._process.stdout.read(num * vocab_size * 4)
            logits = np.frombuffer(content, np.float32).reshape(num, vocab_size).astype(np.float64)
            highest = logits.max(axis=1, keepdims=True)
            total = np.log(np.exp(logits - highest).sum(axis=1, keepdims=True))
            yield (logits - highest - total).astype(np.float32)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True, kw_only=True)
class PeerOptions:
    peer: str = option("", "command of a program that reads texts", group="bench")


def main() -> None:
    command = Command("quality", "", EngineConfig, QualityOptions, PeerOptions, positional="model")
    settings: Settings = command.read(sys.argv[1:], {})
    options = settings.make(QualityOptions)
    config = settings.make(EngineConfig)
    ours = Reader(config, options.text_len)
    theirs = Peer(settings.make(PeerOptions).peer)
    exact = Reader(other_config(config, options.against), options.text_len)
    texts = read_texts(ours.tokenizer, options.texts, options.text_len)
    for name, reader in (("weft", ours), ("peer", theirs)):
        found = compare(reader, exact, texts)  # type: ignore[arg-type]
        print(
            f"{name}: perplexity {found.perplexity:.4f} ({found.change:+.2%} ± {found.change_error:.2%}), "
            f"divergence {found.divergence:.5f}, same token {found.same_token:.2%}",
            flush=True,
        )
    for reader in (ours, theirs, exact):
        reader.close()


if __name__ == "__main__":
    main()
