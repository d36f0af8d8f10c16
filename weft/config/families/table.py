"""All architectures that weft reads, by their name in `config.json`."""

from __future__ import annotations

from dataclasses import replace

from weft.config.families import (
    allenai,
    baidu,
    cohere,
    deepseek,
    eleuther,
    gemma4,
    google,
    ibm,
    lg,
    liquid,
    llama_like,
    meta,
    microsoft,
    mistral,
    mixtures,
    openai,
    qwen,
    qwen_hybrid,
    ungated,
    with_encoder,
    zhipu,
)
from weft.config.families.family import Family

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
    **baidu.FAMILIES,
    **llama_like.FAMILIES,
    **ungated.FAMILIES,
    **mixtures.FAMILIES,
}
_BERT = Family(norm_eps_key="layer_norm_eps")
_ROBERTA = replace(_BERT, positions_begin_after_padding=True)
ENCODERS = {"Bert": _BERT, "Roberta": _ROBERTA, "XLMRoberta": _ROBERTA}


def _architectures() -> dict[str, Family]:
    found = {f"{name}ForCausalLM": family for name, family in DECODERS.items()}
    for kind, task in (("Model", "embed"), ("ForSequenceClassification", "classify")):
        for name, family in (DECODERS | ENCODERS).items():
            found[f"{name}{kind}"] = replace(family, task=task)
    for maker in (qwen, qwen_hybrid, google, gemma4, mistral, with_encoder):
        found.update(maker.ARCHITECTURES)
    return found


FAMILIES = _architectures()
