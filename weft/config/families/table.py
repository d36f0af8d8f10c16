"""All architectures that weft reads, by their name in `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from weft.config.families import (
    allenai,
    cohere,
    deepseek,
    eleuther,
    gemma4,
    google,
    ibm,
    lg,
    liquid,
    meta,
    microsoft,
    mistral,
    openai,
    others,
    pictures,
    qwen,
    qwen_hybrid,
    sound,
    zhipu,
)
from weft.config.families.family import Family
from weft.config.plugins import plugins, refused

ENCODER_ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")

DECODERS: dict[str, Family] = {
    **meta.FAMILIES,
    **mistral.FAMILIES,
    **qwen.FAMILIES,
    **qwen_hybrid.FAMILIES,
    **google.FAMILIES,
    **microsoft.FAMILIES,
    **ibm.FAMILIES,
    **lg.FAMILIES,
    **allenai.FAMILIES,
    **cohere.FAMILIES,
    **deepseek.FAMILIES,
    **eleuther.FAMILIES,
    **zhipu.FAMILIES,
    **openai.FAMILIES,
    **liquid.FAMILIES,
    **others.FAMILIES,
}
_BERT = Family(norm_eps_key="layer_norm_eps")
_ROBERTA = replace(_BERT, positions_begin_after_padding=True)
ENCODERS = {"Bert": _BERT, "Roberta": _ROBERTA, "XLMRoberta": _ROBERTA}


def _of_decoders(
    decoders: Mapping[str, Family], encoders: Mapping[str, Family]
) -> dict[str, Family]:
    """What decoders and encoders can be: models that generate, embed and classify."""
    found = {f"{name}ForCausalLM": family for name, family in decoders.items()}
    for kind, task in (("Model", "embed"), ("ForSequenceClassification", "classify")):
        for name, family in {**decoders, **encoders}.items():
            found[f"{name}{kind}"] = replace(family, task=task)
    return found


def _architectures() -> dict[str, Family]:
    found = _of_decoders(DECODERS, ENCODERS)
    for maker in (qwen, qwen_hybrid, google, gemma4, mistral, pictures, sound):
        found.update(maker.ARCHITECTURES)
    return found


FAMILIES = _architectures()


def add_outside(setting: str) -> None:
    """Add the families of `--plugins`. Raises SettingsError for one that is there already."""
    for name, own in plugins(setting, "families"):
        if not isinstance(own, dict) or not all(isinstance(one, Family) for one in own.values()):
            raise refused("families", name, "is no dict of weft.config.families.family.Family")
        for architecture, family in _of_decoders(own, {}).items():
            before = FAMILIES.setdefault(architecture, family)
            if before != family:
                raise refused("families", name, f"has {architecture}, which is there already")
