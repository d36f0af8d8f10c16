"""`abi.py` is what `program.h` says, and has the layout that the compiler gives its structures."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.ops.cpp import abi
from weft.ops.cpp.build import SOURCES, find_compiler
from weft.ops.cpp.generate_abi import HEADER, MODULE, NotUnderstood, module


def header(declaration: str) -> str:
    return f"#include <cstdint>\nnamespace weft {{\n{declaration}\n}}  // namespace weft\n"


def test_abi_is_up_to_date() -> None:
    made = module(HEADER.read_text("utf-8"))
    assert MODULE.read_text("utf-8") == made, "python -m weft.ops.cpp.generate_abi"


def test_the_compiler_lays_out_structures_as_ctypes_does(tmp_path: Path) -> None:
    source = tmp_path / "layout.cpp"
    source.write_text("\n".join(("#include <cstddef>", '#include "program.h"', *assertions())))
    command = (*find_compiler(), "-std=c++17", "-fsyntax-only", "-I", str(SOURCES), str(source))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def assertions() -> Iterator[str]:
    structures = [
        kind
        for kind in vars(abi).values()
        if isinstance(kind, type) and issubclass(kind, ctypes.Structure)
    ]
    assert len(structures) > 40
    for kind in structures:
        name = f"weft::{kind.__name__}"
        yield f'static_assert(sizeof({name}) == {ctypes.sizeof(kind)}, "");'
        for field, *_ in kind._fields_:
            offset = getattr(kind, field).offset
            yield f'static_assert(offsetof({name}, {field}) == {offset}, "{field}");'


def test_each_kind_of_declaration_becomes_python() -> None:
    made = module(
        header(
            """
            constexpr int kNumRows = 3;  // a comment
            constexpr float kLimit = 7.0f;
            enum Colour : int64_t { kColourRed = 0, kColourDarkBlue = 1 };
            enum OpKind : int64_t { kPaint = 0, kErase = 1 };
            constexpr int kNumKinds = kErase + 1 + kPaint;
            using Call = int64_t (*)(int64_t what, const float* data);
            struct Inner { uint8_t table[16]; };
            struct PaintArgs {
              Inner inner;
              const float* x;  // [T]
              Call call;
            };
            """
        )
    )
    found: dict[str, object] = {}
    exec(made, found)
    assert found["NUM_ROWS"] == 3
    assert found["NUM_KINDS"] == 2
    assert "LIMIT" not in found
    assert "    RED = 0\n    DARK_BLUE = 1\n" in made
    assert '("table", c_uint8 * 16),' in made
    assert '("inner", Inner),\n        ("x", c_void_p),\n        ("call", Call),' in made
    assert made.endswith("= {\n    PaintArgs: OpKind.PAINT,\n}\n")


@pytest.mark.parametrize(
    ("declaration", "named"),
    [
        ("union Either { int64_t a; float b; };", "union Either"),
        ("constexpr int kRows = 2 * 3;", "2 \\* 3"),
        ("struct Args { int64_t a, b; };", "int64_t a, b"),
        ("struct Args { Later later; };", "Later is not declared"),
    ],
)
def test_other_declarations_are_refused(declaration: str, named: str) -> None:
    with pytest.raises(NotUnderstood, match=named):
        module(header(declaration))
