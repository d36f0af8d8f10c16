"""`/openapi.json` and `/docs`, generated from the routes and the structs of their bodies."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import msgspec
import msgspec.inspect as inspected

from weft.config.limits import Limits
from weft.config.numbers import QUERIES, Number
from weft.json_types import JsonObject
from weft.messages.calls import ControlRequest
from weft.server.errors import ErrorBody
from weft.server.fields.numbers import numeric_fields
from weft.server.limits import bounds_of
from weft.server.operation import Operation


def openapi_document(
    operations: Sequence[Operation],
    version: str,
    limits: Limits,
) -> JsonObject:
    """The routes and the schemas of their bodies, as OpenAPI 3.1."""
    types: set[type[msgspec.Struct]] = set()
    in_bodies: dict[str, type[msgspec.Struct]] = {}
    for operation in operations:
        types.update(type for type in (operation.body, operation.answer) if type is not None)
    ordered: list[type[msgspec.Struct]] = [
        ErrorBody,
        *sorted(types, key=lambda type: type.__name__),
    ]
    schemas, components = msgspec.json.schema_components(
        ordered, ref_template="#/components/schemas/{name}"
    )
    for operation in operations:
        if operation.body is not None:
            info = inspected.type_info(operation.body)
            in_bodies.update(_structs(info))
    for name, type in in_bodies.items():
        _bound(components[name], type, limits)
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


def _structs(kind: inspected.Type) -> dict[str, type[msgspec.Struct]]:
    """The structs in a type of a body, by the names of their schemas."""
    found: dict[str, type[msgspec.Struct]] = {}
    waiting = [kind]
    while waiting:
        match waiting.pop():
            case inspected.StructType() as one if one.cls.__name__ not in found:
                found[one.cls.__name__] = one.cls
                waiting += [field.type for field in one.fields]
            case inspected.UnionType() as one:
                waiting += one.types
            case inspected.ListType() as one:
                waiting.append(one.item_type)
            case inspected.DictType() as one:
                waiting.append(one.value_type)
    return found


def _bound(component: JsonObject, type: type[msgspec.Struct], limits: Limits) -> None:
    """Write into the schema of a body, or of a struct in one, what the server allows: the ranges of
    numbers, and the lengths that one keyword can say."""
    properties = component["properties"]
    numeric = ("integer", "number")
    if type.__module__.partition(".")[0] == "weft":  # others set bounds of their own
        for field in numeric_fields(type):
            schema = properties[field.shown_name]
            for one in _within(schema, numeric):
                del one["type"]
                one.update(_range(field.number))
    names = zip(
        type.__struct_fields__,
        type.__struct_encode_fields__,
        strict=True,
    )
    for name, shown_name in names:
        schema = properties[shown_name]
        for bound in bounds_of(name):
            most = getattr(limits, bound.limit)
            for kind, keyword in bound.keywords.items():
                for one in _within(schema, (kind,), bound.is_of_items):
                    own = one.get(keyword, most)
                    one[keyword] = min(most, own)


def _within(
    schema: Any,
    kinds: Sequence[str],
    with_items: bool = True,
) -> list[JsonObject]:
    """The schemas of these kinds in the schema of a field: its own, and those of alternatives, and
    of items and values."""
    if not isinstance(schema, dict):
        return []
    if schema.get("type") in kinds:
        return [schema]
    inner = list(schema.get("anyOf", ()))
    if with_items:
        inner += [schema.get("items"), schema.get("additionalProperties")]
    found: list[JsonObject] = []
    for one in inner:
        found += _within(one, kinds, with_items)
    return found


def _range(number: Number) -> JsonObject:
    kind = "integer" if number.kind is int else "number"
    if number.is_token:
        return {"type": kind, "minimum": 0}  # the maximum depends on the model's vocabulary
    low = number.low
    others: list[JsonObject] = []
    for value in sorted(number.also, reverse=True):
        if value == low - 1:
            low = value
        else:
            others.append({"const": value})
    lowest = "exclusiveMinimum" if number.is_open else "minimum"
    schema: JsonObject = {"type": kind, lowest: low, "maximum": number.high}
    if others:
        return {"anyOf": [*others, schema]}
    return schema


def _json(schema: JsonObject) -> JsonObject:
    return {"application/json": {"schema": schema}}


def _template(path: str) -> str:
    return path.replace(":path}", "}")
