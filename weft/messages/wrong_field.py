"""What is wrong in a JSON value that does not have the type that is needed: the field, its value
and what is allowed.

msgspec says "Expected `int`, got `str` - at `$.n`" and does not repeat the value. Only after such a
failure is the JSON read again, as far as that field.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import msgspec.inspect as inspected

from weft.config.numbers import MAX_SHOWN, NUMBERS, shown

BODY = "the body"
KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true, false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_PATH = re.compile(r" - at (?P<key>`key` in )?`\$\.?(?P<path>.*)`$", re.DOTALL)
_EXPECTED = re.compile(
    r"Expected `(?P<kinds>[^`]*)`(, got `(?P<got>\w+)`)?(?P<more>.*)$", re.DOTALL
)
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")
_STEP = re.compile(r"\[\.\.\.\]|\[(\d+)\]|([^.\[]+)")
_ANY = "..."  # in a path of msgspec: some key of an object
_FIRST = {'"': "str", "{": "object", "[": "array", "t": "bool", "f": "bool", "n": "null"}


class WrongField(NamedTuple):
    """The first wrong field of a JSON value. Its name is empty if the whole value is wrong."""

    name: str
    text: str  # name, value and what is allowed


class _Found(NamedTuple):
    name: str
    raw: bytes


def wrong_field(
    error: msgspec.ValidationError, raw: bytes, type: Any = None, within: str = ""
) -> WrongField:
    """The field that `error` is about, in the JSON `raw`, and a text for the user.

    `type`: the type that is needed; it knows the words that are allowed. `within`: the field that
    has `raw` as its value; empty for a whole body.
    """
    message = str(error)
    path = ""
    bounded = ""  # the path whose number has bounds: those of values are not those of keys
    found_path = _PATH.search(message)
    if found_path is not None:
        path = found_path["path"]
        if not found_path["key"]:
            bounded = path
        message = message[: found_path.start()]
    missing = _MISSING.match(message)
    if missing is not None:
        field = _joined(within, _joined(path, missing["name"]))
        return WrongField(field, f"{field} is missing; it is required")
    expected = _EXPECTED.match(message)
    got = None
    allowed = ""
    if expected is not None:
        got = expected["got"]
        allowed = _allowed(bounded, expected["kinds"], expected["more"])
    if type is not None and (expected is None or expected["kinds"] == "str"):
        words = _words(type, path)
        if words:
            allowed = f"{', '.join(words)} are allowed"
    if message == "Number out of range":
        allowed = _allowed(path, "float", "").replace("a number", "a smaller number", 1)
    if not allowed:
        allowed = message[:1].lower() + message[1:300]
    found = _find(raw, path, got)
    if found_path is not None and found_path["key"]:
        field = _joined(within, path)
        return WrongField(field, f"a key of {field} is a text; {allowed}")
    if found is None:
        field = _joined(within, path)
        return WrongField(field, f"{field or BODY}: {allowed}")
    field = _joined(within, found.name)
    return WrongField(field, f"{field or BODY} is {_shown(found.raw)}; {allowed}")


def _joined(within: str, path: str) -> str:
    if not within or not path or path.startswith("["):
        return within + path
    return f"{within}.{path}"


def converted_field(
    error: msgspec.ValidationError, value: Any, type: Any = None, within: str = ""
) -> WrongField:
    """The same for a value that is decoded already."""
    try:
        raw = msgspec.json.encode(value)
    except (TypeError, ValueError, RecursionError):
        raw = b""
    return wrong_field(error, raw, type, within)


def _allowed(path: str, kinds: str, more: str) -> str:
    """`kinds`: msgspec's names of types, "str | null"; `more`: what they must also fulfil."""
    names = kinds.split(" | ")
    rest, comma, last = ", ".join(KINDS.get(name, name) for name in names).rpartition(", ")
    wanted = f"{rest} or {last}" if comma else last
    needed = f"{wanted}{more} is needed"
    number = NUMBERS.get(path.rpartition(".")[2])
    if number is None or number.is_token or not {"int", "float"} & set(names):
        return needed
    return f"{needed}, {number.allowed}"


def _find(raw: bytes, path: str, got: str | None) -> _Found | None:
    """The wrong value; None if it cannot be found. `got`: msgspec's name of its type."""
    steps = [match[0] for match in _STEP.finditer(path)]
    try:
        return next(_walk(raw, "", steps, got), None)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _walk(raw: bytes, name: str, steps: list[str], got: str | None) -> Iterator[_Found]:
    if not steps:
        if got is None or _kind(raw) == got or {_kind(raw), got} == {"int", "float"}:
            yield _Found(name, raw)
        return
    step = steps[0]
    if step == f"[{_ANY}]":
        for key, one in msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).items():
            yield from _walk(bytes(one), f"{name}[{shown(key)}]", steps[1:], got)
    elif step.startswith("["):
        items = msgspec.json.decode(raw, type=list[msgspec.Raw])
        yield from _walk(bytes(items[int(step[1:-1])]), name + step, steps[1:], got)
    else:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        yield from _walk(bytes(fields[step]), f"{name}.{step}".lstrip("."), steps[1:], got)


def _kind(raw: bytes) -> str:
    """msgspec's name of the type of a JSON value."""
    text = raw.lstrip()
    kind = _FIRST.get(chr(text[0]))
    if kind is not None:
        return kind
    if any(sign in b".eE" for sign in text):
        return "float"
    return "int"


def _shown(raw: bytes) -> str:
    """A JSON value as errors show it: a text in quotes, others as they were written; long values
    are cut."""
    if _kind(raw) == "str":
        return shown(msgspec.json.decode(raw))
    text = " ".join(raw[: 10 * MAX_SHOWN].decode(errors="replace").split())
    if len(text) <= MAX_SHOWN:
        return text
    return text[:MAX_SHOWN] + "..."


def _words(type: Any, path: str) -> list[str]:
    """The allowed words at a path such as `messages[0].role`."""
    found = leaves_of(inspected.type_info(type))
    words: list[str] = []
    for name in re.sub(r"\[[^]]*\]", "", path).split("."):
        deeper: list[inspected.Type] = []
        words = []
        for struct in found:
            if not isinstance(struct, inspected.StructType):
                continue
            if struct.tag_field == name:
                words.append(str(struct.tag))
            for field in struct.fields:
                if field.encode_name == name:
                    deeper += leaves_of(field.type)
        found = deeper
    for one in found:
        if isinstance(one, inspected.LiteralType):
            words += map(str, one.values)
    return words


def leaves_of(type: inspected.Type) -> list[inspected.Type]:
    """The types that the value, the items or the values of a field may have."""
    if isinstance(type, inspected.UnionType):
        found: list[inspected.Type] = []
        for member in type.types:
            found += leaves_of(member)
        return found
    if isinstance(type, inspected.ListType):
        return leaves_of(type.item_type)
    if isinstance(type, inspected.DictType):
        return leaves_of(type.value_type)
    return [type]
