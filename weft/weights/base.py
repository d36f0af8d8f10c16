"""The names of tensors within a base model. A checkpoint contains the base model alone, or inside a
larger model, whose names have a prefix of their own."""

from __future__ import annotations

# The prefixes of a base model inside larger models; alone it has no prefix.
BASES = (
    "model.language_model.",
    "model.text_model.",
    "language_model.model.",
    "language_model.",
    "model.",
    "bert.",
    "distilbert.transformer.",
    "distilbert.",
    "electra.",
    "deberta.",
    "mpnet.",
    "nomic_bert.",
    "roberta.",
    "gpt_neox.",
    "backbone.",
    "transformer.",
)
# Prefixes within the base model that checkpoints write in two ways.
PARTS = {"vision_tower.vision_model.": "vision_tower."}
# Names of tensors in older checkpoints, and their present names.
OLD_NAMES = {"embed_out.weight": "lm_head.weight"}


def in_base(name: str) -> str:
    """A tensor's name within the base model; unchanged for a tensor outside of it."""
    for base in BASES:
        if name.startswith(base):
            name = name.removeprefix(base)
            break
    for longer, part in PARTS.items():
        if name.startswith(longer):
            return part + name.removeprefix(longer)
    return OLD_NAMES.get(name, name)
