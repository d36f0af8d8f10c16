"""The verb `ctl`: a control request to a running server, from the table in `ctl_verbs.py`.

    weft ctl flush-cache --timeout 10
    weft ctl state set max_running_requests=8 schedule_policy=lpm
    weft ctl requests --json

Exit status: 0 if it was done, 1 if the server refused it, 2 for a command or an address that cannot be used.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, NoReturn
from urllib.parse import quote, urlencode

from weft.cli.ctl_verbs import VERBS, Argument, Verb
from weft.cli.remote import RemoteServer, error_of
from weft.config.options import SettingsError, did_you_mean

DEFAULT_URL = "http://127.0.0.1:30000"
TIMEOUT_S = 660.0  # the server's own limits are shorter
MAX_ANSWER_BYTES = 64_000_000


def ctl(argv: Sequence[str]) -> int:
    """Run the verb. Returns the exit status. Raises SettingsError for what cannot even be sent."""
    common, rest = _common().parse_known_args(list(argv))
    verb, words = _find(rest)
    if verb is None or common.help:
        print(_help() if verb is None else _parser(verb).format_help().rstrip())
        return 0
    given = _parser(verb).parse_args(words)
    server = RemoteServer(common.url, common.admin_key)
    target, body, headers = _request(verb, given)
    with closing(server.connect(TIMEOUT_S)) as connection:
        try:
            connection.request(verb.method, server.path + target, body, server.headers | headers)
            response = connection.getresponse()
            if response.status >= 400:
                print(f"weft: {_refused(verb, response)}", file=sys.stderr)
                return 1
            answer = _answer(response)
        except OSError as exc:
            raise server.missing(exc) from exc
        except (http.client.HTTPException, ValueError) as exc:
            raise SettingsError(
                f"{server.address} is no weft server: its answer cannot be read"
            ) from exc
    if common.json:
        print(json.dumps(answer, ensure_ascii=False, indent=2))
    else:
        for line in verb.show(answer) if verb.show else readable(answer):
            print(line)
    return 0


def readable(answer: Any, indent: str = "") -> Iterator[str]:
    """JSON as lines: `name  value` for what is simple, indented below its name for what is not, lists as columns."""
    if isinstance(answer, dict):
        simple = {
            name: value for name, value in answer.items() if not isinstance(value, dict | list)
        }
        width = max(map(len, simple), default=0)
        for name, value in answer.items():
            if name in simple:
                yield f"{indent}{name:{width}}  {_plain(value)}"
            elif value:
                yield f"{indent}{name}"
                yield from readable(value, indent + "  ")
            else:
                yield f"{indent}{name}: none"
    elif isinstance(answer, list) and answer and all(_is_flat(one) for one in answer):
        yield from _columns(answer, indent)
    elif isinstance(answer, list):
        for one in answer:
            yield from readable(one, indent)
    else:
        yield from (f"{indent}{line}" for line in _plain(answer).splitlines())


def _is_flat(value: Any) -> bool:
    return isinstance(value, dict) and not any(
        isinstance(one, dict | list) for one in value.values()
    )


def _columns(rows: list[dict[str, Any]], indent: str) -> Iterator[str]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = [names, *([_plain(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(names))]
    for line in table:
        yield (
            indent
            + "  ".join(
                f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)
            ).rstrip()
        )


def _plain(value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.12g}"
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in str(value))


# The command line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{self.prog}: {message.removeprefix('argument ')} (weft ctl --help)")


def _common() -> argparse.ArgumentParser:
    """Options that every verb has."""
    environ = os.environ
    parser = _Parser(prog="weft ctl", add_help=False, allow_abbrev=False)
    parser.add_argument("--url", default=environ.get("WEFT_URL") or DEFAULT_URL)
    key = environ.get("WEFT_ADMIN_API_KEY") or environ.get("WEFT_API_KEY") or ""
    parser.add_argument("--admin-key", default=key)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    return parser


def _find(words: list[str]) -> tuple[Verb | None, list[str]]:
    """The verb that `words` begin with, and the others; None if there are none. Raises SettingsError."""
    if not words:
        return None, []
    for verb in VERBS:
        name = verb.words.split()
        if words[: len(name)] == name:
            return verb, words[len(name) :]
    known = [verb.words for verb in VERBS]
    below = [name for name in known if name.split()[0] == words[0]]
    if below:
        raise SettingsError(f"weft ctl {words[0]}: one of {', '.join(below)} is expected")
    hint = did_you_mean(words[0], known)
    raise SettingsError(f"there is no command ctl {words[0]!r}{hint} (weft ctl --help lists them)")


def _parser(verb: Verb) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"weft ctl {verb.words}", description=verb.help, add_help=False, allow_abbrev=False
    )
    for one in verb.arguments:
        options: dict[str, Any] = {"help": one.help, "metavar": one.name.lstrip("-").upper()}
        if one.read is None:
            options = {"help": one.help, "action": "store_true"}
        elif one.many:
            options["nargs"] = "*" if one.optional else "+"
        elif one.optional:
            options["nargs"] = "?"
        parser.add_argument(one.name if one.name.startswith("-") else one.target, **options)
    return parser


def _request(verb: Verb, given: argparse.Namespace) -> tuple[str, bytes | None, dict[str, str]]:
    """Path with query, body if the method has one, and headers."""
    body: dict[str, Any] = {}
    content: bytes | None = None
    has_content = any(one.place == "content" for one in verb.arguments)
    query: dict[str, Any] = {}
    path = verb.route
    for one in verb.arguments:
        written = getattr(
            given,
            one.name.lstrip("-").replace("-", "_") if one.name.startswith("-") else one.target,
        )
        if written in (None, False, []):
            continue
        value = _value(one, written)
        place = one.place or ("query" if verb.method == "GET" or has_content else "body")
        if place == "path":
            path = path.replace(f"{{{one.target}}}", quote(str(value), safe=""))
        elif place == "query":
            query[one.target] = str(value).lower() if isinstance(value, bool) else value
        elif place == "content":
            content = value
        else:
            body[one.target] = value
    target = f"{path}?{urlencode(query)}" if query else path
    if content is not None:
        return target, content, {"content-type": "application/octet-stream"}
    return target, None if verb.method == "GET" else json.dumps(body).encode(), {}


def _value(argument: Argument, written: Any) -> Any:
    """What was written, as the server takes it. Raises SettingsError."""
    if argument.read is None:
        return True
    texts = written if argument.many else [written]
    try:
        values = [argument.read(text) for text in texts]
    except (ValueError, KeyError) as exc:
        text = " ".join(texts)
        raise SettingsError(f"{argument.name} is {text!r}; expected is: {argument.help}") from exc
    if not argument.many:
        return values[0]
    return dict(values) if isinstance(values[0], tuple) else values


# The answer


def _answer(response: http.client.HTTPResponse) -> Any:
    content = response.read(MAX_ANSWER_BYTES).decode()
    if "json" in (response.getheader("content-type") or ""):
        return json.loads(content)
    return content.strip() or "done"


def _refused(verb: Verb, response: http.client.HTTPResponse) -> str:
    reason = error_of(response)
    if response.status in (404, 405) and "{" not in verb.route:
        return f"this server has no {verb.method} {verb.route} ({reason})"
    return reason


def _help() -> str:
    width = max(len(verb.words) for verb in VERBS)
    return "\n".join(
        [
            "usage: weft ctl COMMAND [arguments] [--url URL] [--admin-key KEY] [--json]",
            "",
            "Control a running server.",
            "",
            *(f"  {verb.words:{width}}  {verb.help}" for verb in VERBS),
            "",
            f"--url is {DEFAULT_URL} if not given (or WEFT_URL). Without --admin-key, WEFT_ADMIN_API_KEY is the key;",
            "a server without any keys listens to commands from its own machine only. --json prints the answer as it",
            "came. Exit status: 0 done, 1 refused by the server, 2 not sent. weft ctl COMMAND --help tells more.",
        ]
    )
