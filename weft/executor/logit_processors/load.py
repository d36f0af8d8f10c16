"""Loads the logit processors of an engine: built-in ones, those of installed packages, and those in
files.

    installed    an entry point of the group `weft.logit_processors`: its name, and the class
    from a file  --logit-processors PATH.py[:Name],...: the class Name, or all classes in the file

All are loaded when the engine starts. The operator chooses them; requests contain no code.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

from weft.config.options import SettingsError
from weft.executor.logit_processors.disallowed import DisallowedTokens
from weft.executor.logit_processors.processor import LogitProcessor
from weft.executor.logit_processors.processors import Processors
from weft.ops import meta_kernels

GROUP = "weft.logit_processors"
READY_MADE: dict[str, type[LogitProcessor]] = {"disallowed_tokens": DisallowedTokens}


def load_processors(files: str) -> Processors:
    """Load all logit processors. `files`: the value of --logit-processors.

    Raises SettingsError if a processor cannot be loaded, or if two have the same name.
    """
    found: dict[str, LogitProcessor] = {}
    homes: dict[str, str] = {}
    for name, kind, home in _all(files):
        if name in found:
            raise SettingsError(
                f"two logit processors are called {name!r}: one of {homes[name]}, one of {home}"
            )
        if not (isinstance(kind, type) and issubclass(kind, LogitProcessor)):
            raise SettingsError(
                f"logit processor {name!r} of {home} is not a subclass of weft.LogitProcessor"
            )
        try:
            found[name], homes[name] = kind(), home
        except (Exception, SystemExit) as exc:
            raise SettingsError(
                f"logit processor {name!r} of {home} could not be made: {_named(exc)}"
            ) from exc
    return Processors(found)


def _all(files: str) -> Iterator[tuple[str, object, str]]:
    """Name, class and origin of each processor."""
    for name, kind in READY_MADE.items():
        yield name, kind, "weft"
    for point in entry_points(group=GROUP):
        home = f"the package {point.dist.name}" if point.dist is not None else point.value
        try:
            yield point.name, point.load(), home
        except (Exception, SystemExit) as exc:
            raise SettingsError(
                f"logit processor {point.name!r} of {home} could not be loaded: {_named(exc)}"
            ) from exc
    for number, entry in enumerate(filter(None, map(str.strip, files.split(",")))):
        yield from _of_file(entry, number)


def _of_file(entry: str, number: int) -> Iterator[tuple[str, object, str]]:
    path, _, name = entry.rpartition(":")
    if not path or not name.isidentifier():
        path = entry
        name = ""
    file = Path(path).expanduser()
    if file.suffix != ".py" or not file.is_file():
        raise SettingsError(
            f"--logit-processors: {path} is not a Python file; PATH.py or PATH.py:Name is needed"
        )
    module_name = f"weft_logit_processors_{number}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None, "a .py file has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    meta_kernels.register()
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as exc:  # a script may end when it is imported
        raise SettingsError(
            f"--logit-processors: {path} could not be loaded: {_named(exc)}"
        ) from exc
    own = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, LogitProcessor)
        and value.__module__ == module_name
    }
    if name and name not in own:
        raise SettingsError(
            f"--logit-processors: {path} defines no logit processor {name!r}; {_those(own)}"
        )
    if not own:
        raise SettingsError(
            f"--logit-processors: {path} defines no subclass of weft.LogitProcessor"
        )
    for key, value in own.items():
        if not name or key == name:
            yield key, value, path


def _those(own: dict[str, type[LogitProcessor]]) -> str:
    return f"it defines {', '.join(sorted(own))}" if own else "it defines none"


def _named(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}"
