"""Adapters (LoRA): reads `--lora-paths`, which names them with their folders in the forms of
several engines, and decides how many are in memory."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import NamedTuple

from weft.config.engine import EngineConfig
from weft.config.model import ModelConfig
from weft.config.options import SettingsError
from weft.config.projections import EXPERTS, Targets, adapter_bytes, projections, target_of

FORMS = 'NAME=FOLDER, a folder, or {"lora_name": NAME, "lora_path": FOLDER} are allowed'
KEYS = ("lora_name", "lora_path", "pinned")
ALSO = {"name": "lora_name", "path": "lora_path"}  # vLLM's keys
MAX_NAME_LEN = 256  # characters
IGNORED = ("base_model_name",)  # vLLM's key; there is only one model


class LoraPath(NamedTuple):
    """An adapter to load."""

    name: str
    path: str  # path of its folder
    pinned: bool = False


def parse_lora_paths(text: str, source: str = "--lora-paths") -> tuple[LoraPath, ...]:
    """The adapters that a text names. Raises SettingsError, which names `source`."""
    found: list[LoraPath] = []
    for line in text.splitlines():
        for one in _read_line(line.strip(), source):
            if one.name in [other.name for other in found]:
                raise SettingsError(f"{source} names the adapter {one.name!r} twice")
            found.append(one)
    return tuple(found)


def _read_line(line: str, source: str) -> list[LoraPath]:
    if line.startswith(("{", "[")):
        try:
            content = json.loads(line)
        except ValueError as exc:
            raise SettingsError(f"{source} is not valid JSON: {exc}; {FORMS}") from exc
        items = content if isinstance(content, list) else [content]
        found = []
        for item in items:
            if isinstance(item, str):
                found.append(_from_word(item, source))
            else:
                found.append(_from_object(item, source))
        return found
    return [_from_word(word.strip(), source) for word in line.split(",") if word.strip()]


def _from_word(word: str, source: str) -> LoraPath:
    name, equals, path = word.partition("=")
    if not equals:
        path = name
    return _checked(LoraPath(name.strip(), path.strip()), source)


def _from_object(item: object, source: str) -> LoraPath:
    if not isinstance(item, dict):
        raise SettingsError(f"{source} has {item!r}; {FORMS}")
    known = {ALSO.get(key, key): value for key, value in item.items() if key not in IGNORED}
    for key in known:
        if key not in KEYS:
            raise SettingsError(f"{source} has the key {key!r}; {', '.join(KEYS)} are allowed")
    name = known.get("lora_name", known.get("lora_path"))
    path = known.get("lora_path")
    pinned = known.get("pinned", False)
    if not (isinstance(name, str) and isinstance(path, str) and isinstance(pinned, bool)):
        raise SettingsError(f"{source} has {json.dumps(item)}; {FORMS}")
    return _checked(LoraPath(name, path, pinned), source)


def _checked(one: LoraPath, source: str) -> LoraPath:
    why_not = wrong_name(one.name)
    if why_not:
        raise SettingsError(f"{source}: {why_not}")
    if not one.path:
        raise SettingsError(f"{source} names no folder for the adapter {one.name!r}; {FORMS}")
    return one


def wrong_name(name: str) -> str:
    """The reason why an adapter cannot have this name; "" if it can."""
    if not name or len(name) > MAX_NAME_LEN or not name.isprintable():
        shown = name[:64]
        return (
            f"an adapter cannot have the name {shown!r}; "
            f"1 to {MAX_NAME_LEN} printable characters are allowed"
        )
    return ""


def with_adapters(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """The settings with the maximal number of adapters in memory; 0: none. `config` has its device.
    Raises SettingsError if adapters are requested but cannot be computed, or for too many."""
    named = parse_lora_paths(config.lora_paths)
    if not config.enable_lora and not named and not config.lora_dir:
        return replace(config, max_loaded_loras=0)
    why_not = why_no_adapters(config, model)
    if why_not:
        raise SettingsError(f"--enable-lora: {why_not}")
    num_loaded = config.max_loaded_loras or max(config.max_loras_per_batch, len(named))
    if len(named) > num_loaded:
        raise SettingsError(
            f"--lora-paths names {len(named):,} adapters, but --max-loaded-loras is {num_loaded:,}"
        )
    targets = {target_of(name, one) for name, one in projections(model).items()} - {EXPERTS}
    for word in filter(None, (word.strip() for word in config.lora_full_modules.split(","))):
        if word not in targets:
            raise SettingsError(
                f"--lora-full-modules names {word[:64]!r}; {', '.join(sorted(targets))} are known"
            )
    num_pinned = sum(one.pinned for one in named)
    if num_pinned > config.max_loras_per_batch - 1:
        raise SettingsError(
            f"--lora-paths pins {num_pinned:,} adapters, but --max-loras-per-batch is "
            f"{config.max_loras_per_batch:,}: at most {config.max_loras_per_batch - 1:,} may be"
        )
    return replace(config, enable_lora=True, max_loaded_loras=num_loaded)


def why_no_adapters(config: EngineConfig, model: ModelConfig) -> str:
    """The reason why adapters cannot be computed for this model on this device; "" if they can."""
    if model.is_encoder:
        return f"{model.name} is an encoder, which takes no adapters"
    if model.library_config:
        return f"{model.name} is computed by the package transformers, which takes no adapter"
    if not projections(model):
        return f"{model.name} has no matrix that an adapter can change"
    by_kernels = config.device == "cuda" and config.attention_backend != "torch"
    if by_kernels and EXPERTS in Targets(config.lora_target_modules):
        return (
            "adapters of experts are computed on a CPU (--device cpu), or by torch alone "
            "(--attention-backend torch)"
        )
    return ""


def adapters_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Bytes of memory for all adapters that may be loaded."""
    if not config.max_loaded_loras:
        return 0
    return config.max_loaded_loras * adapter_bytes(
        model, config.max_lora_rank, config.lora_target_modules, config.lora_full_modules
    )
