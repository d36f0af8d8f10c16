"""`/openapi.json` and `/docs`, generated from the routes and the structs of their bodies."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import msgspec

from weft.config.numbers import NUMBERS, QUERIES, Number
from weft.json_types import JsonObject
from weft.messages.calls import ControlRequest
from weft.server.errors import ErrorBody
from weft.server.operation import Operation


def openapi_document(operations: Sequence[Operation], version: str) -> JsonObject:
    """The routes and the schemas of their bodies, as OpenAPI 3.1."""
    types: set[type[msgspec.Struct]] = set()
    for operation in operations:
        types.update(type for type in (operation.body, operation.answer) if type is not None)
    ordered: list[type[msgspec.Struct]] = [
        ErrorBody,
        *sorted(types, key=lambda type: type.__name__),
    ]
    schemas, components = msgspec.json.schema_components(
        ordered, ref_template="#/components/schemas/{name}"
    )
    for component in components.values():
        _bound(component)
    for type in types:
        if issubclass(type, ControlRequest):
            _hide_envelope(components[type.__name__])
    schema_of = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, JsonObject] = {}
    for operation in operations:
        methods = paths.setdefault(_template(operation.path), {})
        methods[operation.method.lower()] = _describe(operation, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "weft", "version": version},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


_STYLE = (
    "body { font-family: sans-serif; margin: 2em } "
    "td, th { padding: .3em .8em; text-align: left;\nvertical-align: top } "
    "tr:nth-child(even) { background: #8882 }"
)


def docs_page(operations: Sequence[Operation], version: str) -> str:
    """The routes as one HTML page that loads no other files."""
    rows = "\n".join(map(_docs_row, operations))
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>weft {html.escape(version)}</title>
<style>{_STYLE}</style>
<h1>weft {html.escape(version)}</h1>
<p>For programs: <a href="/openapi.json">/openapi.json</a></p>
<table><tr><th>method<th>path<th>what<th>fields of the body
{rows}
</table></html>
"""


def _docs_row(operation: Operation) -> str:
    names: tuple[str, ...] = ()
    if operation.body is not None:
        names = tuple(name for name in operation.body.__struct_encode_fields__ if name != "call")
    cells = (operation.method, operation.path, operation.summary, ", ".join(names))
    return "<tr>" + "".join(f"<td>{html.escape(cell)}" for cell in cells)


def _describe(
    operation: Operation, schema_of: dict[type[msgspec.Struct], JsonObject]
) -> JsonObject:
    failure = {"description": "error", "content": _json(schema_of[ErrorBody])}
    success: JsonObject = {"description": "success"}
    if operation.answer is not None:
        success["content"] = _json(schema_of[operation.answer])
    path_name = operation.path.replace("/", "_").replace(":path", "")
    described: JsonObject = {
        "summary": operation.summary,
        "operationId": f"{operation.method.lower()}{path_name}",
        "responses": {
            "200": success,
            "4XX": failure,
            "5XX": failure,
        },
    }
    if operation.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": _json(schema_of[operation.body]),
        }
    parameters = _parameters(operation)
    if parameters:
        described["parameters"] = parameters
    if operation.is_open:
        described["security"] = []
    return described


def _parameters(operation: Operation) -> list[JsonObject]:
    """The parameters of the query and of the path."""
    parameters: list[JsonObject] = []
    for name in operation.query:
        schema = _range(QUERIES[name])
        parameters.append({"name": name, "in": "query", "schema": schema})
    if "{" in operation.path:
        name = operation.path.partition("{")[2].partition("}")[0].removesuffix(":path")
        parameter = {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string"},
        }
        parameters.append(parameter)
    return parameters


def _hide_envelope(component: JsonObject) -> None:
    """Remove the fields that a message needs only on its way to the engine: its tag and the number
    of the call.

    The server sets both, whatever a body contains.
    """
    for name in ("type", "call"):
        del component["properties"][name]
    component["required"] = [name for name in component.get("required", ()) if name != "type"]


def _bound(component: JsonObject) -> None:
    """Write the ranges of numbers into the schema of a body.

    No answer has fields of these names.
    """
    for name, schema in component.get("properties", {}).items():
        if name in NUMBERS:
            for one in (*_numbers_in(schema), *_values_in(schema)):
                one.update(_range(NUMBERS[name]))


def _numbers_in(schema: Any) -> list[JsonObject]:
    """The schemas of numbers in the schema of a field: its own, and those of alternatives and
    items."""
    if not isinstance(schema, dict):
        return []
    if schema.get("type") in ("integer", "number"):
        return [schema]
    found: list[JsonObject] = []
    for part in (*schema.get("anyOf", ()), schema.get("items")):
        found += _numbers_in(part)
    return found


def _values_in(schema: JsonObject) -> list[JsonObject]:
    """The schemas of numbers that are the values of an object."""
    found: list[JsonObject] = []
    for part in (schema, *schema.get("anyOf", ())):
        found += _numbers_in(part.get("additionalProperties"))
    return found


def _range(number: Number) -> JsonObject:
    kind = "integer" if number.kind is int else "number"
    if number.is_token:
        return {"type": kind, "minimum": 0}  # the maximum depends on the model's vocabulary
    low = min((number.low, *number.also))
    lowest = "exclusiveMinimum" if number.is_open else "minimum"
    return {"type": kind, lowest: low, "maximum": number.high}


def _json(schema: JsonObject) -> JsonObject:
    return {"application/json": {"schema": schema}}


def _template(path: str) -> str:
    return path.replace(":path}", "}")
