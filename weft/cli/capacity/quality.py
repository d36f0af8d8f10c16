"""What is stated about the quality of options that keep fewer bits (docs/guides/quantization.md).
Options that are not here change no answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from weft.cli.capacity.measure import OptionValue

STATED = {
    ("quantize", "int8"): "perplexity +0.5 % (SmolLM2-135M), 0.0 % (weft-nano)",
    ("quantize", "int4"): "perplexity +0.5 % (SmolLM2-135M, from a file in four bits), "
    "+2.8 % (weft-nano, from bfloat16)",
    ("kv_dtype", "int8"): "perplexity 0.0 % (weft-nano)",
}
NOT_STATED = "its quality is not stated: weft bench quality MODEL measures it"
KEEPS_ALL = ("auto", "none", "bf16", "fp32")


def stated_quality(options: Mapping[str, OptionValue]) -> Iterator[str]:
    """A line for each option that may change answers."""
    for name in ("quantize", "kv_dtype"):
        value = str(options.get(name, "auto"))
        if value not in KEEPS_ALL:
            stated = STATED.get((name, value), NOT_STATED)
            yield f"{name}={value}: {stated}"
