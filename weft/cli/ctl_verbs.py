"""What `weft ctl` can do: one line for each control request, with the route that does it.

The names of routes and fields are SGLang's where it has the request, too. `ctl.py` reads the table; nothing else knows
of single verbs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from weft.config.options import SWITCH_WORDS

Place = Literal["body", "query", "path", "content"]  # content: the whole body, as bytes


@dataclass(frozen=True)
class Argument:
    """`name` begins with dashes if it is an option; others stand in order, and may be left out if `optional`."""

    name: str
    help: str
    read: Callable[[str], Any] | None = (
        str  # text to value; None: a switch that is true if it is given
    )
    field: str = ""  # in the body or query, if it is not the name
    place: Place | None = None  # None: the body, or the query of a GET or beside a content
    optional: bool = False
    many: bool = False  # takes all that follow; `read` gets them one by one, and `field` their list

    @property
    def target(self) -> str:
        return self.field or self.name.lstrip("-").replace("-", "_")


@dataclass(frozen=True)
class Verb:
    words: str
    method: str
    route: str
    help: str
    arguments: tuple[Argument, ...] = ()
    show: Callable[[Any], Iterator[str]] | None = (
        None  # the answer in lines, where the usual way will not do
    )


def switch(text: str) -> bool:
    return SWITCH_WORDS[text.lower()]


def seconds_or_off(text: str) -> float | None:
    return None if text == "off" else float(text)


def words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def assignment(text: str) -> tuple[str, Any]:
    """name=value, where the value is JSON or else a text."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError(text)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def content(text: str) -> bytes:
    """Of the file of that name."""
    try:
        return Path(text).read_bytes()
    except OSError as exc:
        raise ValueError(text) from exc


def weight_version(answer: Any) -> Iterator[str]:
    yield answer["weight_version"]


def stories(answer: Any) -> Iterator[str]:
    """Of requests, as they read."""
    for one in answer["requests"]:
        place = "" if one.get("position") is None else f", {one['position']} before it"
        yield f"{one['rid']} (request {one['id']}): {one['state']}{place}"
        yield (
            f"  {one['prompt_tokens']:,} prompt tokens, {one['cached_tokens']:,} of them cached; "
            f"{one['output_tokens']:,} output tokens; retractions: {one['retractions']}"
        )
        yield from (f"  {line}" for line in one["text"])


def profile(answer: Any) -> Iterator[str]:
    yield f"{answer['num_steps']} steps recorded; trace: {answer['trace'] or 'none (no --profile-dir)'}"
    yield from answer["table"].splitlines()


RID = "name of the request, as the client gave it"
VERSION = Argument("--weight-version", "what answers call these weights from then on")
ABORT_ALL = Argument(
    "--abort-all", "end open requests instead of computing them anew", None, "abort_all_requests"
)
GROUP = Argument("--group-name", "if there are several")
MODES = "what becomes of open requests: abort, retract, in_place"

VERBS = (
    Verb(
        *("flush-cache", "POST", "/flush_cache", "empty the prefix cache, if nothing runs"),
        (Argument("--timeout", "seconds to wait for that", float, place="query"),),
    ),
    Verb(
        *("abort", "POST", "/abort_request", "abort requests by name, or all"),
        (
            Argument("rid", RID, optional=True),
            Argument("--all", "every open request", None, "abort_all"),
        ),
    ),
    Verb(
        "pause",
        "POST",
        "/pause_generation",
        "run no step until it goes on",
        (Argument("--mode", MODES),),
    ),
    Verb("continue", "POST", "/continue_generation", "go on after a pause"),
    Verb("block", "POST", "/block", "hold requests back that come from now on"),
    Verb("unblock", "POST", "/unblock", "let them in"),
    Verb(
        "set-policy",
        "POST",
        "/set_policy",
        "order waiting requests by another policy",
        (Argument("policy", "name"),),
    ),
    Verb("audit", "POST", "/audit", "check who owns each page of KV memory"),
    Verb("state get", "GET", "/get_internal_state", "settings that can be changed, and numbers"),
    Verb(
        *("state set", "POST", "/set_internal_state", "change settings: all of them, or none"),
        (Argument("name=value", "setting and value", assignment, "server_args", many=True),),
    ),
    Verb(
        *("profile start", "POST", "/start_profile", "record what the device does"),
        (
            Argument("--num-steps", "stop after so many steps", int),
            Argument("--activities", "CPU, GPU or both, with a comma", words),
            Argument("--record-shapes", "with the shapes of tensors", None),
            Argument("--with-stack", "with the lines of source", None),
            Argument("--profile-memory", "with allocations", None),
            Argument("--output-dir", "folder for the trace, below the server's --profile-dir"),
            Argument("--prefix", "of the trace's name", field="profile_prefix"),
        ),
    ),
    Verb(
        "profile stop",
        "POST",
        "/stop_profile",
        "stop recording; print what took most",
        show=profile,
    ),
    Verb(
        *("slow-down", "POST", "/slow_down", "let every step take at least so long"),
        (Argument("seconds", "or off", seconds_or_off, "forward_sleep_time"),),
    ),
    Verb("freeze-gc", "POST", "/freeze_gc", "freeze the garbage collectors"),
    Verb(
        *("logging", "POST", "/configure_logging", "change what is logged"),
        (
            Argument("--log-level", "debug, info, warning, error"),
            Argument("--log-requests", "on or off: a line for each finished request", switch),
        ),
    ),
    Verb("loads", "GET", "/v1/loads", "how busy the engine is"),
    Verb(
        *("sessions open", "POST", "/open_session", "open a session"),
        (
            Argument("session_id", "its name; one is made up if not given", optional=True),
            Argument("--capacity", "tokens of all its turns together", int),
            Argument("--timeout", "seconds without a request, after which it is closed", float),
        ),
    ),
    Verb(
        "sessions close",
        "POST",
        "/close_session",
        "close it",
        (Argument("session_id", "its name"),),
    ),
    Verb(
        *(
            "weights update",
            "POST",
            "/update_weights_from_disk",
            "load other weights of the same shape",
        ),
        (Argument("model_path", "folder, below the server's --weights-root"), VERSION, ABORT_ALL),
    ),
    Verb(
        *("weights get", "POST", "/get_weights_by_name", "print the first values of a tensor"),
        (Argument("name", "of the tensor"), Argument("--truncate-size", "rows to print", int)),
    ),
    Verb(
        "weights version",
        "GET",
        "/model_info",
        "name of the weights that are in use",
        show=weight_version,
    ),
    Verb(
        *("weights send", "POST", "/update_weights_from_tensor", "replace those that a file has"),
        (Argument("file", "a safetensors file here", content, place="content"), VERSION, ABORT_ALL),
    ),
    Verb(
        *(
            "weights join",
            "POST",
            "/init_weights_update_group",
            "join a group that weights come from",
        ),
        (
            Argument("master_address", "address of its rank 0"),
            Argument("master_port", "port of its rank 0", int),
            Argument("rank_offset", "rank of this server", int),
            Argument("world_size", "number of ranks", int),
            GROUP,
            Argument("--backend", "gloo or nccl"),
        ),
    ),
    Verb(
        *(
            "weights receive",
            "POST",
            "/update_weights_from_distributed",
            "take what its rank 0 broadcasts",
        ),
        (
            Argument("names", "of the weights, with commas", words),
            Argument("dtypes", "their types, with commas", words),
            Argument("shapes", "as JSON: [[61,16],[16]]", json.loads),
            GROUP,
            VERSION,
            ABORT_ALL,
        ),
    ),
    Verb("weights leave", "POST", "/destroy_weights_update_group", "leave it", (GROUP,)),
    Verb(
        *("memory release", "POST", "/release_memory_occupation", "give memory of the device back"),
        (Argument("tags", "weights, kv_cache; all if none is given", many=True, optional=True),),
    ),
    Verb(
        *("memory resume", "POST", "/resume_memory_occupation", "take it again"),
        (Argument("tags", "weights, kv_cache; all if none is given", many=True, optional=True),),
    ),
    Verb(
        *("rpc", "POST", "/rpc", "call one of the methods that the engine lists"),
        (Argument("method", "its name"), Argument("--params", "a JSON object", json.loads)),
    ),
    Verb(
        "requests",
        "GET",
        "/requests",
        "the queue and the open requests",
        (Argument("--limit", "so many", int),),
    ),
    Verb(
        *("explain", "GET", "/requests/{rid}", "what happened to a request, and why"),
        (Argument("rid", RID, place="path"),),
        show=stories,
    ),
)
