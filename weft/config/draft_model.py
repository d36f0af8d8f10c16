"""Which sources of drafts a server uses; a draft model (`--draft-model`) beside a target model: its
settings, and the check that it can guess for the target model.

A draft model runs in the dtypes of its target model. Its vocabulary is not part of its
configuration; `assemble/draft_model.py` compares it.
"""

from __future__ import annotations

from dataclasses import replace

from weft.config.drafts import AUTO, MODEL, OFF, OWN_STEPS, all_sources, parse_draft_sources
from weft.config.engine import EngineConfig
from weft.config.gpu import STORED
from weft.config.model import ModelConfig
from weft.config.options import SettingsError


def kind_of(draft: ModelConfig | None) -> str:
    """The source of drafts that a draft model is, one of `OWN_STEPS`; "" without one."""
    if draft is None:
        return ""
    return MODEL if draft.head is None else draft.head.kind


def draft_sources(config: EngineConfig, model: ModelConfig, draft: ModelConfig | None) -> str:
    """The sources of drafts. `config` has its device. Raises SettingsError."""
    if config.ngram_min > config.ngram_max:
        raise SettingsError(
            f"--ngram-min is {config.ngram_min}, above --ngram-max ({config.ngram_max})"
        )
    hindrance = no_drafts(config, model)
    if config.speculative == AUTO:
        # The gain of drafts on a GPU has not been measured.
        is_off = hindrance or config.device == "cuda"
        return OFF if is_off else all_sources(kind_of(draft))
    if parse_draft_sources(config.speculative, "--speculative") and hindrance:
        raise SettingsError(
            f"--speculative is {config.speculative}, but {hindrance}; {OFF} is allowed"
        )
    return config.speculative


def no_drafts(config: EngineConfig, model: ModelConfig) -> str:
    """The reason why drafts are impossible; "" if they are possible."""
    if config.split_prefill_layers:
        return (
            "there are no drafts while prefills are split (--split-prefill-layers is "
            f"{config.split_prefill_layers})"
        )
    if model.is_encoder:
        return f"{model.name} is an encoder, which generates nothing"
    if model.state_bytes and config.pp_size > 1:
        return (
            f"{model.name} has layers that keep a state, which stages do not take back to before a "
            "draft (--pp-size)"
        )
    return ""


def no_draft_model(config: EngineConfig, model: ModelConfig) -> str:
    """The reason why a draft model cannot be used; "" if it can."""
    if config.device == "cuda":
        return "a draft model runs on a CPU only, and --device is cuda"
    if config.overlap and config.pp_size > 1:
        return "a draft model needs known tokens, and stages work at different steps (--overlap)"
    return no_drafts(config, model)


def no_head(config: EngineConfig, model: ModelConfig) -> str:
    """The reason why a head cannot be used; "" if it can."""
    if model.library_config:
        return f"{model.name} is run by the code of transformers, which keeps no hidden states"
    if model.decoder.cross is not None:
        return f"{model.name} reads an encoder, which a head does not"
    if config.enable_dp_attention:
        return "the steps of all engines run together, and a head has some of its own"
    if config.pp_size > 1:
        return "a head reads states of layers that are in several processes (--pp-size)"
    if config.nnodes > 1:
        return "a head is read by the ranks of one machine, and --nnodes is above 1"
    return no_draft_model(config, model)


def draft_settings(config: EngineConfig) -> EngineConfig:
    """The settings of the draft model that `config` names."""
    return replace(
        config,
        model=config.draft_model,
        draft_model="",
        revision="",
        tokenizer="",
        load_format="dummy" if config.load_format == "dummy" else "auto",
        quantization="auto",
        model_impl="auto",
        task="generate",
        max_loaded_loras=0,
    )


def runs_as(config: EngineConfig, draft: ModelConfig) -> EngineConfig:
    """The settings with which the draft model runs. `config` is resolved."""
    settings = draft_settings(config)
    if settings.quantize == STORED and not draft.stored.has_codes:
        # A guess changes no answer, so a head beside a model of few bits has eight.
        settings = replace(settings, quantize="none" if draft.head is None else "int8")
    return settings


def check_draft_model(config: EngineConfig, draft: ModelConfig | None, hindrance: str) -> None:
    """Raise SettingsError if there is a draft model that cannot be used, or if none is given but
    `speculative` needs one.

    `config` has its sources of drafts. `hindrance`: why drafts are impossible; "" if they are
    possible.
    """
    asked = parse_draft_sources(config.speculative, "--speculative")
    is_asked = kind_of(draft) in asked
    for name in OWN_STEPS:
        if name in asked and name != kind_of(draft):
            missing = "no draft model is given" if name == MODEL else f"no {name} head is given"
            raise SettingsError(
                f"--speculative is {config.speculative}, but {missing}: --draft-model names one"
            )
    if draft is None:
        return
    why = hindrance or _unfit(draft)
    if not why and not is_asked:
        why = f"--speculative is {config.speculative}, which does not use it"
    if why:
        raise SettingsError(f"--draft-model is {config.draft_model}, but {why}")


def _unfit(draft: ModelConfig) -> str:
    """The reason why this model cannot guess for another; "" if it can."""
    if draft.head is not None:
        return ""
    if draft.is_encoder:
        return "that is an encoder, which generates nothing"
    if draft.state_bytes:
        return "its layers keep a state, which cannot go back to before a draft"
    if draft.library_config:
        return (
            f"{draft.architecture} is run by the code of transformers, which would be no faster "
            "than what it guesses for"
        )
    return ""
