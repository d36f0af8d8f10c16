"""All kinds of adapters, by "peft_type". Every module of this folder with a table `KINDS` adds its
own, so a new kind is one file."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from weft.executor.lora import kinds
from weft.executor.lora.kinds.kind import AdapterError, AdapterKind, short
from weft.json_types import JsonMapping

THIS = "table"


def _kinds() -> dict[str, AdapterKind]:
    found: dict[str, AdapterKind] = {}
    for module in iter_modules(kinds.__path__):
        if module.name != THIS:
            table = getattr(import_module(f"{kinds.__name__}.{module.name}"), "KINDS", {})
            assert not found.keys() & table.keys(), f"two kinds are {found.keys() & table.keys()}"
            found.update(table)
    return found


KINDS = _kinds()


def kind_of(config: JsonMapping) -> AdapterKind:
    """The kind of an adapter with this adapter_config.json. Raises AdapterError."""
    name = config.get("peft_type")
    if not isinstance(name, str) or name not in KINDS:
        one = len(KINDS) == 1
        supported = f"only {next(iter(KINDS))} is" if one else f"{', '.join(KINDS)} are"
        raise AdapterError(f"peft_type is {short(name)}; {supported} supported")
    return KINDS[name]
