"""Holds the numbers of a request against the one table of ranges (`config/numbers.py`): those of a
decoded body, whatever it is nested in, and those of a query. Which fields have numbers is read from
the types of the body.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, NamedTuple

import msgspec
import msgspec.inspect as inspected
from starlette.requests import Request

from weft.config.numbers import INT32, NUMBERS, QUERIES, Number
from weft.server.errors import ApiError

UNKNOWN_VOCABULARY = INT32 + 1
_WHOLE = re.compile(r"-?[0-9]{1,20}")
_REAL = re.compile(r"-?[0-9]{1,20}(\.[0-9]{1,20})?")


class Field(NamedTuple):
    """A field of a body with numbers in it: one, a list, lists of lists, or the values of an
    object.
    """

    name: str  # of the attribute
    told: str  # as the client calls it
    number: Number


def check_numbers(
    body: msgspec.Struct,
    vocab_size: int | None,
    where: str = "",
) -> None:
    """Raise `ApiError` for the first number of `body` that is out of its range.

    `where`: the fields that `body` is nested in.
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
            continue  # what nearly all are
        if not _is_right(number, value):
            _refuse(number, where + field.told, where + field.told, value)
    for name, told in nested_fields(type(body)):
        value = getattr(body, name)
        if isinstance(value, msgspec.Struct):
            check_numbers(value, vocab_size, f"{where}{told}.")
        elif isinstance(value, list):
            for index, one in enumerate(value):
                if isinstance(one, msgspec.Struct):
                    check_numbers(one, vocab_size, f"{where}{told}[{index}].")


def query_number(request: Request, name: str, default: float) -> float:
    """The number `name` of the query. Raises `ApiError` if it is none, or out of its range."""
    text = request.query_params.get(name)
    if text is None:
        return default
    number = QUERIES[name]
    form = _WHOLE if number.kind is int else _REAL
    value: Any = number.kind(text) if form.fullmatch(text) else text
    if wrong := number.wrong(name, value):
        raise ApiError(400, wrong, param=name)
    return number.kind(value)


def header_number(text: str, name: str, told: str) -> int:
    """The whole number in a header that stands for the field `name`. Raises `ApiError`."""
    value: Any = int(text) if _WHOLE.fullmatch(text) else text
    if wrong := NUMBERS[name].wrong(told, value):
        raise ApiError(400, wrong, param=name)
    return int(value)


@cache
def numeric_fields(body: type[msgspec.Struct]) -> tuple[Field, ...]:
    """The fields of a body that may have numbers.

    Raises KeyError for one that the table of ranges lacks.
    """
    found = []
    for field in _fields(body):
        kinds = _leaves(field.type)
        if any(isinstance(kind, inspected.IntType | inspected.FloatType) for kind in kinds):
            found.append(Field(field.name, field.encode_name, NUMBERS[field.encode_name]))
    return tuple(found)


@cache
def nested_fields(body: type[msgspec.Struct]) -> tuple[tuple[str, str], ...]:
    """The fields of a body that may have other structs in them.

    Their names, and how clients call them.
    """
    return tuple((one.name, one.encode_name) for one in _fields(body) if _has_struct(one))


def _has_struct(field: inspected.Field) -> bool:
    return any(isinstance(kind, inspected.StructType) for kind in _leaves(field.type))


def _fields(body: type[msgspec.Struct]) -> tuple[inspected.Field, ...]:
    found = inspected.type_info(body)
    assert isinstance(found, inspected.StructType)
    return found.fields


def _leaves(kind: inspected.Type) -> list[inspected.Type]:
    """The types that a field, its items or its values may have."""
    if isinstance(kind, inspected.UnionType):
        leaves: list[inspected.Type] = []
        for member in kind.types:
            leaves += _leaves(member)
        return leaves
    if isinstance(kind, inspected.ListType):
        return _leaves(kind.item_type)
    if isinstance(kind, inspected.DictType):
        return _leaves(kind.value_type)
    return [kind]


def _is_right(number: Number, value: Any) -> bool:
    """Whether all numbers in a value are in range.

    What is no number is right here: its type was checked before.
    """
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return not is_number or number.holds(value)
    if not value:
        return True
    try:  # long lists of nothing but numbers, as most are
        return number.holds(min(value)) and number.holds(max(value))
    except TypeError:
        return all(_is_right(number, one) for one in value)


def _refuse(number: Number, param: str, told: str, value: Any) -> None:
    """Raise `ApiError` for the first number in a value that is out of range."""
    if isinstance(value, list | dict):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, one in entries:
            if not _is_right(number, one):
                _refuse(number, param, f"{told}[{str(key)[:32]}]", one)
    raise ApiError(400, number.wrong(told, value), param=param)
