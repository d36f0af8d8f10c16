"""Reads the sampling parameters that a model's `generation_config.json` recommends. Knows no
requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.config.model import ModelNotFound, UnsupportedModel, read_json

FILE = "generation_config.json"
KINDS: dict[str, type[int] | type[float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
}
_FROM_MODEL = ("auto", "model")  # vLLM's and SGLang's words
_FROM_API = ("none", "openai")


def sampling_defaults(source: str, folder: Path) -> dict[str, float | int]:
    """Default sampling parameters of requests, by name; the API has the defaults of all others.

    `source`: "auto" for those of the model in `folder`, "none", or another folder. `do_sample` is
    ignored: a user asks for greedy tokens by a temperature of 0. Raises ModelError for a file that
    cannot be read, a value that is no number, and another folder without the file. Does not check
    the ranges of numbers.
    """
    if source in _FROM_API:
        return {}
    is_models = source in _FROM_MODEL
    path = (folder if is_models else Path(source)) / FILE
    if not path.exists():
        if is_models:
            return {}
        raise ModelNotFound(f"--generation-config: {path} does not exist")
    config = read_json(path)
    return {
        name: _number(path, name, config[name]) for name in KINDS if config.get(name) is not None
    }


def _number(path: Path, name: str, value: Any) -> float | int:
    kind = KINDS[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (kind is int and value != value // 1):
        what = "a number"
        if kind is int:
            what = "a whole number"
        raise UnsupportedModel(
            f"{path}: {name} is {value!r}; {what} is expected (--generation-config none ignores it)"
        )
    return kind(value)
