"""The verb `launch`: asks a server for its model, and starts a coding agent against it.

Everything after `--` belongs to the agent. It does not know how an agent is set up (`table.py`).
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.cli.agents.table import AGENTS, INSTALLERS, NO_KEY, Agent, AgentTarget, Setup
from weft.cli.remote import RemoteServer, ServedModel, served_models
from weft.config.options import Command, SettingsError, asked_help, did_you_mean, option

ABOUT = (
    "Start a coding agent against a running weft server, without touching its own settings: "
    f"{', '.join(AGENTS)}. Arguments behind -- go to the agent."
)
DEFAULT_URL = "http://127.0.0.1:30000"
SMALL_CONTEXT = 32_768  # agents begin with 10,000 to 25,000 tokens of instructions and tools
_FOLDER = "FOLDER"  # stands for the temporary folder where nothing is started
EXIT_NOT_FOUND = 127
ENDING = (signal.SIGTERM, signal.SIGHUP)  # the second: the terminal was closed


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    agent: str = option("", "the agent to start", group="launch", everyday=True)
    url: str = option(DEFAULT_URL, "server to use", group="launch", everyday=True)
    api_key: str = option(
        "", "key for the server (better: WEFT_API_KEY)", group="launch", everyday=True
    )
    agent_model: str = option(
        "",
        "model or adapter of the server to use, also --model (default: its first)",
        group="launch",
        everyday=True,
        aliases=("model",),
    )
    small_model: str = option(
        "", "model for titles and summaries (default: the same)", group="launch", everyday=True
    )
    print: bool = option(
        False,
        "show the command and its environment, and start nothing",
        group="launch",
        everyday=True,
    )


def launch(argv: Sequence[str]) -> int:
    """Run the verb. Returns the exit status: the agent's, if it was started."""
    words = list(argv)
    own_words = words[: words.index("--")] if "--" in words else words
    agent_words = words[len(own_words) + 1 :]
    command = Command("weft launch", ABOUT, LaunchOptions, positional="agent")
    section = asked_help(own_words)
    if section is not None:
        print(command.help(section))
        return 0
    options = command.read(own_words, os.environ).make(LaunchOptions)
    agent = _agent(options.agent)
    target = _target(options)
    if options.print:
        print(
            _shown(
                agent,
                agent.setup(target._replace(folder=_FOLDER, key=_shown_key(target))),
                agent_words,
            )
        )
        return 0
    path = shutil.which(agent.command)
    if path is None:
        print(_how_to_install(agent), file=sys.stderr)
        return EXIT_NOT_FOUND
    with tempfile.TemporaryDirectory(prefix=f"weft-{options.agent}-") as folder:
        setup = agent.setup(target._replace(folder=folder))
        for name, content in setup.files.items():
            (Path(folder) / name).write_text(content)
        return _run([path, *setup.arguments, *agent_words], {**os.environ, **setup.variables})


def _how_to_install(agent: Agent) -> str:
    text = f"weft: {agent.command} is not installed; this installs it:\n\n    {agent.install}\n"
    installer = agent.install.split()[0]
    if shutil.which(installer) is None:
        text += f"\n{INSTALLERS[installer]}\n"
    return text


def _agent(name: str) -> Agent:
    if name in AGENTS:
        return AGENTS[name]
    if not name:
        raise SettingsError(f"name an agent: {', '.join(AGENTS)}")
    hint = did_you_mean(name, AGENTS)
    raise SettingsError(f"{name!r} is not one of the agents {', '.join(AGENTS)}{hint}")


def _target(options: LaunchOptions) -> AgentTarget:
    """The server and its model. Raises SettingsError if the server has not the wanted model."""
    server = RemoteServer(options.url, options.api_key)
    models = {model.name: model for model in served_models(server)}
    chosen = _chosen(models, options.agent_model, "--model")
    small = _chosen(models, options.small_model, "--small-model") if options.small_model else chosen
    if chosen.context_length < SMALL_CONTEXT:
        print(
            f"weft: {chosen.name} has a context of {chosen.context_length:,} tokens; agents need "
            f"{SMALL_CONTEXT:,} or more (weft serve --context-length)",
            file=sys.stderr,
        )
    return AgentTarget(
        server.url, chosen.name, small.name, chosen.context_length, "", options.api_key or NO_KEY
    )


def _chosen(models: dict[str, ServedModel], name: str, flag: str) -> ServedModel:
    if not name:
        return next(iter(models.values()))
    if name not in models:
        raise SettingsError(f"{flag} is {name!r}; the server has {', '.join(models)}")
    return models[name]


def _shown_key(target: AgentTarget) -> str:
    """The key as it may be shown: never the user's own."""
    return target.key if target.key == NO_KEY else "YOUR_KEY"


def _shown(agent: Agent, setup: Setup, words: Sequence[str]) -> str:
    """The start of an agent as lines of a shell."""
    lines = []
    if setup.files:
        lines.append(f"mkdir -p {_FOLDER}  # a folder of your choice")
    for name, content in setup.files.items():
        lines.append(f"cat > {_FOLDER}/{name} <<'END'\n{content}\nEND")
    lines += [f"export {name}={shlex.quote(value)}" for name, value in setup.variables.items()]
    lines.append(shlex.join([agent.command, *setup.arguments, *words]))
    return "\n".join(lines)


def _run(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run an agent in this terminal. Ctrl-C is the agent's: it may only interrupt an answer.

    What ends this process ends the agent first, so that its folder, which may have a key, goes too.
    """
    # Handlers are not inherited, unlike "ignore".
    before = {signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None)}
    try:
        agent = subprocess.Popen(command, env=environment)
        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` sets it
                before[number] = signal.signal(number, lambda number, _: agent.send_signal(number))
        status = agent.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status
