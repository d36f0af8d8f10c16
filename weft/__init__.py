"""weft, a serving engine for large language models.

    from weft import LLM, SamplingParams
    print(LLM().generate("def fibonacci(", SamplingParams(max_new_tokens=64))[0].text)

The names are imported when they are first used, so that `import weft` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.version import __version__

if TYPE_CHECKING:
    from weft.config.model_errors import ModelError
    from weft.config.options import SettingsError
    from weft.executor.logit_processors.processor import LogitProcessor
    from weft.llm import LLM, Output
    from weft.messages.sampling import Grammar, InvalidParam, Processor, SamplingParams

__all__ = [
    "LLM",
    "Grammar",
    "InvalidParam",
    "LogitProcessor",
    "ModelError",
    "Output",
    "Processor",
    "SamplingParams",
    "SettingsError",
    "__version__",
]

# Where each name stands.
_HOMES = {
    "LLM": "weft.llm",
    "Output": "weft.llm",
    "LogitProcessor": "weft.executor.logit_processors.processor",
    "Grammar": "weft.messages.sampling",
    "Processor": "weft.messages.sampling",
    "SamplingParams": "weft.messages.sampling",
    "InvalidParam": "weft.messages.sampling",
    "SettingsError": "weft.config.options",
    "ModelError": "weft.config.model_errors",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    import importlib

    value: object = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
