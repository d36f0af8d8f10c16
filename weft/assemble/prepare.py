"""Everything that can be checked and decided about a model before anything heavy is imported or loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from weft.assemble.checkpoint import check_files
from weft.config.engine import EngineConfig
from weft.config.generation import FILE, sampling_defaults
from weft.config.machine import Machine, probe
from weft.config.model import BadCheckpoint, ModelConfig, UnsupportedModel, own_code
from weft.config.resolve import Sizing, kept_as, resolve
from weft.executor.weights.fetch import local_folder
from weft.messages.sampling import InvalidParam, SamplingParams
from weft.observe.log import EventLog

if TYPE_CHECKING:
    from weft.text.templates.chat_template import ChatTemplate
    from weft.text.tokenizer import Tokenizer

log = EventLog("serve")


class Prepared(NamedTuple):
    folder: Path
    model: ModelConfig  # in the dtype in which it will run
    config: EngineConfig  # with no "auto" left
    sizing: Sizing
    sampling: SamplingParams  # of requests that do not say otherwise


def prepare(config: EngineConfig, machine: Machine | None = None) -> Prepared:
    """Find the model, check its files, and fit it to the machine. Raises SettingsError or ModelError."""
    folder = local_folder(config.model, config.revision)
    check_files(folder, weights=config.load_format != "dummy")
    model = ModelConfig.from_folder(folder, Path(config.model).name)
    if code := own_code(folder):
        log.warning(
            f"{model.name} brings code of its own ({code}), which is never run; it is a {model.architecture}"
        )
    machine = machine or probe()
    resolved = resolve(config, model, machine)
    if machine.has_gpu_fault and config.device == "auto":
        log.warning(f"the CPU computes: {machine.no_gpu_reason}")
    pooling = kept_as(resolved.config, model).pooling
    model = replace(model, dtype=resolved.config.dtype, pooling=pooling)
    return Prepared(
        folder,
        model,
        resolved.config,
        resolved.sizing,
        _sampling(config.generation_config, folder, model),
    )


def _sampling(source: str, folder: Path, model: ModelConfig) -> SamplingParams:
    """The model's own sampling parameters, if they are wanted. Raises ModelError for one out of range."""
    given = sampling_defaults(source, folder)
    params = msgspec.structs.replace(SamplingParams(), **given)
    try:
        params.check(model.vocab_size)
    except InvalidParam as exc:
        raise UnsupportedModel(f"{FILE}: {exc} (--generation-config none ignores it)") from exc
    if given:
        log.info("sampling_defaults", **given)
    return params


def load_tokenizer(folder: Path) -> Tokenizer:
    """The model's tokenizer. Raises BadCheckpoint."""
    from weft.text.tokenizer import Tokenizer, TokenizerError

    try:
        return Tokenizer.load(folder)
    except TokenizerError as exc:
        raise BadCheckpoint(str(exc)) from exc


def load_template(tokenizer: Tokenizer) -> ChatTemplate | None:
    """The model's chat template, if it has one. Raises BadCheckpoint."""
    from weft.text.templates.chat_template import ChatTemplate, TemplateError

    if not tokenizer.chat_templates:
        return None
    try:
        return ChatTemplate(tokenizer.chat_templates, tokenizer.special_tokens)
    except TemplateError as exc:
        raise BadCheckpoint(str(exc)) from exc
