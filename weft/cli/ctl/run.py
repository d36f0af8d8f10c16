"""One command of `weft ctl`: found, read from the command line, sent, and its answer printed.

Exit status: 0 if the request succeeded, 1 if the server refused it, 2 for a command or an address
that cannot be used.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import Any, NoReturn
from urllib.parse import quote, urlencode

from weft.cli.ctl.command import Argument, CtlCommand, SentIn, arguments_of
from weft.cli.ctl.table import COMMANDS
from weft.cli.readable import readable
from weft.cli.remote import RemoteServer, error_of
from weft.config.options import SettingsError, did_you_mean
from weft.config.plugins import plugins, refused
from weft.json_types import JsonObject
from weft.messages.outside import OutsideControl

DEFAULT_URL = "http://127.0.0.1:30000"
TIMEOUT_S = 660.0  # the server's own limits are shorter
MAX_ANSWER_BYTES = 64_000_000


def ctl(argv: Sequence[str]) -> int:
    """Run the verb. Returns the exit status. Raises SettingsError if the request cannot be sent."""
    common, rest = _common().parse_known_args(list(argv))
    if not rest:
        print(_help())
        return 0
    if common.help and len(rest) == 1 and (group := _group(rest[0])):
        print("\n".join(f"weft ctl {command.words:<20} {command.help}" for command in group))
        return 0
    command, texts = _find(rest)
    if common.help:
        print(_parser(command).format_help().rstrip())
        return 0
    parsed = _parser(command).parse_args(texts)
    server = RemoteServer(common.url, common.admin_key)
    target, body, headers = _request(command, parsed)
    if common.model:
        target += f"{'&' if '?' in target else '?'}{urlencode({'model': common.model})}"
    with closing(server.connect(TIMEOUT_S)) as connection:
        try:
            connection.request(command.method, server.path + target, body, server.headers | headers)
            response = connection.getresponse()
            if response.status >= 400:
                print(f"weft: {_refused(command, response)}", file=sys.stderr)
                return 1
            answer = _answer(response)
            lines = [json.dumps(answer, ensure_ascii=False, indent=2)]
            if not common.json:
                show = command.show or readable
                lines = list(show(answer))
        except OSError as exc:
            raise server.missing(exc) from exc
        except (http.client.HTTPException, ValueError, LookupError, TypeError) as exc:
            message = f"{server.address} is not a weft server: its answer cannot be read"
            raise SettingsError(message) from exc
    for line in lines:
        print(line)
    return 0


# ---- which commands there are


def other_commands() -> list[CtlCommand]:
    """Commands for the administration routes that are not in `COMMANDS`.

    This imports the server's modules, so it is called only when needed.
    """
    from weft.server.admin import settings, weights, work

    listed = {command.route for command in COMMANDS}
    found = []
    for route in (*work.ROUTES, *settings.ROUTES, *weights.ROUTES):
        path = route.path.replace(":path}", "}")
        if path in listed or "(vLLM)" in route.summary:
            continue
        name = path.strip("/").replace("_", "-")
        summary = route.summary[0].lower() + route.summary[1:]
        queries = [
            Argument(f"--{name}", "a number", float, sent_in="query") for name in route.query
        ]
        found.append(CtlCommand(name, route.method, path, summary, tuple(queries), route.body))
    return found + _outside_commands()


def _outside_commands() -> list[CtlCommand]:
    """Commands for the control requests of WEFT_PLUGINS. Raises SettingsError."""
    found = []
    for name, own in plugins(os.environ.get("WEFT_PLUGINS", ""), "control"):
        if not isinstance(own, OutsideControl):
            raise refused("control", name, "is no weft.messages.outside.OutsideControl")
        summary = own.summary[0].lower() + own.summary[1:]
        found.append(CtlCommand(own.words, "POST", own.route, summary, body=own.message))
    return found


# ---- the command line


class _CtlParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{self.prog}: {message.removeprefix('argument ')} (weft ctl --help)")


def _common() -> argparse.ArgumentParser:
    """Options that every command has."""
    environ = os.environ
    parser = _CtlParser(prog="weft ctl", add_help=False, allow_abbrev=False)
    parser.add_argument("--url", default=environ.get("WEFT_URL") or DEFAULT_URL)
    key = environ.get("WEFT_ADMIN_API_KEY") or environ.get("WEFT_API_KEY") or ""
    parser.add_argument("--admin-key", default=key)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", default="")
    parser.add_argument("-h", "--help", action="store_true")
    return parser


def _find(texts: list[str]) -> tuple[CtlCommand, list[str]]:
    """The command at the beginning of `texts`, and the remaining words. Raises SettingsError."""
    for command in COMMANDS:
        name = command.words.split()
        if texts[: len(name)] == name:
            return command, texts[len(name) :]
    group = ", ".join(command.words for command in _group(texts[0]))
    if group:
        raise SettingsError(f"weft ctl {texts[0]}: one of {group} is expected")
    for command in other_commands():
        name = command.words.split()
        if texts[: len(name)] == name:
            return command, texts[len(name) :]
    hint = did_you_mean(texts[0], [command.words for command in COMMANDS])
    raise SettingsError(
        f"weft ctl: there is no command {texts[0]!r}{hint} (weft ctl --help lists them)"
    )


def _group(word: str) -> list[CtlCommand]:
    """The commands of several words whose first one is `word`."""
    return [command for command in COMMANDS if command.words.startswith(f"{word} ")]


def _parser(command: CtlCommand) -> argparse.ArgumentParser:
    parser = _CtlParser(
        prog=f"weft ctl {command.words}",
        description=command.help,
        add_help=False,
        allow_abbrev=False,
    )
    for one in arguments_of(command):
        is_option = one.name.startswith("-")
        options: JsonObject = {"help": one.help}
        if one.read is None:
            options["action"] = "store_true"
        else:
            options["metavar"] = one.name.lstrip("-").upper()
        if one.many:
            options["nargs"] = "*" if one.optional else "+"
        elif one.optional and not is_option:
            options["nargs"] = "?"
        if is_option:
            parser.add_argument(one.name, dest=one.target, **options)
        else:
            parser.add_argument(one.target, **options)
    return parser


def _request(
    command: CtlCommand, parsed: argparse.Namespace
) -> tuple[str, bytes | None, dict[str, str]]:
    """The path with its query, the body if the method has one, and the headers."""
    arguments = arguments_of(command)
    sends_content = any(one.sent_in == "content" for one in arguments)
    usual: SentIn = "query" if command.method == "GET" or sends_content else "body"
    path = command.route
    query: JsonObject = {}
    body: JsonObject = {}
    sent: bytes | None = None
    for one in arguments:
        written = getattr(parsed, one.target)
        if written in (None, False, []):
            continue
        value = _value(one, written)
        match one.sent_in or usual:
            case "path":
                path = path.replace(f"{{{one.target}}}", quote(str(value), safe=""))
            case "query":
                query[one.target] = str(value).lower() if isinstance(value, bool) else value
            case "content":
                sent = value
            case _:
                body[one.target] = value
    target = f"{path}?{urlencode(query)}" if query else path
    if sent is not None:
        return target, sent, {"content-type": "application/octet-stream"}
    if command.method == "GET":
        return target, None, {}
    return target, json.dumps(body).encode(), {}


def _value(argument: Argument, written: Any) -> Any:
    """Convert the texts of the command line to the value for the server. Raises SettingsError."""
    if argument.read is None:
        return True
    texts = written if argument.many else [written]
    try:
        values = [argument.read(text) for text in texts]
        if any(isinstance(value, float) and not math.isfinite(value) for value in values):
            raise ValueError("JSON has no such number")
    except (ValueError, KeyError) as exc:
        text = " ".join(texts)
        raise SettingsError(f"{argument.name} is {text!r}; expected is: {argument.help}") from exc
    if not argument.many:
        return values[0]
    if isinstance(values[0], tuple):
        return dict(values)
    return values


def _help() -> str:
    commands = [*COMMANDS, *other_commands()]
    width = max(len(command.words) for command in commands)
    lines = [f"  {command.words:{width}}  {command.help}" for command in commands]
    return "\n".join(
        [
            "usage: weft ctl COMMAND [arguments] [--url URL] [--admin-key KEY] [--model NAME]",
            "                [--json]",
            "",
            "Control a running server.",
            "",
            *lines,
            "",
            f"--url is {DEFAULT_URL} if not given (or WEFT_URL). Without --admin-key,",
            "WEFT_ADMIN_API_KEY is the key; a server without any keys accepts commands from",
            "its own machine only. --model names one of several models; without it, commands",
            "concern the default one. --json prints the answer unchanged. Exit status: 0 done,",
            "1 refused by the server, 2 not sent. weft ctl COMMAND --help tells more.",
        ]
    )


# ---- the answer


def _answer(response: http.client.HTTPResponse) -> Any:
    text = response.read(MAX_ANSWER_BYTES).decode()
    if "json" in (response.getheader("content-type") or ""):
        return json.loads(text)
    return text.strip() or "done"


def _refused(command: CtlCommand, response: http.client.HTTPResponse) -> str:
    reason = error_of(response)
    if reason.startswith("the model "):  # there is the route, and no such model
        return reason
    if response.status in (404, 405) and "{" not in command.route:
        return f"this server has no {command.method} {command.route} ({reason})"
    if response.status == 401:
        return f"{reason}; --admin-key KEY or WEFT_ADMIN_API_KEY gives one"
    return reason
