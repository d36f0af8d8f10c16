"""What a grammar library that computes in doubles can enforce of a JSON schema, without another
value than the schema's.

Bounds are narrowed to the next numbers that the library has, so that every answer keeps to them;
what cannot be narrowed is left out and named. This module knows nothing of grammar libraries.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NamedTuple, TypeGuard

from weft.grammar.protocol import InvalidGrammar
from weft.json_types import JsonObject

LARGEST = 2**63 - 1024  # the largest double below 2^63: beyond it, no range is compiled
FARTHEST = 10**17  # no range that begins beyond it is compiled
SMALLEST = 1e-12  # a bound nearer to 0 needs more digits than the library writes
MAX_EXACT_LEN = 4_000  # characters of values that are written as a regular expression
MAX_FACTOR = 2**32 - 1  # the digits of `multipleOf`
_MAX_SHOWN = 80
_LOWER = ("minimum", "exclusiveMinimum")
_UPPER = ("maximum", "exclusiveMaximum")
# Values that are no schemas, and keep their form.
_DATA = frozenset(("const", "enum", "default", "examples", "required", "x-guidance"))
_BY_NAME = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
)

_ANNOTATIONS = ("title", "description", "default", "examples", "$schema", "$comment", "type")

Translate = Callable[[str], str]


class Enforceable:
    """One schema. `left_out`: what the copies do not enforce, for the user."""

    def __init__(self, pattern: Translate) -> None:
        """`pattern` translates a regular expression; it raises InvalidGrammar if it cannot."""
        self._pattern = pattern
        self._mends = (
            (frozenset(("const", "enum")), self._constants),
            (frozenset((*_LOWER, *_UPPER)), self._bounds),
            (frozenset(("multipleOf",)), self._factor),
            (frozenset(("pattern",)), self._text),
            (frozenset(("minProperties",)), self._count),
        )
        self.left_out: list[str] = []

    def copy(self, schema: Any) -> Any:
        """A copy of a schema. Raises RecursionError."""
        if isinstance(schema, list):
            return list(map(self.copy, schema))
        if not isinstance(schema, dict):
            return schema
        result: JsonObject = {}
        for key, value in schema.items():
            if key in _DATA or not isinstance(value, dict | list):
                result[key] = value
                continue
            if key == "patternProperties" and isinstance(value, dict):
                value = self._named_by_pattern(value)
            if key in _BY_NAME and isinstance(value, dict):
                result[key] = {name: self.copy(one) for name, one in value.items()}
            else:
                result[key] = self.copy(value)
        for keys, mend in self._mends:
            if not keys.isdisjoint(result):
                mend(result)
        return result

    def _leave_out(self, schema: JsonObject, key: str, why: str) -> None:
        shown = repr(schema.pop(key))[:_MAX_SHOWN]
        self.left_out.append(f"{key} {shown}: {why}")

    def _constants(self, schema: JsonObject) -> None:
        for key in ("const", "enum"):
            if key in schema:
                schema[key] = _with_whole(schema[key])
        if "const" in schema and not _is_exact(schema["const"]):
            value = schema["const"]
            self._leave_out(schema, "const", "a number in it has too many digits")
            schema.setdefault("type", _type(value))
        values = schema.get("enum")
        if not isinstance(values, list):
            return
        exact = [value for value in values if _is_exact(value)]
        if len(exact) == len(values):
            return
        self._leave_out(schema, "enum", "a number in it has too many digits")
        if exact:
            schema["enum"] = exact
        else:
            schema.setdefault("type", list(dict.fromkeys(map(_type, values))))

    def _bounds(self, schema: JsonObject) -> None:
        narrowed: dict[str, float] = {}
        for key in (*_LOWER, *_UPPER):
            value = schema.get(key)
            if not _is_number(value):
                continue
            bound = _inward(value, up=key in _LOWER)
            if bound is None:
                del schema[key]
            else:
                narrowed[key] = bound
        lower = max((narrowed[key] for key in _LOWER if key in narrowed), default=-math.inf)
        upper = min((narrowed[key] for key in _UPPER if key in narrowed), default=math.inf)
        was_changed = any(schema[key] != bound for key, bound in narrowed.items())
        is_far = lower > FARTHEST or upper < -FARTHEST
        is_empty = is_far or (was_changed and lower > upper)
        for key, bound in narrowed.items():
            if is_empty:
                self._leave_out(schema, key, "no number in this range has few enough digits")
            else:
                schema[key] = bound

    def _factor(self, schema: JsonObject) -> None:
        value = schema.get("multipleOf")
        if not _is_number(value) or not math.isfinite(value):
            return
        digits = Decimal(repr(value)).normalize().as_tuple()
        coefficient = int("".join(map(str, digits.digits)))
        exponent = int(digits.exponent)
        if coefficient * 10 ** max(exponent, 0) > MAX_FACTOR or exponent < -9:
            self._leave_out(schema, "multipleOf", "it has too many digits")

    def _text(self, schema: JsonObject) -> None:
        pattern = schema.get("pattern")
        if not isinstance(pattern, str):
            return
        try:
            schema["pattern"] = self._pattern(pattern)
        except InvalidGrammar as exc:
            self._leave_out(schema, "pattern", str(exc))

    def _named_by_pattern(self, schemas: JsonObject) -> JsonObject:
        kept: JsonObject = {}
        for pattern, schema in schemas.items():
            try:
                kept[self._pattern(pattern)] = schema
            except InvalidGrammar as exc:
                self.left_out.append(f"patternProperties {pattern[:_MAX_SHOWN]!r}: {exc}")
        return kept

    def _count(self, schema: JsonObject) -> None:
        """Keys that the schema does not name may come twice, and count twice."""
        least = schema.get("minProperties")
        is_closed = schema.get("additionalProperties") is False
        if not _is_number(least) or (is_closed and not schema.get("patternProperties")):
            return
        required = schema.get("required")
        num_named = len(set(required)) if isinstance(required, list) else 0
        if least > max(num_named, 1):
            self.left_out.append(f"minProperties {least}: a free key may come more than once")


class Space(NamedTuple):
    """What may stand between the tokens of JSON, as regular expressions."""

    inside: str  # after an opening bracket, and before a closing one
    comma: str
    colon: str


def flexible_space(pattern: str) -> Space:
    """White space that matches `pattern`, or none."""
    white = f"(?:{pattern})?"
    return Space(white, f"{white},{white}", f"{white}:{white}")


COMPACT_SPACE = Space("", ", ", ": ")


def exact_patterns(schema: Any, space: Space) -> list[str]:
    """Regular expressions for the values of a schema that is only a list of them, one with a number
    of many digits; else []."""
    if not isinstance(schema, dict):
        return []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    others = set(schema) - {"const", "enum", "x-guidance", *_ANNOTATIONS}
    if not isinstance(values, list) or others or {"const", "enum"} <= set(schema):
        return []
    values = _with_whole(values)
    if all(map(_is_exact, values)) or not all(map(_is_finite, values)):
        return []
    if len(json.dumps(values)) > MAX_EXACT_LEN:
        return []
    types = schema.get("type")
    allowed = types if isinstance(types, list) else [types]
    if types is not None and not all(_is_of_type(value, allowed) for value in values):
        return []
    return [_pattern_of(value, space) for value in values]


def _pattern_of(value: Any, space: Space) -> str:
    """A regular expression for the texts of a value. The properties of an object come in its own
    order."""
    if isinstance(value, list):
        return _bracketed("[]", [_pattern_of(item, space) for item in value], space)
    if isinstance(value, dict):
        members = [
            _pattern_of(name, space) + space.colon + _pattern_of(one, space)
            for name, one in value.items()
        ]
        return _bracketed("{}", members, space)
    return re.escape(_text_of(value))


def _bracketed(brackets: str, parts: list[str], space: Space) -> str:
    begin, end = map(re.escape, brackets)
    if not parts:
        return begin + space.inside + end
    return begin + space.inside + space.comma.join(parts) + space.inside + end


def _text_of(value: str | float | None) -> str:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a character
        return json.dumps(value)
    return text


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _type(value: Any) -> str:
    if isinstance(value, dict):
        return "object"
    if isinstance(value, list):
        return "array"
    if isinstance(value, str):
        return "string"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    return "integer" if isinstance(value, int) else "number"


def _is_of_type(value: Any, types: list[Any]) -> bool:
    kind = _type(value)
    return kind in types or (kind == "integer" and "number" in types)


def _is_finite(value: Any) -> bool:
    """Whether no number in a value is beyond all doubles; JSON has no text for infinity."""
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _with_whole(value: Any) -> Any:
    """A value whose integers are written without a fraction, which takes digits."""
    if isinstance(value, dict):
        return {name: _with_whole(one) for name, one in value.items()}
    if isinstance(value, list):
        return list(map(_with_whole, value))
    if not isinstance(value, float) or not value.is_integer():
        return value
    return int(Decimal(repr(value)))


def _is_exact(value: Any) -> bool:
    """Whether the library reads each number in a value as it is, and writes it so."""
    if isinstance(value, dict):
        return all(map(_is_exact, value.values()))
    if isinstance(value, list):
        return all(map(_is_exact, value))
    if not _is_number(value) or value == 0:
        return True
    if not SMALLEST <= abs(value) <= LARGEST:
        return False
    return bool(float(value) == value) and _as_read(value) == value and not _is_tie(value)


def _is_tie(value: float) -> bool:
    """Whether two shortest decimal numbers are equally near to a double: the library may write the
    one that Python does not."""
    written = Decimal(repr(value))
    return 2 * abs(written - Decimal(value)) == Decimal(1).scaleb(int(written.as_tuple().exponent))


def _as_read(value: float) -> float:
    """The double that the library reads for a number as JSON writes it.

    It takes the digits as a integer, and multiplies it with a power of ten, or divides it by
    one. Each of the three may be rounded, so that of many digits the last may be another.
    """
    if isinstance(value, int):
        return float(value)
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    integer = float("".join(map(str, digits)))
    power = float(f"1e{abs(int(exponent))}")
    read = integer / power if int(exponent) < 0 else integer * power
    return math.copysign(read, value)


def _inward(value: float, *, up: bool) -> float | None:
    """The next bound that the library has, within the range. None: it excludes no double."""
    if not up:
        opposite = _inward(-value, up=True)
        return None if opposite is None else -opposite
    if value <= -sys.float_info.max:
        return None
    if value < -LARGEST:
        return -LARGEST
    if value > LARGEST:
        return value
    if value != 0 and abs(value) < SMALLEST:
        return SMALLEST if value > 0 else 0
    near = float(value)
    if near < value:
        near = math.nextafter(near, math.inf)
    if near == int(near):
        return int(near)
    while _as_read(near) < value:
        near = math.nextafter(near, math.inf)
    return near
