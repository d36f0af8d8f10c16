"""Fill-in-the-middle (FIM): the tokens that mark the parts of a text, and their order in a prompt.

Code models get the text before a gap and the text after it, each after its own special token, and
generate the missing part. The tokens are found by their spellings in the tokenizer, or by their
names in `tokenizer_config.json`. Of the tokenizer this module knows only a function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple


class Spellings(NamedTuple):
    """The spellings of the FIM tokens of one model family."""

    prefix: str
    suffix: str
    middle: str = ""  # "": the prefix comes last in the prompt, and the model continues it
    file: tuple[str, ...] = ()  # token before the name of a file, in its spellings
    others: tuple[str, ...] = ()  # other tokens that a model may generate after the gap


FAMILIES = (
    Spellings(  # Qwen2.5-Coder, CodeGemma
        *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        file=("<|file_sep|>", "<|file_separator|>"),
        others=("<|fim_pad|>", "<|repo_name|>", "<|cursor|>"),
    ),
    Spellings(  # StarCoder, StarCoder2, Granite
        *("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        file=("<file_sep>",),
        others=("<fim_pad>", "<repo_name>", "<filename>"),
    ),
    Spellings("<fim-prefix>", "<fim-suffix>", "<fim-middle>", others=("<fim-pad>",)),  # SantaCoder
    Spellings("▁<PRE>", "▁<SUF>", "▁<MID>", others=("▁<EOT>",)),  # CodeLlama
    Spellings("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    Spellings("[PREFIX]", "[SUFFIX]"),  # Codestral
)
NAMES = ("prefix_token", "suffix_token", "middle_token", "eot_token")  # in tokenizer_config.json


class Infill(NamedTuple):
    """The ids of the FIM tokens of one model."""

    prefix: int
    suffix: int
    middle: int | None
    file: int | None
    stops: tuple[int, ...]  # stop tokens: each ends the generated middle

    def prompt(
        self,
        prefix: Sequence[int],
        suffix: Sequence[int],
        middle: Sequence[int] = (),
    ) -> list[int]:
        """The ids of the prompt; `middle` is the beginning of the text in the gap."""
        if self.middle is None:
            return [self.suffix, *suffix, self.prefix, *prefix, *middle]
        return [self.prefix, *prefix, self.suffix, *suffix, self.middle, *middle]


def find_infill(id_of: Callable[[str], int | None], named: Mapping[str, str]) -> Infill | None:
    """The FIM tokens of a model; None if it has none.

    `id_of` returns the id of a spelling; `named`: spellings by `NAMES`, of the names that the
    model's files contain.
    """
    # The names in the model's own files take precedence over all families.
    families = list(FAMILIES)
    if all(name in named for name in NAMES[:3]):
        own = Spellings(
            prefix=named["prefix_token"],
            suffix=named["suffix_token"],
            middle=named["middle_token"],
            others=(named.get("eot_token", ""),),
        )
        families.insert(0, own)
    for family in families:
        infill = _infill_of(family, id_of)
        if infill is not None:
            return infill
    return None


def _infill_of(family: Spellings, id_of: Callable[[str], int | None]) -> Infill | None:
    """The tokens of a family; None if the model lacks a required one."""
    prefix = id_of(family.prefix)
    suffix = id_of(family.suffix)
    middle: int | None = None
    if prefix is None or suffix is None:
        return None
    if family.middle:
        middle = id_of(family.middle)
        if middle is None:
            return None
    files = _known(id_of, family.file)
    stops = [prefix, suffix]
    if middle is not None:
        stops.append(middle)
    stops += files
    stops += _known(id_of, family.others)
    return Infill(
        prefix=prefix,
        suffix=suffix,
        middle=middle,
        file=files[0] if files else None,
        stops=tuple(dict.fromkeys(stops)),
    )


def _known(id_of: Callable[[str], int | None], texts: Sequence[str]) -> list[int]:
    """The ids of the spellings that the model has as tokens."""
    ids: list[int] = []
    for text in texts:
        if not text:
            continue
        id = id_of(text)
        if id is not None:
            ids.append(id)
    return ids
