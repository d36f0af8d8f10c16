"""Where drafts come from (`--speculative`), as users write it. It knows nothing of making them."""

from __future__ import annotations

from weft.config.options import SettingsError, did_you_mean

AUTO = "auto"
OFF = "off"
MODEL = "draft"  # a second, smaller model (`--draft-model`)
SOURCES = ("prediction", "tree", MODEL, "ngram")


# What others call these sources, and what they have besides.
OTHER_NAMES = {"standalone": MODEL, "draft_model": MODEL, "prompt_lookup": "ngram"}
HEADS = ("eagle", "eagle3", "nextn", "mtp", "deepseek_mtp", "medusa", "mlp_speculator", "hydra")


def source_named(name: str, source: str) -> str:
    """The source that `name` means, as weft or other engines call it; `name` itself if none is
    known by it. Raises SettingsError for what weft does not have; `source` is the option's name in
    it."""
    lower = name.lower()
    if lower in HEADS:
        raise SettingsError(
            f"{source} is {name!r}: weft computes no heads that guess from hidden states; there "
            f"are {', '.join(SOURCES)}"
        )
    return OTHER_NAMES.get(lower, lower)


def all_sources(draft_model: str) -> str:
    """Those that there are, as `--speculative` writes them."""
    return ",".join(name for name in SOURCES if draft_model or name != MODEL)


def parse_draft_sources(text: str, source: str) -> tuple[str, ...]:
    """The sources that `text` names, in the order of `SOURCES`; none if it is off.

    Raises SettingsError; `source` is the option's name in it.
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
