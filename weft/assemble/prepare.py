"""All checks and decisions about a model that come before heavy imports and loading.

Finds the folder, checks its files, and fits the settings to the machine. `build.py` loads the
weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from weft.assemble.checkpoint import check_files
from weft.assemble.draft_model import DraftModel, find_draft_model
from weft.assemble.model_config import COST, choose_model
from weft.assemble.model_folder import model_folder
from weft.config.encoder import without_kv
from weft.config.engine import EngineConfig
from weft.config.generation import FILE, sampling_defaults
from weft.config.kv_transfer import with_kv_transfer_config
from weft.config.machine import Machine, probe
from weft.config.model import BadCheckpoint, ModelConfig, ModelError, UnsupportedModel, own_code
from weft.config.numbers import counted
from weft.config.options import SettingsError
from weft.config.parallel import num_ranks
from weft.config.quantized import check_method
from weft.config.resolve import device_of, kept_as, resolve
from weft.config.sizing import Sizing
from weft.config.speculative_config import with_speculative_config
from weft.messages.sampling import InvalidParam, SamplingParams
from weft.observe.log import EventLog
from weft.ops.cpp.build import CannotBuild, find, find_compiler, find_or_build

if TYPE_CHECKING:
    from weft.text.media.families import ProcessorRecipe
    from weft.text.media.processor import MediaProcessor
    from weft.text.templates.chat_template import ChatTemplate
    from weft.text.tokenizer import Tokenizer

CONFIG_JSON = "config.json"
log = EventLog("serve")


class Prepared(NamedTuple):
    """A model with complete files, and settings that fit the model and the machine."""

    folder: Path
    model: ModelConfig  # its dtype is the one in which it will run
    config: EngineConfig  # resolved: no "auto" left
    sizing: Sizing
    sampling: SamplingParams  # defaults for requests that do not set their own
    draft: DraftModel | None = None  # None: no draft model
    gpu_uuid: str = ""  # of the GPU that computes; "": none, or it is not known


def _warn_of_threads(config: EngineConfig, machine: Machine) -> None:
    num_processes = max(num_ranks(config) // config.nnodes, 1)
    wanted = config.threads * num_processes
    if config.device == "cpu" and wanted > machine.cores:
        log.warning(
            f"--threads {config.threads} makes {counted(wanted, 'thread')} on "
            f"{counted(machine.cores, 'core')}: threads that wait for each other make every step "
            "slower; 0 takes the right number"
        )


def prepare(
    config: EngineConfig, machine: Machine | None = None, own: Collection[str] | None = None
) -> Prepared:
    """Find the model, check its files, and fit it to the machine. `own`: the settings that are for
    this model alone, None: all of them; of the others, those that it cannot have are left out.
    Raises SettingsError or ModelError."""
    config = with_kv_transfer_config(with_speculative_config(config))
    folder = model_folder(config)
    has_weights = config.load_format != "dummy"
    check_files(folder, weights=has_weights)
    model = choose_model(config, folder)
    if own is not None and model.is_encoder:
        config = without_kv(config, own)
    if has_weights:
        check_method(config.quantization, model.stored, model.name)
    if model.library_config:
        log.warning(
            f"{model.architecture} is run by the code of transformers (--model-impl), {COST}"
        )
    code = own_code(folder)
    if code:
        log.warning(
            f"{model.name} brings its own code ({code}), which weft never runs; weft serves it "
            f"as a {model.architecture}"
        )
    _check_profile_dir(config.profile_dir)
    # From here on no "auto" is left: the settings say what runs.
    machine = machine or probe()
    _warn_of_build(config, machine)
    needs_kernels = model.stored.has_codes or num_ranks(config) > 1
    if needs_kernels and not has_kernels(config):
        machine = replace(machine, has_kernels=False)
    draft = find_draft_model(config, folder, model)
    if draft is not None:
        config = replace(config, draft_model=str(draft.folder))
    resolved = resolve(config, model, machine, None if draft is None else draft.model)
    _warn_of_threads(resolved.config, machine)
    if machine.has_gpu_fault and config.device == "auto":
        log.warning(f"the CPU computes: {machine.no_gpu_reason}")
    pooling = kept_as(resolved.config, model).pooling
    model = replace(model, dtype=resolved.config.dtype, pooling=pooling)
    sampling = _sampling(config.generation_config, folder, model)
    gpu_uuid = ""
    if resolved.config.device == "cuda" and machine.gpus:
        gpu_uuid = machine.gpus[0].uuid
    return Prepared(folder, model, resolved.config, resolved.sizing, sampling, draft, gpu_uuid)


def _check_profile_dir(folder: str) -> None:
    """Make the folder for traces, if it is not there. Raises SettingsError if it cannot be made or
    written to."""
    if not folder:
        return
    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        reason = exc.strerror or str(exc)
        raise SettingsError(f"--profile-dir is {folder!r}, which cannot be made: {reason}") from exc
    if not os.access(path, os.W_OK | os.X_OK):
        raise SettingsError(f"--profile-dir is {folder!r}, into which this user cannot write")


def _warn_of_build(config: EngineConfig, machine: Machine) -> None:
    """Say what the start waits for."""
    if device_of(config, machine) != "cpu" or config.kernels == "torch":
        return
    try:
        is_there = find(_named_set(config)) is not None
        if not is_there:
            find_compiler()
    except CannotBuild:
        return
    if not is_there:
        log.warning(
            "the CPU kernels are compiled for this machine, which takes a minute or two; the next "
            "start finds them"
        )


def has_kernels(config: EngineConfig) -> bool:
    """Whether kernels for this processor exist or can be built. Only kernels compute with codes."""
    if config.kernels == "torch":
        return False
    try:
        find_or_build(_named_set(config))
    except CannotBuild:
        return False
    return True


def _named_set(config: EngineConfig) -> str:
    return config.kernels if config.kernels != "auto" else ""


def _sampling(source: str, folder: Path, model: ModelConfig) -> SamplingParams:
    """The model's own sampling parameters, if `source` asks for them.

    Raises ModelError for a parameter out of range.
    """
    own = sampling_defaults(source, folder)
    params = msgspec.structs.replace(SamplingParams(), **own)
    try:
        params.check(model.vocab_size)
    except InvalidParam as exc:
        raise UnsupportedModel(f"{FILE}: {exc} (--generation-config none ignores it)") from exc
    if own:
        log.info("sampling_defaults", **own)
    return params


def load_tokenizer(folder: Path) -> Tokenizer:
    """The model's tokenizer. Raises BadCheckpoint."""
    from weft.text.tokenizer import Tokenizer, TokenizerError

    try:
        return Tokenizer.load(folder)
    except TokenizerError as exc:
        raise BadCheckpoint(str(exc)) from exc


def load_processor(prepared: Prepared) -> MediaProcessor | None:
    """The processor that prepares pictures, videos and sounds for the model; None if the model
    takes only text.

    Raises ModelError for settings of the model that the processor does not support, and
    SettingsError for invalid changes of them (`mm_processor_kwargs`).
    """
    folder, model = prepared.folder, prepared.model
    kwargs = prepared.config.mm_processor_kwargs
    if model.vision is None:
        if kwargs:
            raise SettingsError(
                f"--mm-processor-kwargs is {kwargs[:200]!r}, but {model.name} takes only text"
            )
        return None
    from weft.text.media.adjusted import adjusted, read_kwargs
    from weft.text.media.families import make_processor

    config_json = json.loads((folder / CONFIG_JSON).read_text("utf-8"))
    try:
        processor = make_processor(folder, config_json)
    except ModelError:
        raise
    except (OSError, ValueError) as exc:
        raise UnsupportedModel(f"{model.name} is not served with pictures: {exc}") from exc
    if processor is None or not kwargs:
        return processor
    try:
        return adjusted(processor, read_kwargs(kwargs))
    except ValueError as exc:
        raise SettingsError(f"--mm-processor-kwargs: {exc}") from exc


def load_recipe(prepared: Prepared) -> ProcessorRecipe | None:
    """The recipe of `load_processor`, for a server, which needs processors in several processes.
    None if the model takes only text. Raises the same."""
    if load_processor(prepared) is None:
        return None
    from weft.text.media.adjusted import read_kwargs
    from weft.text.media.families import read_recipe

    return read_recipe(prepared.folder, read_kwargs(prepared.config.mm_processor_kwargs))


def load_template(tokenizer: Tokenizer) -> ChatTemplate | None:
    """The model's chat template, if it has one. Raises BadCheckpoint."""
    from weft.text.templates.chat_template import ChatTemplate, TemplateError

    if not tokenizer.chat_templates:
        return None
    try:
        return ChatTemplate(tokenizer.chat_templates, tokenizer.special_tokens)
    except TemplateError as exc:
        raise BadCheckpoint(str(exc)) from exc
