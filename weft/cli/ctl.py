"""The verb `ctl`: sends a control request to a running server and prints its answer as lines.

    weft ctl flush-cache --timeout 10
    weft ctl state set max_running_requests=8 schedule_policy=lpm
    weft ctl requests --json

Every administration route is a command. `COMMANDS` lists the commands with their words; the
arguments of a command come from the message that is the body of its route, and from the query
parameters of the route. A route that is not in the list is a command under its own name. Only
`COMMANDS` knows single routes.

Exit status: 0 if the request succeeded, 1 if the server refused it, 2 for a command or an address
that cannot be used.
"""

from __future__ import annotations

import argparse
import dataclasses
import http.client
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn
from urllib.parse import quote, urlencode

import msgspec
import msgspec.inspect

from weft.cli.models_table import loaded_table, models_table
from weft.cli.readable import readable
from weft.cli.remote import RemoteServer, error_of
from weft.cli.why import cause_lines, causes, refusal_lines
from weft.config.numbers import counted
from weft.config.options import SWITCH_WORDS, SettingsError, did_you_mean
from weft.config.plugins import plugins, refused
from weft.json_types import JsonObject
from weft.messages.by_name import parameters
from weft.messages.control import AbortRequest, PauseGeneration, SetPolicy, StartProfile
from weft.messages.outside import OutsideControl
from weft.messages.weights import (
    DestroyWeightsUpdateGroup,
    GetWeightsByName,
    InitWeightsUpdateGroup,
    UpdateWeightsFromDisk,
    UpdateWeightsFromDistributed,
)

DEFAULT_URL = "http://127.0.0.1:30000"
TIMEOUT_S = 660.0  # the server's own limits are shorter
MAX_ANSWER_BYTES = 64_000_000

SentIn = Literal["body", "query", "path", "content"]  # content: the whole body, as bytes


@dataclass(frozen=True)
class Argument:
    """One argument of a command: an option if its name begins with dashes, else positional."""

    name: str
    help: str
    read: Callable[[str], Any] | None = str  # text to value; None: a switch
    field: str = ""  # name in the body or query, if it differs from the argument's name
    # None: the body; or the query, for GET and for commands with a content
    sent_in: SentIn | None = None
    optional: bool = False
    # takes all following words; `read` parses them one by one, `field` is their list
    many: bool = False

    @property
    def target(self) -> str:
        return self.field or self.name.lstrip("-").replace("-", "_")


@dataclass(frozen=True)
class CtlCommand:
    """`body` is the message whose fields are arguments, except fields that `arguments` lists."""

    words: str
    method: str
    route: str
    help: str
    arguments: tuple[Argument, ...] = ()
    body: type[msgspec.Struct] | None = None
    # formats the answer as lines; None: `readable`
    show: Callable[[Any], Iterator[str]] | None = None


# ---- texts as values


def switch(text: str) -> bool:
    return SWITCH_WORDS[text.lower()]


def seconds_or_off(text: str) -> float | None:
    return None if text == "off" else float(text)


def words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def assignment(text: str) -> tuple[str, Any]:
    """Parse name=value; the value is JSON, or else plain text."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError(text)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def content(text: str) -> bytes:
    """The bytes of the named file."""
    try:
        return Path(text).read_bytes()
    except OSError as exc:
        raise ValueError(text) from exc


# ---- answers with their own formats


def weight_version(answer: Any) -> Iterator[str]:
    yield answer["weight_version"]


def traces(answer: Any) -> Iterator[str]:
    """The traces of requests as text."""
    for one in answer["requests"]:
        if "prompt_tokens" not in one:  # its model is not loaded yet
            yield from (f"{one['rid']}: {line}" for line in one["text"])
            continue
        queue_position = ""
        if one.get("position") is not None:
            queue_position = f", {one['position']} before it"
        yield f"{one['rid']} (request {one['id']}): {one['state']}{queue_position}"
        yield (
            f"  {counted(one['prompt_tokens'], 'prompt token')}, {one['cached_tokens']:,} of them "
            f"cached; {counted(one['output_tokens'], 'output token')}; "
            f"retractions: {one['retractions']}"
        )
        for line in one["text"]:
            yield f"  {line}"
        yield from cause_lines(one.get("cache_cause"))
    yield from refusal_lines(answer)


def experts(answer: Any) -> Iterator[str]:
    """One line per layer: (token, expert) assignments, and the experts with the most."""
    for layer, prefill, decode in zip(
        answer["layers"], answer["prefill"], answer["decode"], strict=True
    ):
        total = [one + other for one, other in zip(prefill, decode, strict=True)]
        best = sorted(range(len(total)), key=total.__getitem__, reverse=True)[:4]
        most = ", ".join(f"{expert}: {total[expert]:,}" for expert in best if total[expert])
        yield f"layer {layer}: prefill {sum(prefill):,}, decode {sum(decode):,}; most {most or '-'}"
    if answer.get("file"):
        yield answer["file"]
    if "recording" in answer:
        yield "they are counted" if answer["recording"] else "nothing is counted now"


def tree(answer: Any) -> Iterator[str]:
    """One line per node, indented by its depth: its number, its tokens, its users, its text."""
    for one in answer["nodes"]:
        line = f"{'  ' * one['depth']}node {one['node']}: {counted(one['tokens'], 'token')}"
        if one["below"] != one["tokens"]:
            line += f" ({one['below']:,} with those below)"
        for name in ("locks", "pins"):
            if one[name]:
                line += f", {name} {one[name]}"
        line += f", last used {counted(one['age'], 'use')} ago"
        yield f"{line}  {json.dumps(one['text'], ensure_ascii=False)}"
    yield f"nodes visited: {answer['visited']:,}{'' if answer['whole'] else '; there are more'}"


def profile(answer: Any) -> Iterator[str]:
    trace = answer["trace"] or "none (no --profile-dir)"
    yield f"{counted(answer['num_steps'], 'step')} recorded; trace: {trace}"
    yield from answer["table"].splitlines()


# ---- the commands

# Help texts for fields of messages. A field without one shows its type.
HELP = {
    "policy": "name",
    "mode": "what happens to open requests: abort, retract, in_place",
    "num_steps": "stop after this number of steps",
    "activities": "CPU, GPU, or CPU,GPU",
    "record_shapes": "with the shapes of tensors",
    "with_stack": "with the lines of source",
    "profile_memory": "with allocations",
    "output_dir": "folder for the trace, below the server's --profile-dir",
    "model_path": "folder, below the server's --weights-root",
    "load_format": "auto or safetensors",
    "weight_version": "name of these weights in answers",
    "name": "name of the tensor",
    "truncate_size": "number of rows to print",
    "master_address": "address of rank 0 of the group",
    "master_port": "port of rank 0 of the group",
    "rank_offset": "rank of this server",
    "world_size": "number of ranks",
    "group_name": "name of the group, if there are several",
    "backend": "gloo or nccl",
    "timeout_s": "seconds for all to join, and for each tensor",
    "names": "names of the weights, with commas between them",
    "dtypes": "types of the weights, with commas between them",
    "shapes": "shapes of the weights as JSON: [[61,16],[16]]",
}
RID = Argument("rid", "name of the request, as the client gave it")
SESSION = Argument("session_id", "its name")
VERSION = Argument("--weight-version", HELP["weight_version"])
ABORT_ALL = Argument(
    "--abort-all", "end open requests instead of computing them again", None, "abort_all_requests"
)
TAGS = Argument("tags", "weights, kv_cache; all if none is given", many=True, optional=True)
ADAPTER = Argument("lora_name", "the name by which requests select it")
PINNED = Argument("--pinned", "it keeps a slot, and is never unloaded for another one", None)
PREFIX = Argument("--prefix", "prefix of the name of the trace", field="profile_prefix")

RAMP_S = Argument("--ramp-s", "seconds in which the rate grows", float, sent_in="query")

MODEL = Argument("model", "its name")

COMMANDS = (
    CtlCommand(
        "models list", "GET", "/models", "all models of the server, *: default", show=models_table
    ),
    CtlCommand(
        "models loaded", "GET", "/models", "the models in memory (also: weft ps)", show=loaded_table
    ),
    CtlCommand("models load", "POST", "/models/load", "load a model, and wait for it", (MODEL,)),
    CtlCommand(
        "models unload",
        "POST",
        "/models/unload",
        "unload a model after its open requests",
        (MODEL,),
    ),
    CtlCommand(
        "flush-cache",
        "POST",
        "/flush_cache",
        "empty the prefix cache, if nothing runs",
        (Argument("--timeout", "seconds to wait for that", float, sent_in="query"),),
    ),
    CtlCommand("cache show", "GET", "/cache", "what is cached, in memory and on disk"),
    CtlCommand("cache clear", "POST", "/cache/clear", "remove the files of cached KV"),
    CtlCommand(
        "cache save",
        "POST",
        "/cache/save",
        "write what is cached in memory",
        (Argument("--timeout", "seconds for that", float, sent_in="query"),),
    ),
    CtlCommand(
        "cache pin",
        "POST",
        "/cache/pin",
        "compute a prompt, and keep it in memory",
        (
            Argument("prompt", "the text", optional=True),
            Argument("--messages", "a conversation instead, as JSON", json.loads),
            Argument("--ttl", "seconds since its last use", float, "ttl_s"),
            Argument("--name", "name of the pin, for cache unpin"),
            Argument("--lora-path", "the adapter that it is for"),
            Argument("--tenant", "tenant whose --tenant-cache limits the pin"),
            Argument("--cache-salt", "cache_salt of the requests that can find it"),
        ),
    ),
    CtlCommand(
        "cache unpin",
        "DELETE",
        "/cache/pin/{name}",
        "remove a pin",
        (Argument("name", "name of the pin", sent_in="path"),),
    ),
    CtlCommand(
        "cache prefix",
        "GET",
        "/cache/prefix",
        "a node of the prefix tree of the last picture, and the requests that use it",
        (Argument("node", "its number", int, sent_in="query"),),
    ),
    CtlCommand(
        "cache tree",
        "GET",
        "/cache/tree",
        "the heaviest nodes of the prefix tree, with their texts and users",
        show=tree,
    ),
    CtlCommand(
        "cache forget",
        "POST",
        "/cache/forget",
        "drop a prefix from memory, and all sequences that continue it",
        (
            Argument("prompt", "its text", optional=True),
            Argument("--messages", "a conversation instead, as JSON", json.loads),
            Argument("--keep", "tokens at its beginning that stay", int),
            Argument("--cache-salt", "cache_salt of the requests that can find it"),
            Argument("--lora-path", "the adapter that they are for"),
        ),
    ),
    CtlCommand(
        "abort",
        "POST",
        "/abort_request",
        "abort requests by name, or all",
        (
            dataclasses.replace(RID, optional=True),
            Argument("--all", "every open request", None, "abort_all"),
        ),
        AbortRequest,
    ),
    CtlCommand(
        "pause",
        "POST",
        "/pause_generation",
        "run no step until weft ctl continue",
        body=PauseGeneration,
    ),
    CtlCommand(
        "continue",
        "POST",
        "/continue_generation",
        "continue after a pause",
        (RAMP_S,),
    ),
    CtlCommand("block", "POST", "/block", "hold back requests that arrive from now on"),
    CtlCommand(
        "unblock",
        "POST",
        "/unblock",
        "admit the requests that were held back",
        (RAMP_S,),
    ),
    CtlCommand(
        "set-policy",
        "POST",
        "/set_policy",
        "order waiting requests by another policy",
        body=SetPolicy,
    ),
    CtlCommand("audit", "POST", "/audit", "check who owns each page of KV memory"),
    CtlCommand(
        "state get", "GET", "/get_internal_state", "settings that can be changed, and numbers"
    ),
    CtlCommand(
        "state set",
        "POST",
        "/set_internal_state",
        "change settings: all of them, or none",
        (Argument("name=value", "setting and value", assignment, "server_args", many=True),),
    ),
    CtlCommand("state show", "GET", "/state", "what outlives the server: counts, bytes, ages"),
    CtlCommand(
        "state prune",
        "POST",
        "/state/prune",
        "remove stored responses and sessions that nobody has used for a time",
        (Argument("older_than_s", "seconds since their last use", float),),
    ),
    CtlCommand("state clear", "POST", "/state/clear", "remove stored responses and all sessions"),
    CtlCommand(
        "profile start",
        "POST",
        "/start_profile",
        "record the operations of the device",
        (PREFIX,),
        StartProfile,
    ),
    CtlCommand(
        "profile stop",
        "POST",
        "/stop_profile",
        "stop recording; print the operations with the most time",
        show=profile,
    ),
    CtlCommand(
        "experts start",
        "POST",
        "/start_expert_distribution_record",
        "begin to count the tokens of each expert",
    ),
    CtlCommand(
        "experts stop",
        "POST",
        "/stop_expert_distribution_record",
        "stop counting the tokens of experts",
    ),
    CtlCommand(
        "experts show",
        "GET",
        "/experts",
        "print the number of tokens of each expert so far",
        show=experts,
    ),
    CtlCommand(
        "experts dump",
        "POST",
        "/dump_expert_distribution_record",
        "print the number of tokens of each expert, and count again from zero",
        show=experts,
    ),
    CtlCommand(
        "slow-down",
        "POST",
        "/slow_down",
        "make every step take at least this time",
        (Argument("seconds", "a number of seconds, or off", seconds_or_off, "forward_sleep_time"),),
    ),
    CtlCommand("freeze-gc", "POST", "/freeze_gc", "freeze the garbage collectors"),
    CtlCommand(
        "logging",
        "POST",
        "/configure_logging",
        "change what is logged",
        (
            Argument("--log-level", "debug, info, warning, error"),
            Argument("--log-requests", "on or off: a line for each finished request", switch),
        ),
    ),
    CtlCommand("loads", "GET", "/v1/loads", "how busy the engine is"),
    CtlCommand(
        "sessions open",
        "POST",
        "/open_session",
        "open a session",
        (
            Argument("session_id", "its name; one is made up if not given", optional=True),
            Argument("--capacity", "tokens of all its turns together", int),
            Argument("--timeout", "seconds without a request, after which it is closed", float),
        ),
    ),
    CtlCommand("sessions close", "POST", "/close_session", "close a session", (SESSION,)),
    CtlCommand(
        "adapters load",
        "POST",
        "/load_lora_adapter",
        "load an adapter (LoRA)",
        (ADAPTER, Argument("lora_path", "its folder"), PINNED),
    ),
    CtlCommand("adapters unload", "POST", "/unload_lora_adapter", "unload an adapter", (ADAPTER,)),
    CtlCommand(
        "weights update",
        "POST",
        "/update_weights_from_disk",
        "load other weights of the same shape",
        (ABORT_ALL,),
        UpdateWeightsFromDisk,
    ),
    CtlCommand(
        "weights get",
        "POST",
        "/get_weights_by_name",
        "print the first values of a tensor",
        body=GetWeightsByName,
    ),
    CtlCommand(
        "weights version",
        "GET",
        "/model_info",
        "name of the weights that are in use",
        show=weight_version,
    ),
    CtlCommand(
        "weights send",
        "POST",
        "/update_weights_from_tensor",
        "replace the weights that are in a file",
        (
            Argument("file", "a safetensors file here", content, sent_in="content"),
            VERSION,
            ABORT_ALL,
        ),
    ),
    CtlCommand(
        "weights join",
        "POST",
        "/init_weights_update_group",
        "join a group of processes from which weights come",
        body=InitWeightsUpdateGroup,
    ),
    CtlCommand(
        "weights receive",
        "POST",
        "/update_weights_from_distributed",
        "receive the weights that rank 0 of the group broadcasts",
        (ABORT_ALL,),
        UpdateWeightsFromDistributed,
    ),
    CtlCommand(
        "weights leave",
        "POST",
        "/destroy_weights_update_group",
        "leave a group",
        body=DestroyWeightsUpdateGroup,
    ),
    CtlCommand(
        "memory release",
        "POST",
        "/release_memory_occupation",
        "give memory of the device back to the system",
        (TAGS,),
    ),
    CtlCommand("memory resume", "POST", "/resume_memory_occupation", "allocate it again", (TAGS,)),
    CtlCommand(
        "rpc",
        "POST",
        "/rpc",
        "make any control request by name",
        (Argument("method", "its name"), Argument("--params", "a JSON object", json.loads)),
    ),
    CtlCommand(
        "requests",
        "GET",
        "/requests",
        "the queue and the open requests",
        (Argument("--limit", "so many", int),),
    ),
    CtlCommand(
        "explain",
        "GET",
        "/requests/{rid}",
        "what happened to a request, and why",
        (dataclasses.replace(RID, sent_in="path"),),
        show=traces,
    ),
    CtlCommand(
        "why",
        "GET",
        "/requests/{rid}",
        "why a request was slow: its cache misses and their cost, and all of its time",
        (dataclasses.replace(RID, sent_in="path"),),
        show=causes,
    ),
)


def arguments_of(command: CtlCommand) -> tuple[Argument, ...]:
    """The arguments that follow from the command's body, then those that the command lists."""
    if command.body is None:
        return command.arguments
    listed = {one.target for one in command.arguments}
    names = set(parameters(command.body)) - listed
    fields = msgspec.structs.fields(command.body)
    derived = [_argument(field) for field in fields if field.name in names]
    return (*derived, *command.arguments)


def _argument(field: msgspec.structs.FieldInfo) -> Argument:
    """A required field is a positional argument, any other an option."""
    kinds = _alternatives(msgspec.inspect.type_info(field.type))
    kind = kinds[0]
    read: Callable[[str], Any] | None = _READERS.get(type(kind), json.loads)
    help = HELP.get(field.name, "")
    if isinstance(kind, msgspec.inspect.ListType) and isinstance(
        kind.item_type, msgspec.inspect.StrType
    ):
        read = words
    if isinstance(kind, msgspec.inspect.LiteralType):
        help = help or f"one of {', '.join(map(str, kind.values))}"
    help = help or type(kind).__name__.removesuffix("Type").lower()
    if field.required:
        return Argument(field.name, help, str if read is None else read)
    return Argument("--" + field.name.replace("_", "-"), help, read, optional=True)


_READERS: dict[type, Callable[[str], Any] | None] = {
    msgspec.inspect.StrType: str,
    msgspec.inspect.LiteralType: str,
    msgspec.inspect.IntType: int,
    msgspec.inspect.FloatType: float,
    msgspec.inspect.BoolType: None,
}


def _alternatives(kind: msgspec.inspect.Type) -> list[msgspec.inspect.Type]:
    """The types of a union without null, or the type itself."""
    if not isinstance(kind, msgspec.inspect.UnionType):
        return [kind]
    return [one for one in kind.types if not isinstance(one, msgspec.inspect.NoneType)]


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


# ---- one command


def ctl(argv: Sequence[str]) -> int:
    """Run the verb. Returns the exit status. Raises SettingsError if the request cannot be sent."""
    common, rest = _common().parse_known_args(list(argv))
    if not rest:
        print(_help())
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
        except OSError as exc:
            raise server.missing(exc) from exc
        except (http.client.HTTPException, ValueError) as exc:
            message = f"{server.address} is not a weft server: its answer cannot be read"
            raise SettingsError(message) from exc
    if common.json:
        print(json.dumps(answer, ensure_ascii=False, indent=2))
        return 0
    show = command.show or readable
    for line in show(answer):
        print(line)
    return 0


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
    known = [command.words for command in COMMANDS]
    longer = [name for name in known if name.split()[0] == texts[0]]
    if longer:
        raise SettingsError(f"weft ctl {texts[0]}: one of {', '.join(longer)} is expected")
    for command in other_commands():
        name = command.words.split()
        if texts[: len(name)] == name:
            return command, texts[len(name) :]
    hint = did_you_mean(texts[0], known)
    raise SettingsError(
        f"weft ctl: there is no command {texts[0]!r}{hint} (weft ctl --help lists them)"
    )


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
    if response.status in (404, 405) and "{" not in command.route:
        return f"this server has no {command.method} {command.route} ({reason})"
    return reason
