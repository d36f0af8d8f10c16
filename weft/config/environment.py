"""Names the environment variables WEFT_... that no command reads: a misspelt setting must not be
silent. It does not read their values for any setting.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator, Mapping

from weft.config.options import ENV_PREFIX, did_you_mean, options_of

# Variables that are not options of a command.
OTHERS = (
    "WEFT_CACHE",
    "WEFT_CONFIG",
    "WEFT_DEFAULT_MODEL",
    "WEFT_DIST_SECRET",
    "WEFT_HANDOFF_SECRET",
    "WEFT_API_KEY",
    "WEFT_ADMIN_API_KEY",
    "WEFT_ISA",
    "WEFT_MODELS_DIR",
    "WEFT_PYTHON",
    "WEFT_URL",
)
# The settings of all commands; those that import the least come first.
CONFIGS = (
    "weft.config.engine:EngineConfig",
    "weft.config.server:ServerConfig",
    "weft.config.limits:Limits",
    "weft.config.several:ModelsConfig",
    "weft.config.several:ModelTable",
    "weft.config.relay:RelayConfig",
    "weft.cli.generate:GenerateOptions",
    "weft.cli.batch:BatchOptions",
    "weft.cli.generate:SamplingOptions",
    "weft.cli.agents.launch:LaunchOptions",
    "weft.cli.chat:ChatOptions",
    "weft.cli.store.pull:PullOptions",
    "weft.cli.store.list:ListOptions",
    "weft.cli.store.show:ShowOptions",
    "weft.cli.store.rm:RemoveOptions",
    "weft.cli.store.cp:CopyOptions",
)
# Commands with many more settings, whose modules take long to import: their own variables are known
# by the name of the setting.
MODULES = (
    "weft.bench.freeze",
    "weft.bench.offline",
    "weft.bench.prediction",
    "weft.bench.quality",
    "weft.bench.roofline",
    "weft.bench.scheduler",
    "weft.bench.serving",
    "weft.cli.capacity.options",
    "weft.cli.capacity.tune",
    "weft.cli.replay",
    "weft.cli.sim",
    "weft.sim.synthetic",
)
# Kubernetes sets these for each service whose name begins with "weft".
OF_SERVICES = re.compile(
    r"\w+_(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)


def warn_of_variables(environ: Mapping[str, str]) -> None:
    """Write a line to standard error for each variable that no command reads."""
    for line in unknown_variables(environ):
        print(f"weft: warning: {line}", file=sys.stderr)


def unknown_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """A text for each variable that no command reads, with a similar one that is read."""
    given = {name for name in environ if name.startswith(ENV_PREFIX)} - set(OTHERS)
    given = {name for name in given if not _is_of_service(name, environ[name])}
    known: set[str] = set(OTHERS)
    of_servers: set[str] = set()
    elsewhere: dict[str, str] = {}  # the variable of an option, by its names in other engines
    for path in CONFIGS:
        if not given - known:
            return
        module, _, name = path.partition(":")
        config = getattr(importlib.import_module(module), name)
        known |= _variables(config)
        for option in options_of(config):
            elsewhere |= dict.fromkeys(option.elsewhere, option.env)
        if path.startswith("weft.config."):
            of_servers = known - set(OTHERS)
    for path in MODULES:
        if not given - known:
            return
        for config in vars(importlib.import_module(path)).values():
            if isinstance(config, type) and config.__module__ == path:
                known |= _variables(config)
    likely = [name.removeprefix(ENV_PREFIX) for name in (*sorted(of_servers), *OTHERS)]
    for name in sorted(given - known):
        ours = elsewhere.get(name.removeprefix(ENV_PREFIX).lower())
        if ours is not None:
            yield f"nothing reads the variable {name}; its name in weft is {ours}"
            continue
        hint = did_you_mean(name.removeprefix(ENV_PREFIX), likely)
        yield f"nothing reads the variable {name}{hint.replace('mean ', 'mean ' + ENV_PREFIX)}"


def _variables(config: type) -> set[str]:
    fields = getattr(config, "__dataclass_fields__", {})
    if not any("option" in field.metadata for field in fields.values()):
        return set()
    return {option.env for option in options_of(config)}


def _is_of_service(name: str, value: str) -> bool:
    is_port = name.endswith("_PORT") and value.startswith(("tcp://", "udp://", "sctp://"))
    return is_port or OF_SERVICES.fullmatch(name) is not None
