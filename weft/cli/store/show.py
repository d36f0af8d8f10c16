"""The verb `show`: what a model is, from its files' headers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from weft.cli.readable import readable
from weft.cli.store.common import require_name, settings_of
from weft.config.amounts import count, size
from weft.config.options import Command, option
from weft.store.store import ModelStore

ABOUT = (
    "Show what a model of this machine is, from its files' own headers: family, parameters, size, "
    "quantisation, context length, digest. Nothing is loaded."
)
MOST_LINES = 8  # of a template


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    name: str = option("", "the model", group="show", everyday=True)
    models_dir: str = option(
        "", "folder with your own models (WEFT_MODELS_DIR)", group="show", everyday=True
    )
    template: bool = option(False, "print the chat template alone", group="show", everyday=True)
    json: bool = option(False, "print JSON", group="show", everyday=True)


def show(argv: Sequence[str]) -> int:
    """Run the verb. Returns the exit status."""
    settings = settings_of(
        Command("weft show", ABOUT, ShowOptions, positional="name", has_variables=False), argv
    )
    if settings is None:
        return 0
    options = settings.make(ShowOptions)
    store = ModelStore(options.models_dir)
    entry = store.find(require_name(options.name, "show"))
    found = store.details(entry)
    if options.template:
        print(found.template)
        return 0
    facts = found._asdict() | {"digest": store.digest(entry), "path": str(entry.path)}
    if options.json:
        print(json.dumps(facts, indent=2))
        return 0
    lines = {
        "name": found.name,
        "family": found.family,
        "architecture": found.architecture,
        "parameters": count(found.num_parameters),
        "size": size(found.size_bytes),
        "format": found.format,
        "quantisation": found.quantization,
        "context length": f"{found.context_length:,}",
        "layers": f"{found.num_layers}, {found.hidden_size:,} wide",
        "heads": f"{found.num_heads}, {found.num_kv_heads} of KV",
        "vocabulary": f"{found.vocab_size:,}",
        "template": _about_template(found.template),
        "license": found.license or "-",
        "digest": facts["digest"],
        "path": facts["path"],
        "served by weft": found.problem or "yes",
    }
    print("\n".join(readable(lines)))
    return 0


def _about_template(template: str) -> str:
    if not template:
        return "none"
    return f"{len(template):,} characters (--template prints it)"
