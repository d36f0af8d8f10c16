"""The C++ sources keep the laws of the Python ones: narrow lines, one statement each, plain words."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.shape.cpp import WORDS, folded_lines, long_lines, other_words, sources


@pytest.fixture(params=sources(), ids=lambda path: path.name)
def source(request: pytest.FixtureRequest) -> str:
    path: Path = request.param
    return path.read_text("utf-8")


def test_lines_of_cpp_are_not_wide(source: str) -> None:
    assert list(long_lines(source)) == []


def test_lines_of_cpp_have_one_statement(source: str) -> None:
    assert list(folded_lines(source)) == []


def test_comments_of_cpp_use_the_words_of_the_field(source: str) -> None:
    found = [f"line {line}: {word} -> {WORDS[word]}" for line, word in other_words(source)]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "if (a) return 1; b++;",
        "case kFloats: make(row); break;",
        "int64_t first, last;",
        "const F32 low = all(a, 1), high = all(b);",
        "constexpr int kOne = 1, kTwo = 2;",
        "for (int i = 0; i < n; i++) a[i]++, b(); c();",
        "char *p, *q;",
    ],
)
def test_folded_lines_are_found(line: str) -> None:
    assert list(folded_lines(line)) == [1]


@pytest.mark.parametrize(
    "line",
    [
        "for (int i = 0, n = 3; i < n; i++) {",
        "repeat<K>([&](auto n) { rows[n] = base + n; });",
        "int64_t take() { return next++; }",
        "const Range keys = {first, last};",
        "const Pair<int, float> pair = of(a, b);",
        "call(a, b);",
        "return {a, b};",
        "int64_t first;  // one; two, three;",
        "#define SET(name) int name; int other;",
    ],
)
def test_lines_of_one_statement_are_left_alone(line: str) -> None:
    assert list(folded_lines(line)) == []
