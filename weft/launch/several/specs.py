"""Which models a server offers, and the settings of each: from the command line, the tables of the
configuration file, and the folder of models. Nothing is loaded here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from weft.assemble.model_folder import model_folder, model_name
from weft.config.engine import EngineConfig
from weft.config.kv_events import Publisher, check_models
from weft.config.options import Settings, SettingsError
from weft.config.server import ServerConfig
from weft.config.several import ALONE, GROUP, ModelsConfig, ModelTable
from weft.observe.log import EventLog
from weft.store.store import ModelStore
from weft.weights.gguf import files

CONFIG_JSON = "config.json"
_PART = re.compile(r"-[0-9]{5}-of-[0-9]{5}$")
# No control characters; no name of another folder.
_NAME = re.compile(r"(?!\.{1,2}(?:/|$))[^\x00-\x1f\x7f\\]{1,128}")

log = EventLog("serve")


class ModelSpec(NamedTuple):
    """A model that the server offers."""

    name: str
    engine: EngineConfig  # not resolved
    server: ServerConfig
    aliases: tuple[str, ...] = ()
    pin: bool = False
    ttl_s: float = 0.0  # idle time after which it is unloaded; 0: none
    on_start: bool = False
    own: frozenset[str] = frozenset()  # names of the settings that its table has
    in_folder: bool = False  # it is offered as long as the folder of models or the store has it


def read_specs(settings: Settings, store: ModelStore) -> list[ModelSpec]:
    """All models, in the order of the command line, the tables, the store, the folder. Raises
    SettingsError and ModelError for a model that is named and is not there, and for wrong names."""
    _require_none_alone(settings)
    found = [*_from_words(settings), *_from_tables(settings)]
    taken = [name for spec in found for name in (spec.name, *spec.aliases)]
    for name in taken:
        _require_name(name)
        if taken.count(name) > 1:
            paths = [one.engine.model for one in found if name in (one.name, *one.aliases)]
            raise SettingsError(
                f"two models have the name {name!r}: {' and '.join(map(repr, paths))}; a table "
                "[models.NAME] of the configuration file gives one of them another name"
            )
    known = set(taken)
    found += [spec for spec in offered_later(settings, store) if spec.name not in known]
    check_models(_publishers(settings, found))
    return found


def _publishers(settings: Settings, specs: Sequence[ModelSpec]) -> Iterator[Publisher]:
    """The models that may publish KV events: those that there are, and any two that come later."""
    for spec in specs:
        yield Publisher(repr(spec.name), spec.engine.kv_events_config, spec.server.dp_size)
    several = settings.make(ModelsConfig)
    if several.models_dir or several.models_store:
        of_all = settings.make(EngineConfig).kv_events_config
        for name in ("a model that comes later", "another one"):
            yield Publisher(name, of_all, 1)


def _require_none_alone(settings: Settings) -> None:
    asked = settings.given(EngineConfig)
    for name, default in ALONE.items():
        if asked.get(name, default) != default:
            flag = "--" + name.replace("_", "-")
            raise SettingsError(
                f"{flag} is {asked[name]}, which a server with several models cannot have: start "
                "a server for that model"
            )
    if "served_model_name" in settings.given(ServerConfig):
        raise SettingsError(
            "--served-model-name is for a server with one model; a table [models.NAME] of the "
            "configuration file names one of several"
        )


def _require_name(name: str) -> None:
    if not _NAME.fullmatch(name) or "/../" in f"/{name}/":
        raise SettingsError(
            f"{name!r} cannot be the name of a model: 1 to 128 printable characters without "
            "'..' as a part are allowed"
        )


def _from_words(settings: Settings) -> Iterator[ModelSpec]:
    words = settings.words
    alone = settings.given(EngineConfig).get("model")
    if not words and alone:
        words = (alone,)
    for word in words:
        engine = replace(settings.make(EngineConfig), model=word)
        name = model_name(engine, model_folder(engine))
        yield _spec(settings, name, engine, ModelTable(), on_start=True)


def _from_tables(settings: Settings) -> Iterator[ModelSpec]:
    for name, own in settings.tables.get(GROUP, {}).items():
        table = own.make(ModelTable)
        merged = settings.with_values(own)
        engine = replace(merged.make(EngineConfig), model=table.path or name)
        model_folder(engine)  # raises an error if it is not there
        spec = _spec(merged, name, engine, table, on_start=table.on_start)
        yield spec._replace(own=frozenset(own.given(EngineConfig)))


def _spec(
    settings: Settings,
    name: str,
    engine: EngineConfig,
    table: ModelTable,
    *,
    on_start: bool,
) -> ModelSpec:
    of_all = settings.make(ModelsConfig)
    ttl_s = of_all.model_ttl_s if table.ttl_s < 0 else table.ttl_s
    server = replace(settings.make(ServerConfig), served_model_name=name)
    aliases = tuple(line for line in table.aliases.splitlines() if line)
    return ModelSpec(
        name, _with_own_files(engine, name), server, aliases, table.pin, ttl_s, on_start
    )


def from_folder(settings: Settings, folder: str) -> list[ModelSpec]:
    """The models of a folder: each folder with a config.json, and each GGUF file, by its name. What
    cannot be offered is logged, and left out. Raises SettingsError."""
    path = Path(folder).expanduser()
    try:
        entries = sorted(path.iterdir())
    except OSError as exc:
        raise SettingsError(
            f"--models-dir is {folder!r}, which cannot be read: {exc.strerror}"
        ) from exc
    found: dict[str, ModelSpec] = {}
    for entry in entries:
        name = _name_of(entry)
        if not name or name in found:
            continue
        why_not = _wrong_entry(entry, name)
        if why_not:
            log.seldom("not_offered", file=entry.name[:128], reason=why_not)
            continue
        engine = replace(settings.make(EngineConfig), model=str(entry))
        spec = _spec(settings, name, engine, ModelTable(), on_start=False)
        found[name] = spec._replace(in_folder=True)
    return list(found.values())


def from_store(settings: Settings, store: ModelStore) -> list[ModelSpec]:
    """The models of this machine, by the names that `weft list` shows."""
    found: list[ModelSpec] = []
    for entry in store.entries():
        if not entry.is_complete:
            continue
        try:
            _require_name(entry.name)
        except SettingsError as exc:
            log.seldom("not_offered", file=entry.path.name[:128], reason=exc)
            continue
        engine = replace(settings.make(EngineConfig), model=str(entry.path))
        spec = _spec(settings, entry.name, engine, ModelTable(), on_start=False)
        found.append(spec._replace(in_folder=True))
    return found


def offered_later(settings: Settings, store: ModelStore) -> list[ModelSpec]:
    """The models that may come and go while the server runs: those of the folder, and those of the
    store if it is offered. Raises SettingsError."""
    several = settings.make(ModelsConfig)
    found: dict[str, ModelSpec] = {}
    own_folder = Path(several.models_dir).expanduser()
    # `weft cp` makes the folder of the store.
    if several.models_dir and (own_folder.exists() or not several.models_store):
        found |= {spec.name: spec for spec in from_folder(settings, several.models_dir)}
    if several.models_store:
        found = {spec.name: spec for spec in from_store(settings, store)} | found
    return list(found.values())


def _name_of(entry: Path) -> str:
    """The name of the model of a file or folder; "" if it is none."""
    if entry.name.startswith("."):
        return ""
    if entry.name.endswith(files.SUFFIX):
        return _PART.sub("", entry.name.removesuffix(files.SUFFIX))
    if (entry / CONFIG_JSON).is_file() or entry.is_symlink():
        return entry.name
    return ""


def _wrong_entry(entry: Path, name: str) -> str:
    if not entry.exists():
        return "it is a link to something that is not there"
    if entry.is_dir() and not (entry / CONFIG_JSON).is_file():
        return f"it has no {CONFIG_JSON}"
    try:
        _require_name(name)
    except SettingsError as exc:
        return str(exc)
    return ""


def _with_own_files(engine: EngineConfig, name: str) -> EngineConfig:
    """The settings with folders of the model's own, where models cannot share one."""
    if engine.cache_dir:
        engine = replace(engine, cache_dir=str(Path(engine.cache_dir) / file_name(name)))
    return engine


def file_name(name: str) -> str:
    """The name of a model as the name of a file."""
    return name.replace("/", "--").replace(":", "-")


def names_of(specs: Sequence[ModelSpec]) -> str:
    return ", ".join(spec.name for spec in specs)
