"""Parts that come from outside of weft: `--plugins KIND=NAME,...`.

A name is `module:Object`, or the name of an entry point of the group `weft.KIND` of an installed
package. Nothing is loaded that no setting names. This module does not know what an object of a kind
must be: whoever uses it looks at it, and refuses it before anything is served.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from weft.config.engine import GPU_ATTENTION_BACKENDS
from weft.config.options import SettingsError, did_you_mean

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

COLON = ":"
BACKENDS = "weft.attention_backends"  # group of entry points for --attention-backend
# Kind → what its objects are. The group of a kind's entry points is `weft.KIND`.
KINDS = {
    "control": "a control request with its handler, route and command",
    "routes": "routes of the server",
    "passes": "a pass around the computation of steps",
    "kv_groups": "layers with memory of their own",
    "families": "families of models",
    "tiers": "a store of KV outside of the pool",
}


class PluginError(ValueError):
    """An object from outside cannot be loaded or used; the message says why."""


class OutsideFault(RuntimeError):
    """Code from outside raised, or gave something of no use: the device itself is well. The message
    names the plugin."""


class Plugin(NamedTuple):
    kind: str
    name: str


def parse_plugins(text: str) -> list[Plugin]:
    """The plugins of a setting, in order. Raises PluginError."""
    found = []
    for word in filter(None, map(str.strip, text.split(","))):
        kind, equals, name = word.partition("=")
        if not equals or not name:
            raise PluginError(f"{word!r} is not KIND=module:Name")
        if kind not in KINDS:
            raise PluginError(f"there is no kind {kind!r}; the kinds are {', '.join(KINDS)}")
        found.append(Plugin(kind, name))
    return found


def why_no_plugins(text: str) -> str:
    """Why a value of `--plugins` cannot be read; empty if it can."""
    try:
        parse_plugins(text)
    except PluginError as exc:
        return str(exc)
    return ""


def plugin_names(
    text: str,
    kind: str,
) -> tuple[str, ...]:
    return tuple(plugin.name for plugin in parse_plugins(text) if plugin.kind == kind)


def plugins(
    text: str,
    kind: str,
) -> list[tuple[str, object]]:
    """Name and object of each plugin of a kind. Raises SettingsError."""
    found = []
    for name in plugin_names(text, kind):
        try:
            found.append((name, load_object(name, f"weft.{kind}")))
        except PluginError as exc:
            raise SettingsError(f"--plugins: {kind}={name}: {exc}") from exc
    return found


def refused(
    kind: str,
    name: str,
    why: str,
) -> SettingsError:
    """The error for an object that is not what its kind needs."""
    return SettingsError(f"--plugins: {kind}={name} {why}")


def why_no_backend(name: str) -> str:
    """Why this is no name of an attention backend; empty if it may be one. Nothing is loaded."""
    if COLON in name or any(True for _ in _points(name, BACKENDS)):
        return ""
    known = ("auto", "torch", *GPU_ATTENTION_BACKENDS)
    return (
        f"it is neither a backend of weft ({', '.join(known)}), nor module:Class, nor an entry "
        f"point of the group {BACKENDS}{did_you_mean(name, known)}"
    )


def load_object(
    name: str,
    group: str,
) -> object:
    """The object `module:Object`, or that of the entry point `name` of a group.

    Raises PluginError.
    """
    try:
        return _of_module(name) if COLON in name else _of_package(name, group)
    except PluginError:
        raise
    except (Exception, SystemExit) as exc:  # a script may end when it is imported
        raise PluginError(f"it could not be loaded: {type(exc).__name__}: {exc}") from exc


def _of_module(name: str) -> object:
    module_name, _, object_name = name.partition(COLON)
    module_name = module_name.strip()
    object_name = object_name.strip()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        if exc.name and module_name.startswith(exc.name):
            raise PluginError(
                f"it could not be loaded: there is no module {exc.name!r} where Python looks for "
                "modules; PYTHONPATH=FOLDER adds the folder of its file (PYTHONPATH=. for this one)"
            ) from exc
        raise
    found: object = getattr(module, object_name, None)
    if found is None:
        raise PluginError(f"{module_name} has no {object_name!r}")
    return found


def _points(name: str, group: str) -> Iterable[EntryPoint]:
    """The entry points of this name, of all installed packages."""
    from importlib.metadata import entry_points  # it takes a moment, and few need it

    return entry_points(group=group, name=name)


def _of_package(
    name: str,
    group: str,
) -> object:
    for point in _points(name, group):
        found: object = point.load()
        return found
    raise PluginError(f"no installed package has it as an entry point of the group {group}")
