"""Every number of every route at its extremes, found from the types of the bodies and the table of
routes: refused in the form of its API, with field, value and range, or answered; never a fault, and
the engine is as it was."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import msgspec.inspect as inspected
import pytest

import weft
from tests.scheduler.accounts import audit
from tests.seeds import seeds
from tests.server.real_engine import RealServer, serving
from weft.config.limits import Limits
from weft.config.numbers import NUMBERS, QUERIES, shown
from weft.messages.calls import ControlRequest
from weft.messages.sampling import NUMERIC, InvalidParam, SamplingParams
from weft.server.admin import weights
from weft.server.app import OPERATIONS, Operation
from weft.server.fields import sampling as sampling_fields
from weft.server.fields import session
from weft.server.fields.numbers import nested_fields, numeric_fields
from weft.server.sglang import generate as native

NANO = Path(weft.__file__).parent / "bundled" / "weft-nano"
USER = {"role": "user", "content": "Hi"}
# What makes a body right, by the path of its route. Those of the administration stop short of doing
# what they are for.
RIGHT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 1},
    "/v1/chat/completions/input_tokens": {"messages": [USER]},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/messages": {"messages": [USER], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/v1/responses": {"input": "a", "max_output_tokens": 1, "store": False},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/embeddings": {"input": "a"},
    "/encode": {"text": "a"},
    "/api/embed": {"input": "a"},
    "/api/embeddings": {"prompt": "a"},
    "/api/chat": {"messages": [USER], "options": {"num_predict": 1}},
    "/api/generate": {"prompt": "a", "options": {"num_predict": 1}},
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 1}},
    "/detokenize": {"tokens": [1]},
    "/v1/detokenize": {"tokens": [1]},
    "/invocations": {},
    "/close_session": {"session_id": "s"},
    "/slow_down": {"forward_sleep_time": None},
    "/set_internal_state": {"server_args": {}},
    "/set_policy": {"policy": "none"},
    "/start_profile": {"profile_by_stage": True},
    "/update_weights_from_disk": {"model_path": "none", "is_async": True},
    "/update_weights_from_distributed": {
        "names": [],
        "dtypes": [],
        "shapes": [],
        "load_format": "none",
    },
    "/init_weights_update_group": {
        "master_address": "x",
        "master_port": 1,
        "rank_offset": 5,
        "world_size": 5,
    },
    "/get_weights_by_name": {"name": "none"},
    "/v1/batches": {"input_file_id": "file-0", "endpoint": "/v1/completions"},
    "/rpc": {"method": "none"},
    "/apply-template": {"messages": [USER]},
    "/parse_function_call": {"text": "a", "tools": []},
    "/separate_reasoning": {"text": "a"},
    **{
        path: {"query": "a", "documents": ["a"]}
        for path in ("/v1/rerank", "/v2/rerank", "/rerank", "/reranking")
    },
    **{
        path: {"query": "a", "items": "b", "label_token_ids": [1]}
        for path in ("/v1/score", "/score")
    },
    **{path: {"text": "a"} for path in ("/v1/classify", "/classify")},
}
for _name in ("chat/completions", "completions", "embeddings", "responses"):
    RIGHT[f"/openai/v1/{_name}"] = RIGHT[f"/v1/{_name}"]
    RIGHT[f"/openai/deployments/{{deployment:path}}/{_name}"] = RIGHT[f"/v1/{_name}"]
# What makes a struct in a body right.
INNER: dict[str, dict[str, Any]] = {
    session.SessionFields.__name__: {"id": "s"},
    sampling_fields.ThinkingSwitch.__name__: {"type": "enabled"},
    "Thinking": {"type": "enabled"},
    weights.NamedTensor.__name__: {"name": "a", "dtype": "float32", "shape": [1], "data": ""},
    native.NativeSampling.__name__: {"max_new_tokens": 1},
}
EXTREMES = [
    *(
        "-9223372036854775809",
        "-9223372036854775808",
        "-1",
        "0",
        "2147483648",
        "9223372036854775808",
    ),
    *(
        "18446744073709551616",
        "1e308",
        "NaN",
        '"1"',
        "true",
        "null",
        "1" + "0" * 4_299,
        "1" + "0" * 4_300,
    ),
]
WORDS = [
    "-1",
    "0",
    "2147483648",
    "9223372036854775808",
    "18446744073709551616",
    "1e308",
    "nan",
    "true",
    "",
    " 1",
    "+1",
]
WORDS += [
    "1_0",
    "0x1",
    "١",
    "²",
    "0" * 400 + "19999999",
    "0" * 8 + "19999999",
    "1" * 5_000,
    "1.5",
    "[1]",
    "%00",
]


class Place(NamedTuple):
    """A field with numbers: the way to it from the body (0: the first of a list), and how it holds
    them."""

    path: tuple[str | int, ...]
    kind: str  # one, list, lists (in a list), object; anything: free of form
    structs: tuple[str, ...]  # what it is nested in, by the names of the types


def places(body: type[msgspec.Struct]) -> list[Place]:
    found: dict[tuple[Any, ...], Place] = {}

    def walk(
        kind: inspected.Type, path: tuple[str | int, ...], structs: tuple[str, ...], shape: str
    ) -> None:
        match kind:
            case inspected.UnionType():
                for one in kind.types:
                    walk(one, path, structs, shape)
            case inspected.ListType():
                walk(kind.item_type, path, structs, "list" if shape == "one" else "lists")
            case inspected.DictType():
                walk(kind.value_type, path, structs, "object")
            case inspected.StructType() if kind.cls.__name__ not in structs:
                inner = path if shape == "one" else (*path, 0)
                for field in kind.fields:
                    # The number of a call is the server's own, and in no document.
                    if field.name == "call" and issubclass(kind.cls, ControlRequest):
                        continue
                    walk(
                        field.type,
                        (*inner, field.encode_name),
                        (*structs, kind.cls.__name__),
                        "one",
                    )
            case inspected.IntType() | inspected.FloatType():
                found[*path, shape] = Place(path, shape, structs)
            case inspected.AnyType() | inspected.RawType():
                found[*path, shape] = Place(path, "anything", structs)

    walk(inspected.type_info(body), (), (), "one")
    return list(found.values())


def with_value(right: dict[str, Any], place: Place, value: Any) -> dict[str, Any]:
    """A right body with this value in its place."""
    body = copy.deepcopy(right)
    at: Any = body
    structs = iter(place.structs[1:])
    for key, following in zip(place.path, (*place.path[1:], None), strict=True):
        if following is None:
            at[key] = value
        elif following == 0:
            at[key] = [dict(INNER.get(next(structs), {}))]
            at = at[key]
        elif isinstance(key, int):
            at = at[key]
        else:
            if not isinstance(at.get(key), dict):
                at[key] = dict(INNER.get(next(structs), {}))
            at = at[key]
    return body


# How numbers stand in a field of each kind.
STANDS = {"one": "{}", "anything": "{}", "list": "[{}]", "lists": "[[{}]]", "object": '{{"1": {}}}'}
FORMS = ("{}", "[{}]", "[[{}]]", '{{"a": {}}}')
FORMS_OF_LISTS = (*FORMS, "[1, {}]", "[[1], {}]")


def texts(place: Place, extreme: str, turn: int) -> list[str]:
    """The extreme as it stands there, and, each in its turn, wrong in form or nested."""
    stands = STANDS[place.kind]
    forms = FORMS_OF_LISTS if place.kind in ("list", "lists") else FORMS
    others = [form for form in forms if form != stands]
    return [form.format(extreme) for form in (stands, others[turn % len(others)])]


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with serving(NANO, context_length=32, kv_tokens=512) as server:
        yield server


def is_in_form(path: str, answer: httpx.Response) -> bool:
    """Whether an error is written as the API of its path writes errors."""
    shown_name = answer.json()
    if path.startswith("/v1/messages"):
        return (
            shown_name["type"] == "error"
            and isinstance(shown_name["error"]["message"], str)
            and bool(shown_name["error"]["type"])
        )
    if path.startswith("/api/"):
        return isinstance(shown_name["error"], str)
    return isinstance(shown_name["error"]["message"], str) and {"type", "param", "code"} <= set(
        shown_name["error"]
    )


def message(path: str, answer: httpx.Response) -> str:
    error = answer.json()["error"]
    return error if isinstance(error, str) else error["message"]


def unharmed(server: RealServer) -> None:
    """The engine answers as at first, nobody is left in it, and its books are right."""
    assert server.post("/continue_generation").status_code == 200  # a body may have paused it
    answer = server.post("/v1/completions", prompt="Once", max_tokens=2, temperature=0)
    assert answer.status_code == 200
    scheduler = server.engine.scheduler
    assert not scheduler.requests
    assert not server.client.num_open
    assert scheduler.counters.messages.num_failed == 0
    audit(scheduler)


def test_a_request_that_forbids_every_token_is_the_fault_of_its_client(server: RealServer) -> None:
    contradictions: list[dict[str, Any]] = [
        {"allowed_token_ids": [65], "bad_words": [server.tokenizer.decode([65])]},
        {"allowed_token_ids": [65], "regex": "[0-9]{3}"},
        {
            "custom_logit_processor": "disallowed_tokens",
            "custom_params": {"token_ids": [65]},
            "allowed_token_ids": [65],
        },
    ]
    for contradiction in contradictions:
        body = {"prompt": "Once", "max_tokens": 2, **contradiction}
        answer = server.post("/v1/completions", **body)
        assert answer.status_code == 400, contradiction
        assert "leaves no token to choose" in message("/v1/completions", answer)
    unharmed(server)


WITH_BODIES = [one for one in OPERATIONS if one.body is not None]
NUMERIC_ROUTES = [one for one in WITH_BODIES if places(one.body)]  # type: ignore[arg-type]
# The first name of each route; of its other names some fields are tried.
FIRST_NAMES = {(one.handler, one.body): one for one in reversed(NUMERIC_ROUTES)}
OTHER_NAMES_STEP = 6
PARTS = 20  # of the extremes: each field is given those of one of them
UNHARMED_STEP = 32  # fields, after which the engine is looked at


@pytest.mark.parametrize("operation", NUMERIC_ROUTES, ids=lambda one: f"{one.method} {one.path}")
@pytest.mark.parametrize("part", seeds(1, PARTS))
def test_no_number_of_a_body_is_a_fault(
    operation: Operation, part: int, server: RealServer
) -> None:
    assert operation.body is not None
    right = RIGHT.get(operation.path, {})
    mark = "\x00here\x00"
    is_first = FIRST_NAMES[operation.handler, operation.body] is operation
    for number, place in enumerate(places(operation.body)):
        if not is_first and (number + part) % OTHER_NAMES_STEP:
            continue
        body = json.dumps(with_value(right, place, mark))
        for extreme in EXTREMES[(number + part) % PARTS :: PARTS]:
            for text in texts(place, extreme, number):
                content = body.replace(json.dumps(mark), text)
                answer = server.wait(
                    server.http.request(
                        operation.method,
                        operation.path,
                        content=content.encode(),
                        headers={"content-type": "application/json"},
                    )
                )
                what = f"{operation.path} {place.path}: {text[:60]}: {answer.text[:300]}"
                assert answer.status_code < 500, what
                assert answer.status_code < 400 or is_in_form(operation.path, answer), what
                check_words(operation.path, place, extreme, text, answer, what)
        if number % UNHARMED_STEP == 0:
            unharmed(server)
    unharmed(server)


def check_words(
    path: str, place: Place, extreme: str, text: str, answer: httpx.Response, what: str
) -> None:
    """A number of the right type and out of its range is refused with its field, itself and what is
    allowed."""
    if place.kind == "anything":
        return
    name = str(place.path[-1])
    number = NUMBERS[name]
    is_whole = re.fullmatch(r"-?[0-9]{1,20}", extreme)
    stands = STANDS[place.kind].format(extreme)
    if not is_whole or text != stands or number.holds(int(extreme)):
        return
    assert answer.status_code == 400, what
    shown_name = message(path, answer)
    value = int(extreme) if number.kind is int else float(extreme)
    assert name in shown_name, what
    assert (
        shown(value) in shown_name
        or f"{value:,}" in shown_name
        or shown(int(extreme)) in shown_name
    ), what
    assert "allowed" in shown_name, what


@pytest.mark.parametrize("operation", WITH_BODIES, ids=lambda one: f"{one.method} {one.path}")
def test_every_number_of_every_body_has_its_range(operation: Operation) -> None:
    """A new field cannot be forgotten: without a range its body cannot be read at all."""

    def found(body: type[msgspec.Struct], seen: frozenset[type]) -> set[str]:
        names = {field.shown_name for field in numeric_fields(body)} - {"call"}  # the server's own
        info = inspected.type_info(body)
        assert isinstance(info, inspected.StructType)
        for name, _ in nested_fields(body):
            [field] = [one for one in info.fields if one.name == name]
            for one in structs_in(field.type):
                if one not in seen:
                    names |= found(one, seen | {one})
        return names

    assert operation.body is not None
    numeric = {str(place.path[-1]) for place in places(operation.body) if place.kind != "anything"}
    assert found(operation.body, frozenset()) == numeric


def structs_in(kind: inspected.Type) -> list[type[msgspec.Struct]]:
    match kind:
        case inspected.UnionType():
            return [struct for one in kind.types for struct in structs_in(one)]
        case inspected.ListType():
            return structs_in(kind.item_type)
        case inspected.DictType():
            return structs_in(kind.value_type)
        case inspected.StructType():
            return [kind.cls]
    return []


QUERIED = [(one, name) for one in OPERATIONS for name in one.query if "{" not in one.path]
WITH_PATHS = [one for one in OPERATIONS if "{" in one.path]


@pytest.mark.parametrize(("operation", "name"), QUERIED, ids=lambda one: getattr(one, "path", one))
def test_no_number_of_a_query_is_a_fault(
    operation: Operation, name: str, server: RealServer
) -> None:
    for word in WORDS:
        answer = server.wait(
            server.http.request(operation.method, operation.path, params={name: word})
        )
        assert answer.status_code < 500, (word, answer.text)
        is_plain = re.fullmatch(r"-?[0-9]{1,20}", word, re.ASCII)
        if is_plain and QUERIES[name].holds(int(word)):
            # The server has no cache on disk, and has made no picture.
            is_elsewhere = re.search("without --cache-dir|last picture", answer.text)
            assert answer.status_code == 200 or is_elsewhere, (word, answer.text)
        elif QUERIES[name].kind is int or is_plain:
            assert answer.status_code == 400, (word, answer.text)
            # Anthropic names a field in the message of an error alone.
            assert (
                answer.json()["error"].get("param", name),
                "allowed" in message(operation.path, answer),
            ) == (name, True)
    unharmed(server)


@pytest.mark.parametrize("operation", WITH_PATHS, ids=lambda one: f"{one.method} {one.path}")
def test_no_path_is_a_fault(operation: Operation, server: RealServer) -> None:
    prefix = operation.path.partition("{")[0]
    suffix = operation.path.partition("}")[2]
    for word in WORDS:
        answer = server.wait(server.http.request(operation.method, f"{prefix}{word}{suffix}"))
        assert answer.status_code in (400, 404, 405, 200), (word, answer.text)
    unharmed(server)


def test_the_queries_of_the_table_are_those_of_the_routes() -> None:
    assert {name for _, name in QUERIED} == set(QUERIES)


@pytest.mark.parametrize("word", WORDS)
def test_no_header_with_a_number_is_a_fault(word: str, server: RealServer) -> None:
    headers = {"x-request-timeout-ms": word.encode()}
    answer = server.wait(
        server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers)
    )
    if re.fullmatch(r"[0-9]{1,20}", word, re.ASCII) and 0 < int(word) <= Limits().max_timeout_ms:
        assert answer.status_code == 200
        return
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "timeout" in error["message"].lower()
    assert (error["param"], "allowed" in error["message"]) == ("timeout_ms", True)


@pytest.mark.parametrize("name", NUMERIC)
def test_sampling_parameters_go_as_far_as_the_table_says(name: str) -> None:
    number = NUMBERS[name]
    for value in (
        -(2**63) - 1,
        -1,
        0,
        2**31,
        2**64,
        1e308,
        float("nan"),
        float("inf"),
        "1",
        True,
        [1],
        2**20_000,
    ):
        is_right = type(value) in (int, number.kind) and number.holds(value)  # type: ignore[arg-type]
        params = SamplingParams(**{name: value})  # type: ignore[arg-type]
        if is_right:
            params.check(100)
            continue
        with pytest.raises(InvalidParam, match="allowed") as wrong:
            params.check(100)
        assert wrong.value.param == NUMERIC[name]
