"""The names of tensors within a base model: checkpoints have it by itself, or inside of a larger
one, under another beginning for each."""

from __future__ import annotations

# The name of a base model inside of a larger one; by itself it has none.
BASES = (
    "model.language_model.",
    "model.text_model.",
    "language_model.model.",
    "language_model.",
    "model.",
    "bert.",
    "roberta.",
    "gpt_neox.",
)
# Beginnings within it that checkpoints write in two ways.
PARTS = {"vision_tower.vision_model.": "vision_tower."}
# Names that older checkpoints have for a tensor.
OLD_NAMES = {"embed_out.weight": "lm_head.weight"}


def in_base(name: str) -> str:
    """A tensor's name within the base model, or as it is if it stands outside."""
    for base in BASES:
        if name.startswith(base):
            name = name.removeprefix(base)
            break
    for longer, part in PARTS.items():
        if name.startswith(longer):
            return part + name.removeprefix(longer)
    return OLD_NAMES.get(name, name)
