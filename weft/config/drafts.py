"""Reads the sources of drafts (`--speculative`), as users write them. It makes no drafts."""

from __future__ import annotations

from weft.config.options import SettingsError, did_you_mean

AUTO = "auto"
OFF = "off"
MODEL = "draft"  # a second, smaller model (`--draft-model`)
SOURCES = ("prediction", "tree", MODEL, "ngram")


# Names of these sources in other engines, and sources that only other engines have.
OTHER_NAMES = {"standalone": MODEL, "draft_model": MODEL, "prompt_lookup": "ngram"}
HEADS = ("eagle", "eagle3", "nextn", "mtp", "deepseek_mtp", "medusa", "mlp_speculator", "hydra")


def source_named(name: str, source: str) -> str:
    """The source with this name in weft or another engine; `name` itself if there is none. Raises
    SettingsError, which names the option `source`, for sources that weft does not have."""
    lower = name.lower()
    if lower in HEADS:
        raise SettingsError(
            f"{source} is {name!r}: weft computes no heads that guess from hidden states; there "
            f"are {', '.join(SOURCES)}"
        )
    return OTHER_NAMES.get(lower, lower)


def all_sources(draft_model: str) -> str:
    """All available sources, in the form of `--speculative`."""
    return ",".join(name for name in SOURCES if draft_model or name != MODEL)


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
