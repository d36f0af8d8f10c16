"""The verb `chat`: a conversation in the terminal, with a model in this process or with a running
server.

Ctrl-C interrupts the current answer; at the prompt, Ctrl-C and Ctrl-D quit.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.cli.chat_backend import ChatBackend, ChatError
from weft.cli.generate import SamplingOptions, asked, params_of
from weft.config.engine import EngineConfig
from weft.config.options import Command, SettingsError, asked_help, option
from weft.json_types import JsonObject

if TYPE_CHECKING:
    from weft.llm import LLM
    from weft.messages.sampling import SamplingParams

ABOUT = (
    "Chat in the terminal: with MODEL (if not given, SmolLM2-135M-Instruct where it is "
    "installed, else the bundled weft-nano), or with a running server (--url)."
)
COMMANDS = """\
/clear         begin again
/system TEXT   set the system message, and begin again; without TEXT there is none
/help          show this
/exit          leave (also Ctrl-D)
Ctrl-C interrupts an answer."""


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    url: str = option(
        "", "server to talk to, as http://127.0.0.1:30000", group="chat", everyday=True
    )
    api_key: str = option(
        "", "key for the server (better: WEFT_API_KEY)", group="chat", everyday=True
    )
    system: str = option("", "system message", group="chat", everyday=True)


def chat(argv: Sequence[str]) -> int:
    """Run the verb. Returns the exit status."""
    command = Command(
        "weft chat", ABOUT, ChatOptions, SamplingOptions, EngineConfig, positional="model"
    )
    section = asked_help(argv)
    if section is not None:
        print(command.help(section))
        return 0
    settings = command.read(argv, os.environ)
    options = settings.make(ChatOptions)
    engine = settings.make(EngineConfig)
    if options.url and engine.model:
        raise SettingsError("give a model or --url, not both: a server has its model already")
    backend: ChatBackend
    if options.url:
        from weft.cli.remote import RemoteChatBackend

        backend = RemoteChatBackend(options.url, options.api_key, asked(settings))
    else:
        from weft.llm import LLM

        llm = LLM.of(engine)
        backend = LocalChatBackend(llm, params_of(settings, llm.default_params))
    TerminalChat(backend, options.system).run()
    return 0


class LocalChatBackend:
    """A model in this process."""

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self.name = llm.model.name
        self._llm = llm
        self._params = params

    def answer(self, messages: list[JsonObject]) -> Generator[str, None, None]:
        from weft.messages.sampling import InvalidParam

        try:
            for delta in self._llm.stream(self._llm.chat_ids(messages), self._params):
                yield delta.text
                if delta.end is not None and delta.end.failed:
                    raise ChatError(delta.end.message)
        except InvalidParam as exc:
            raise ChatError(str(exc)) from exc


class TerminalChat:
    """Reads lines, prints answers, and keeps the conversation."""

    def __init__(self, backend: ChatBackend, system: str) -> None:
        self._backend = backend
        self._messages: list[JsonObject] = []
        self._system = system
        self._clear()

    def run(self) -> None:
        """Chat until the user quits."""
        _enable_line_editing()
        print(f"{self._backend.name}. /help shows the commands, Ctrl-D leaves.")
        while True:
            try:
                line = input("> ").strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return
            if line in ("/exit", "/quit"):
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._exchange(line)

    def _clear(self) -> None:
        self._messages = [{"role": "system", "content": self._system}] if self._system else []

    def _command(self, line: str) -> None:
        word, _, text = line.partition(" ")
        if word == "/clear":
            self._clear()
        elif word == "/system":
            self._system = text.strip()
            self._clear()
        else:
            print(COMMANDS)

    def _exchange(self, line: str) -> None:
        """Print the answer to `line` as it comes. The received part of an interrupted answer stays
        in the conversation."""
        self._messages.append({"role": "user", "content": line})
        pieces: list[str] = []
        try:
            with closing(self._backend.answer(self._messages)) as answer:
                for piece in answer:
                    pieces.append(piece)
                    sys.stdout.write(_printable(piece))
                    sys.stdout.flush()
            print()
        except KeyboardInterrupt:
            print(" [interrupted]")
        except ChatError as exc:
            print(f"[{_printable(str(exc))}]", file=sys.stderr)
        if pieces:
            self._messages.append({"role": "assistant", "content": "".join(pieces)})
        else:
            self._messages.pop()


def _printable(text: str) -> str:
    """The text without control characters, so that a model cannot control the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)


def _enable_line_editing() -> None:
    with suppress(ImportError):
        import readline  # noqa: F401  (importing it is what gives `input` a history and arrow keys)
