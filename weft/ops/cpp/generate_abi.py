"""Writes `abi.py`, the constants, enumerations and structures of `program.h` for Python.

    python -m weft.ops.cpp.generate_abi

Reads the part of C++ that the header is written in: whole numbers as constants, enumerations with
their values, structures of numbers, pointers, arrays and other structures, and types of functions.
It refuses everything else but constant floats, which Python does not need. `kLoraRows` becomes
LORA_ROWS; the values of an enumeration lose the words that all of them begin with.
"""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent
HEADER = FOLDER / "program.h"
MODULE = FOLDER / "abi.py"

NUMBERS = {
    "int32_t": "c_int32",
    "int64_t": "c_int64",
    "uint8_t": "c_uint8",
    "float": "c_float",
}
TOP = '''"""The constants, enumerations and structures of `program.h` for Python.

Written by `python -m weft.ops.cpp.generate_abi` from the header: edit that.
"""

from __future__ import annotations

import ctypes
from ctypes import {types}
from enum import IntEnum

{constants}
'''
COMMENT = re.compile(r"//[^\n]*")
NAMESPACE = re.compile(r"namespace weft \{(.*)\}", re.DOTALL)
DECLARATION = re.compile(
    r"""
      constexpr\ (?:int|int64_t)\ k(?P<constant>\w+)\ =\ (?P<value>[^;]+);
    | constexpr\ float\ \w+\ =\ [^;]+;
    | enum\ (?P<enum>\w+)\ :\ int64_t\ \{(?P<values>[^}]*)\};
    | using\ (?P<function>\w+)\ =\ (?P<result>\w+)\ \(\*\)\((?P<params>[^)]*)\);
    | struct\ (?P<struct>\w+)\ \{(?P<fields>[^}]*)\};
    """,
    re.VERBOSE,
)
FIELD = re.compile(r"(?:const )?(\w+)(\*?) (\w+)(?:\[(\d+)\])?")
TERM = re.compile(r"\d+|k(\w+)")


class NotUnderstood(Exception):
    """The header has a declaration of another kind; the message quotes it."""


class Module:
    """What `abi.py` has, in the order of the header."""

    def __init__(self) -> None:
        self.constants: dict[str, int] = {}
        self.enums: list[str] = []
        self.structures: list[str] = []  # and types of functions
        self._values: dict[str, int] = {}  # of the members of all enumerations
        self._types = dict(NUMBERS)
        self._kinds: list[str] = []  # of operations, as the header names them, without k

    def add(self, found: re.Match[str]) -> None:
        if found["constant"]:
            self.constants[_python_name(found["constant"])] = self._sum(found["value"])
        elif found["enum"]:
            self._add_enum(found["enum"], found["values"])
        elif found["function"]:
            self._add_function(found["function"], found["result"], found["params"])
        elif found["struct"]:
            self._add_structure(found["struct"], found["fields"])

    def kind_of(self) -> str:
        """The structure of an operation has its name."""
        kinds = (kind for kind in self._kinds if f"{kind}Args" in self._types)
        rows = (f"    {kind}Args: OpKind.{_python_name(kind)}," for kind in kinds)
        return "\n".join(("KIND_OF: dict[type[ctypes.Structure], OpKind] = {", *rows, "}"))

    def _add_enum(self, name: str, values: str) -> None:
        members = [value.removeprefix("k").split(" = ") for value in _items(values, ",")]
        if name == "OpKind":
            self._kinds = [member for member, _ in members]
        names = [_python_name(member) for member, _ in members]
        shared = _shared_words(names)
        lines = [f"class {name}(IntEnum):"]
        for long_name, (_, value) in zip(names, members, strict=True):
            self._values[long_name] = int(value)
            lines.append(f"    {long_name[len(shared) :]} = {int(value)}")
        self.enums.append("\n".join(lines))

    def _add_function(self, name: str, result: str, params: str) -> None:
        lines = [f"{name} = ctypes.CFUNCTYPE(", f"    {self._type(result, '')},"]
        for param in _items(params, ","):
            kind, pointer, _, _ = _field(param)
            lines.append(f"    {self._type(kind, pointer)},")
        self.structures.append("\n".join((*lines, ")")))
        self._types[name] = name

    def _add_structure(self, name: str, fields: str) -> None:
        lines = [f"class {name}(ctypes.Structure):", "    _fields_ = ("]
        for declared in _items(fields, ";"):
            kind, pointer, field, length = _field(declared)
            times = f" * {length}" if length else ""
            lines.append(f'        ("{field}", {self._type(kind, pointer)}{times}),')
        self.structures.append("\n".join((*lines, "    )")))
        self._types[name] = name

    def _type(self, name: str, pointer: str) -> str:
        if pointer:
            return "c_void_p"
        if name not in self._types:
            raise NotUnderstood(f"program.h: {name} is not declared before its first use")
        return self._types[name]

    def _sum(self, terms: str) -> int:
        total = 0
        for term in terms.split(" + "):
            found = TERM.fullmatch(term)
            if found is None:
                raise NotUnderstood(f"program.h: {terms!r}")
            name = found[1]
            total += self._values[_python_name(name)] if name else int(term)
        return total


def module(header: str) -> str:
    """The text of `abi.py`. Raises `NotUnderstood`."""
    namespace = NAMESPACE.search(COMMENT.sub("", header))
    if namespace is None:
        raise NotUnderstood("program.h: there is no namespace weft")
    code = namespace[1].strip()
    made = Module()
    while code:
        found = DECLARATION.match(code)
        if found is None:
            raise NotUnderstood(f"program.h: {code[:80]!r}")
        made.add(found)
        code = code[found.end() :].strip()
    body = [*made.enums, *made.structures, made.kind_of()]
    types = sorted(set(re.findall(r"\bc_\w+", "".join(body))))
    constants = [f"{name} = {value}" for name, value in made.constants.items()]
    top = TOP.format(types=", ".join(types), constants="\n".join(constants))
    return "\n\n".join((top, *(f"{block}\n" for block in body)))


def _items(text: str, end: str) -> list[str]:
    items = (" ".join(item.split()) for item in text.split(end))
    return [item for item in items if item]


def _field(declared: str) -> tuple[str, str, str, str]:
    found = FIELD.fullmatch(declared)
    if found is None:
        raise NotUnderstood(f"program.h: {declared!r}")
    kind, pointer, name, length = found.groups(default="")
    return kind, pointer, name, length


def _shared_words(names: list[str]) -> str:
    """The longest beginning of whole words, and of the `_` after them, that all names have."""
    words = names[0].split("_")
    beginnings = ["".join(f"{word}_" for word in words[:num]) for num in range(len(words))]
    return [one for one in beginnings if all(name.startswith(one) for name in names)][-1]


def _python_name(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper()


if __name__ == "__main__":
    MODULE.write_text(module(HEADER.read_text("utf-8")), "utf-8")
