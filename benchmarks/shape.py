"""`python -m benchmarks.shape`: writes a model with random weights that every engine can load, to compare the
speed of engines on one shape."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.bench.workloads import SHAPES
from weft.cli.bench import run_command
from weft.config.model import ModelConfig
from weft.config.options import Command, Settings, SettingsError, did_you_mean, option
from weft.json_types import JsonObject

UNKNOWN = "<unk>"
BEGIN = "<s>"
END = "</s>"


@dataclass(frozen=True, kw_only=True)
class ShapeOptions:
    shape: str = option("tiny", f"of {', '.join(SHAPES)}", group="bench", everyday=True)
    folder: str = option("", "where to write the model", group="bench", everyday=True)


def bench_shape(settings: Settings) -> int:
    options = settings.make(ShapeOptions)
    if options.shape not in SHAPES:
        raise SettingsError(
            f"--shape is {options.shape!r}{did_you_mean(options.shape, SHAPES)}: "
            f"{', '.join(SHAPES)}"
        )
    if not options.folder:
        raise SettingsError("--folder is missing: the folder into which the model is written")
    folder = Path(options.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_model(SHAPES[options.shape], folder)
    except OSError as exc:
        raise SettingsError(f"cannot write to {folder}: {exc.strerror}") from exc
    print(folder)
    return 0


def write_model(config: JsonObject, folder: Path) -> None:
    """config.json, random weights in bfloat16, and a tokenizer with one word for each token id."""
    from weft.weights.load import save_random

    save_random(ModelConfig.from_hf(config, folder.name), folder / "model.safetensors")
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", {"eos_token_id": config["eos_token_id"]})
    _write(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END},
    )
    _write(folder / "tokenizer.json", _tokenizer(config["vocab_size"]))


def _tokenizer(vocab_size: int) -> JsonObject:
    words = [UNKNOWN, BEGIN, END, *(f"w{i}" for i in range(3, vocab_size))]
    special = []
    for i, word in enumerate(words[:3]):
        token = {"id": i, "content": word, "special": True}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        special.append(token | flags)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: i for i, word in enumerate(words)},
            "unk_token": UNKNOWN,
        },
    }


def _write(path: Path, content: JsonObject) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def main(argv: Sequence[str]) -> int:
    """Returns the exit status. Raises SettingsError."""
    command = Command(
        "benchmarks.shape",
        "Write a model of random weights to compare engines on.",
        ShapeOptions,
        positional="shape",
    )
    return run_command(command, bench_shape, argv)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SettingsError as problem:
        sys.exit(f"error: {problem}")
