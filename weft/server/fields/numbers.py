"""Checks the numbers of a request against the one table of ranges (`config/numbers.py`).

It checks the numbers of a decoded body, at any depth, and of a query or a header. The types of a
body determine which of its fields have numbers; this module does not know their meaning.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import msgspec
import msgspec.inspect as inspected
from starlette.requests import Request

from weft.config.numbers import ANY_INTEGER, ANY_REAL, INT32, NUMBERS, QUERIES, Number
from weft.messages.wrong_field import leaves_of
from weft.server.errors import ApiError

UNKNOWN_VOCABULARY = INT32 + 1
_INTEGER = re.compile(r"-?[0-9]{1,20}")
_REAL = re.compile(r"-?[0-9]{1,20}(\.[0-9]{1,20})?")


class Field(NamedTuple):
    """A field of a body that contains numbers: one, lists of them, or values of an object."""

    name: str  # name of the attribute
    shown_name: str  # name in the request
    number: Number


class NestedField(NamedTuple):
    """A field of a body that contains other structs."""

    name: str  # name of the attribute
    shown_name: str  # name in the request


def check_numbers(
    body: msgspec.Struct,
    vocab_size: int | None,
    where: str = "",
) -> None:
    """Raise `ApiError` for the first number of `body` that is out of range.

    `where`: the path of the fields that contain `body`.
    """
    for field in numeric_fields(type(body)):
        value = getattr(body, field.name)
        if value is None or value is msgspec.UNSET or isinstance(value, str):
            continue
        number = field.number
        if number.is_token:
            number = number.within(vocab_size or UNKNOWN_VOCABULARY)
        is_plain = type(value) is int or type(value) is float
        if is_plain and number.holds(value):
            continue  # the fast path for nearly all values
        if not _is_right(number, value):
            param = where + field.shown_name
            _refuse(number, param, param, value)
    for name, shown_name in nested_fields(type(body)):
        value = getattr(body, name)
        if isinstance(value, msgspec.Struct):
            check_numbers(value, vocab_size, f"{where}{shown_name}.")
        elif isinstance(value, list):
            for index, one in enumerate(value):
                if isinstance(one, msgspec.Struct):
                    check_numbers(one, vocab_size, f"{where}{shown_name}[{index}].")


def query_number(request: Request, name: str, default: float) -> float:
    """The number `name` of the query. Raises `ApiError` if it is not a number or out of range."""
    text = request.query_params.get(name)
    if text is None:
        return default
    number = QUERIES[name]
    form = _REAL
    if number.kind is int:
        form = _INTEGER
    value: Any = text  # not a number: the error repeats it
    if form.fullmatch(text):
        value = number.kind(text)
    wrong = number.wrong(name, value)
    if wrong:
        raise ApiError(400, wrong, param=name)
    return number.kind(value)


def header_number(text: str, name: str, shown_name: str) -> int:
    """The integer in a header that corresponds to the field `name`. Raises `ApiError`."""
    value: Any = text
    if _INTEGER.fullmatch(text):
        value = int(text)
    wrong = NUMBERS[name].wrong(shown_name, value)
    if wrong:
        raise ApiError(400, wrong, param=name)
    return int(value)


@cache
def numeric_fields(body: type[msgspec.Struct]) -> tuple[Field, ...]:
    """The fields of a body that may contain numbers.

    Raises KeyError for a field of weft's own that the table of ranges lacks.
    """
    found: list[Field] = []
    for field in _fields(body):
        if _has_leaf(field, inspected.IntType | inspected.FloatType):
            shown_name = field.encode_name
            if body.__module__.partition(".")[0] != "weft":  # it sets bounds of its own
                is_real = _has_leaf(field, inspected.FloatType)
                number = ANY_REAL if is_real else ANY_INTEGER
            else:
                number = NUMBERS[shown_name]
            found.append(Field(field.name, shown_name, number))
    return tuple(found)


@cache
def nested_fields(body: type[msgspec.Struct]) -> tuple[NestedField, ...]:
    """The fields of a body that may contain other structs."""
    found: list[NestedField] = []
    for field in _fields(body):
        if _has_leaf(field, inspected.StructType):
            nested = NestedField(field.name, field.encode_name)
            found.append(nested)
    return tuple(found)


def _has_leaf(field: inspected.Field, wanted: Any) -> bool:
    """Whether the value, the items or the values of a field may be of a `wanted` type."""
    leaves = leaves_of(field.type)
    return any(isinstance(leaf, wanted) for leaf in leaves)


def _fields(body: type[msgspec.Struct]) -> tuple[inspected.Field, ...]:
    found = inspected.type_info(body)
    assert isinstance(found, inspected.StructType)
    return found.fields


def _is_right(number: Number, value: Any) -> bool:
    """Whether all numbers in a value are in range.

    Other values count as right: their types were checked before.
    """
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        if isinstance(value, bool) or not isinstance(value, int | float):
            return True
        return number.holds(value)
    if not value:
        return True
    try:
        # For a list of numbers, check only its extremes: if both are in range, all are.
        if not number.holds(min(value)):
            return False
        return number.holds(max(value))
    except TypeError:
        # Texts, lists, or numbers mixed with other values: one by one.
        return all(_is_right(number, one) for one in value)


def _refuse(
    number: Number,
    param: str,
    shown_name: str,
    value: Any,
) -> None:
    """Raise `ApiError` for the first number in a value that is out of range."""
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        entries = value.items()
    elif isinstance(value, list):
        entries = enumerate(value)
    for key, one in entries:
        if not _is_right(number, one):
            _refuse(number, param, f"{shown_name}[{str(key)[:32]}]", one)
    wrong = number.wrong(shown_name, value)
    raise ApiError(400, wrong, param=param)
