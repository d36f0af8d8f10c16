"""Filling in the middle: the tokens by which a model knows the parts of a text, and how they are put together.

Code models get the text before a gap and the text behind it, each behind a token of its own, and write what is missing.
The tokens are found by their spellings in the tokenizer, or by the names that `tokenizer_config.json` has for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple


class Spellings(NamedTuple):
    """The tokens of one family."""

    prefix: str
    suffix: str
    middle: str = ""  # "" where the model writes on behind the prefix, which then stands last
    file: tuple[str, ...] = ()  # before the name of a file
    others: tuple[str, ...] = ()  # that a model may write where it has filled the gap


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
    """The tokens of one model, as ids."""

    prefix: int
    suffix: int
    middle: int | None
    file: int | None
    stops: tuple[int, ...]  # each ends the text that fills the gap

    def prompt(
        self, prefix: Sequence[int], suffix: Sequence[int], middle: Sequence[int] = ()
    ) -> list[int]:
        """The ids to continue; `middle` is how the text that fills the gap begins."""
        if self.middle is None:
            return [self.suffix, *suffix, self.prefix, *prefix, *middle]
        return [self.prefix, *prefix, self.suffix, *suffix, self.middle, *middle]


def find_infill(id_of: Callable[[str], int | None], named: Mapping[str, str]) -> Infill | None:
    """The model's tokens; None if it has none. `named`: spellings by `NAMES`, as far as its files have them."""
    families = list(FAMILIES)
    if all(name in named for name in NAMES[:3]):
        prefix, suffix, middle = (named[name] for name in NAMES[:3])
        families.insert(0, Spellings(prefix, suffix, middle, others=(named.get("eot_token", ""),)))
    for family in families:
        ids = [
            id_of(text) for text in (family.prefix, family.suffix, family.middle or family.prefix)
        ]
        prefix_id, suffix_id, middle_id = ids
        if prefix_id is None or suffix_id is None or middle_id is None:
            continue
        files = _known(id_of, family.file)
        own = [prefix_id, suffix_id, middle_id, *files, *_known(id_of, family.others)]
        return Infill(
            prefix=prefix_id,
            suffix=suffix_id,
            middle=middle_id if family.middle else None,
            file=files[0] if files else None,
            stops=tuple(dict.fromkeys(own)),
        )
    return None


def _known(id_of: Callable[[str], int | None], texts: Sequence[str]) -> list[int]:
    return [token for text in texts if text and (token := id_of(text)) is not None]
