"""How a request says what its answer must be: the spellings, contradictions, and what the engine is
told."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.fake import RunningServer
from weft.config.numbers import MAX_CHOICE_LEN, MAX_CHOICES_LEN, MAX_GRAMMAR_LEN
from weft.messages.replies import RequestWarning, StepOutput
from weft.messages.sampling import Grammar

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}], "prompt": "x"}
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}}
TAG = {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"]}
WRITTEN = '{"type":"object","properties":{"b":{"type":"integer"},"a":{}}}'
AS_SCHEMA = Grammar("json_schema", WRITTEN)
AS_OBJECT = Grammar("json_schema", '{"type":"object"}')
FORMAT = {"type": "sequence", "elements": [{"type": "const_string", "value": "x"}]}
AS_FORMAT = Grammar(
    "structural_tag",
    '{"format":{"type":"sequence","elements":[{"type":"const_string","value":"x"}]}}',
)
AS_TAG = Grammar(
    "structural_tag", '{"structures":[{"begin":"<f>","end":"</f>","schema":{}}],"triggers":["<f"]}'
)


def response(kind: str, **fields: object) -> dict[str, Any]:
    return {"response_format": {"type": kind, **fields}}


def outputs(**fields: object) -> dict[str, Any]:
    return {"structured_outputs": fields}


SPELLED: list[tuple[dict[str, Any], Grammar | None]] = [
    (response("text"), None),
    (response("json_object"), AS_OBJECT),
    (response("json_object", schema=SCHEMA), AS_SCHEMA),
    (response("json_schema", json_schema={"name": "n", "schema": SCHEMA}), AS_SCHEMA),
    (
        response("json_schema", json_schema={"name": "n", "schema": SCHEMA, "strict": True}),
        Grammar("json_schema", WRITTEN, strict=True),
    ),
    (response("structural_tag", **TAG), AS_TAG),
    (outputs(json=SCHEMA), AS_SCHEMA),
    (outputs(json=SCHEMA, strict=True), Grammar("json_schema", WRITTEN, strict=True)),
    (outputs(json=WRITTEN), AS_SCHEMA),
    (outputs(regex="a+"), Grammar("regex", "a+")),
    (outputs(choice=["a", "ß"]), Grammar("choice", '["a","ß"]')),
    (outputs(grammar="root ::= x"), Grammar("ebnf", "root ::= x")),
    (outputs(json_object=True), AS_OBJECT),
    (outputs(json_object=False), None),
    (outputs(structural_tag=TAG), AS_TAG),
    ({"json_schema": WRITTEN}, AS_SCHEMA),
    ({"regex": "a+"}, Grammar("regex", "a+")),
    ({"ebnf": "root ::= x"}, Grammar("ebnf", "root ::= x")),
    ({"grammar": "root ::= x"}, Grammar("ebnf", "root ::= x")),
    ({"choice": ["a"]}, Grammar("choice", '["a"]')),
    ({"structural_tag": TAG}, AS_TAG),
    ({"structural_tag": {"type": "structural_tag", "format": FORMAT}}, AS_FORMAT),
    (response("structural_tag", format=FORMAT), AS_FORMAT),
]
OF_OPENAI: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"guided_json": SCHEMA}, AS_SCHEMA),
    ({"guided_json_object": True}, AS_OBJECT),
    ({"guided_regex": "a+"}, Grammar("regex", "a+")),
    ({"guided_choice": ["a"]}, Grammar("choice", '["a"]')),
    ({"guided_grammar": "x"}, Grammar("ebnf", "x")),
    (
        {"guided_json": None, "regex": None, "structured_outputs": None, "response_format": None},
        None,
    ),
]


@pytest.mark.parametrize(("fields", "grammar"), SPELLED + OF_OPENAI)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_every_spelling_reaches_the_engine(
    http: httpx.Client,
    server: RunningServer,
    path: str,
    fields: dict[str, Any],
    grammar: Grammar | None,
) -> None:
    answer = http.post(path, json={**HI, **fields})
    assert answer.status_code == 200, answer.text
    assert [request.sampling.grammar for request in server.engine.seen] == [grammar]


STRICT = Grammar("json_schema", WRITTEN, strict=True)
TWICE: list[tuple[dict[str, Any], Grammar]] = [
    ({"guided_grammar": "x", **outputs(grammar="x")}, Grammar("ebnf", "x")),
    ({"guided_json": SCHEMA, **outputs(json=WRITTEN)}, AS_SCHEMA),
    ({"guided_json": SCHEMA, **outputs(json=SCHEMA, strict=True)}, STRICT),
    (
        {
            "guided_json": SCHEMA,
            **response("json_schema", json_schema={"name": "n", "schema": SCHEMA, "strict": True}),
        },
        STRICT,
    ),
    ({"regex": "a+", **outputs(regex="a+"), "guided_regex": "a+"}, Grammar("regex", "a+")),
    ({"guided_choice": ["a"], **outputs(choice=["a"])}, Grammar("choice", '["a"]')),
    ({"structural_tag": TAG, **response("structural_tag", **TAG)}, AS_TAG),
    ({**response("json_object"), **outputs(json_object=True)}, AS_OBJECT),
]


@pytest.mark.parametrize(("fields", "grammar"), TWICE)
def test_equal_grammars_in_several_fields_count_once(
    http: httpx.Client, server: RunningServer, fields: dict[str, Any], grammar: Grammar
) -> None:
    answer = http.post(CHAT, json={**HI, **fields})
    assert answer.status_code == 200, answer.text
    assert [request.sampling.grammar for request in server.engine.seen] == [grammar]


@pytest.mark.parametrize(
    ("fields", "grammar"), [one for one in SPELLED if "response_format" not in one[0]]
)
def test_the_native_route_has_them_among_its_sampling_parameters(
    http: httpx.Client, server: RunningServer, fields: dict[str, Any], grammar: Grammar | None
) -> None:
    answer = http.post("/generate", json={"text": "x", "sampling_params": fields})
    assert answer.status_code == 200, answer.text
    assert [request.sampling.grammar for request in server.engine.seen] == [grammar]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"regex": "a", "ebnf": "b"}, "ebnf", "regex and ebnf are given; only one"),
        ({"regex": "a", **response("json_object")}, "response_format", "regex and response_format"),
        (
            outputs(regex="a", choice=["b"]),
            "structured_outputs.choice",
            "structured_outputs.regex and",
        ),
        ({"json_schema": {}, **outputs(json=SCHEMA)}, "structured_outputs.json", "json_schema and"),
        (
            outputs(json=3),
            "structured_outputs.json",
            "structured_outputs.json is 3; a JSON schema is needed",
        ),
        ({"json_schema": "{"}, "json_schema", "json_schema is not valid JSON"),
        (
            outputs(poem="x"),
            "structured_outputs",
            "the key 'poem'; allowed keys: json, regex, choice",
        ),
        (outputs(choice=[]), "structured_outputs.choice", "a list of strings"),
        (outputs(choice=["a", ""]), "structured_outputs.choice", "a list of strings"),
        (outputs(choice=["a", 1]), "structured_outputs.choice", "a list of strings"),
        ({"regex": ""}, "regex", "a regular expression is needed"),
        (response("json_schema"), "response_format.json_schema.schema", "has no schema"),
        (response("poem"), "response_format.type", "'poem'; text, json_object"),
        ({"response_format": {}}, "response_format", "an object with a type"),
        ({"structural_tag": {"structures": []}}, "structural_tag", "triggers"),
        (
            {"structural_tag": {**TAG, "triggers": ["<g"]}},
            "structural_tag",
            "must begin with one of the triggers",
        ),
        (
            {"structural_tag": {"format": "x"}},
            "structural_tag.format",
            "'x'; an object with a type is needed",
        ),
        ({"regex": "a" * (MAX_GRAMMAR_LEN + 1)}, "regex", "4,000,001 characters; 1 to 4,000,000"),
        ({"regex": 5}, "regex", "regex is 5; a text or null is needed"),
    ],
)
def test_invalid_and_contradictory_constraints_are_refused(
    http: httpx.Client, server: RunningServer, fields: dict[str, Any], param: str, message: str
) -> None:
    answer = http.post(CHAT, json={**HI, **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["param"] == param, error
    assert message in error["message"]
    assert server.engine.seen == []


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/messages", "output_format"),
        ("/v1/messages", "output_config.format"),
        ("/v1/responses", "text.format"),
    ],
)
def test_errors_name_the_field_of_the_api(http: httpx.Client, path: str, name: str) -> None:
    body: dict[str, Any] = {"max_tokens": 1, "messages": HI["messages"]}
    if path == "/v1/responses":
        body = {"input": "Hi"}

    def refusal(format: dict[str, Any]) -> str:
        outer, _, inner = name.partition(".")
        value = format
        if inner:
            value = {inner: format}
        answer = http.post(path, json={**body, "regex": "a", outer: value})
        return str(answer.json()["error"]["message"])

    assert f"regex and {name} are given" in refusal({"type": "json_schema", "schema": {}})
    assert f"{name}.type is 'poem'" in refusal({"type": "poem"})
    assert f"{name}.schema is 3" in refusal({"type": "json_schema", "schema": 3})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT, "/generate"])
def test_constraints_that_are_not_enforced_are_listed_in_a_header(
    http: httpx.Client, server: RunningServer, path: str, stream: bool
) -> None:
    start = server.engine.start

    def warn_first() -> None:
        for id in server.engine.running:
            server.engine.answer(
                StepOutput(warnings=[RequestWarning(id=id, text='Unimplemented keys: ["größe"]')])
            )
        start()

    server.engine.start = warn_first  # type: ignore[method-assign]
    try:
        answer = http.post(
            path, json={**(HI if path != "/generate" else {"text": "x"}), "stream": stream}
        )
    finally:
        server.engine.start = start  # type: ignore[method-assign]
    assert answer.headers["x-weft-warnings"] == 'Unimplemented keys: ["gr??e"]'
    assert (
        "x-weft-warnings"
        not in http.post(path, json=HI if path != "/generate" else {"text": "x"}).headers
    )


@pytest.mark.parametrize(
    ("choices", "limit"),
    [
        (["x" * 1_000_000, "y" * 1_000_000, "z" * 1_000_000], MAX_CHOICE_LEN),
        ([f"{number:016000}" for number in range(63)], MAX_CHOICES_LEN),
    ],
)
def test_choices_that_could_not_be_followed_are_refused_before_anything_is_compiled(
    server: RunningServer, http: httpx.Client, choices: list[str], limit: int
) -> None:
    answer = http.post(TEXT, json={"prompt": "x", "choice": choices})
    assert answer.status_code == 400
    assert f"{limit:,} are allowed" in answer.json()["error"]["message"]
    assert server.engine.seen == []
