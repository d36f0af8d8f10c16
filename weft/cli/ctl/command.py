"""A command of `weft ctl`: its words, its route, and its arguments, most of which follow from the
message that is its body."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import msgspec.inspect

from weft.config.options import SWITCH_WORDS
from weft.messages.by_name import parameters

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


# Help texts for fields of messages. A field without one shows its type.
HELP = {
    "policy": "name",
    "mode": "what happens to open requests: abort (the default), retract, in_place",
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


# ---- arguments that follow from a message


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
