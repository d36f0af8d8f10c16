"""Reads the sources of drafts (`--speculative`), as users write them. It makes no drafts."""

from __future__ import annotations

from weft.config.heads import EAGLE3, MTP
from weft.config.options import SettingsError, did_you_mean

AUTO = "auto"
OFF = "off"
MODEL = "draft"  # a second, smaller model (`--draft-model`)
# What makes guesses in steps of its own: a draft model, or a head that reads hidden states.
OWN_STEPS = (MODEL, MTP, EAGLE3)
SOURCES = ("prediction", "tree", *OWN_STEPS, "ngram")


# Names of these sources in other engines, and sources that only other engines have.
OTHER_NAMES = {"standalone": MODEL, "draft_model": MODEL, "prompt_lookup": "ngram"}
OTHER_NAMES |= dict.fromkeys(
    ("nextn", "deepseek_mtp", "glm4_moe_mtp", "mimo_mtp", "qwen3_next_mtp"), MTP
)
OTHER_HEADS = ("eagle", "medusa", "mlp_speculator", "hydra")


def source_named(name: str, source: str) -> str:
    """The source with this name in weft or another engine; `name` itself if there is none. Raises
    SettingsError, which names the option `source`, for sources that weft does not have."""
    lower = name.lower()
    if lower in OTHER_HEADS:
        raise SettingsError(
            f"{source} is {name!r}: weft computes no heads of this kind; there are "
            f"{', '.join(SOURCES)}"
        )
    return OTHER_NAMES.get(lower, lower)


def all_sources(own_steps: str) -> str:
    """All available sources, in the form of `--speculative`. `own_steps`: the one of `OWN_STEPS`
    that there is; "": none."""
    return ",".join(name for name in SOURCES if name == own_steps or name not in OWN_STEPS)


def parse_draft_sources(text: str, source: str) -> tuple[str, ...]:
    """The sources that `text` names, in the order of `SOURCES`; none if it is off.

    Raises SettingsError, which names the option `source`.
    """
    if text.lower() in (OFF, "none"):
        return ()
    names = [source_named(name.strip(), source) for name in text.split(",")]
    for name in names:
        if name not in SOURCES:
            hint = did_you_mean(name, (AUTO, OFF, *SOURCES))
            raise SettingsError(
                f"{source} is {text!r}; {AUTO}, {OFF}, or some of {', '.join(SOURCES)} with commas "
                f"are expected{hint}"
            )
    return tuple(name for name in SOURCES if name in names)
