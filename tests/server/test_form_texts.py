"""The texts of a form: what Starlette's reader finds, and nothing of what cannot be read."""

from __future__ import annotations

import random

import httpx
import pytest

from weft.server.http.form_texts import MAX_PARTS, MAX_TEXT_LEN, is_form, texts_of_form

FILE = ("file", ("sound.wav", b"RIFF" + bytes(range(256)) * 40))


def form(*parts: tuple[str, object]) -> tuple[str, bytes]:
    request = httpx.Request("POST", "http://weft", files=[*parts])  # type: ignore[list-item]
    return request.headers["content-type"], request.read()


def text(name: str, value: str) -> tuple[str, object]:
    return name, (None, value)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([text("model", "ears"), FILE], {"model": "ears"}),
        (
            [FILE, text("model", " ears "), text("stream", "true")],
            {"model": "ears", "stream": "true"},
        ),
        ([text("model", "ears"), text("model", "eyes"), FILE], {"model": "eyes"}),
        ([text("model", "Öhr"), FILE], {"model": "Öhr"}),
        ([("model", ("name.txt", b"ears")), FILE], {}),
        ([FILE, *[FILE] * MAX_PARTS, text("model", "ears")], {}),
        ([text("prompt", "x" * (MAX_TEXT_LEN + 1)), text("model", "ears")], {}),
    ],
)
def test_texts_are_found_wherever_they_stand(
    parts: list[tuple[str, object]], expected: dict[str, str]
) -> None:
    kind, body = form(*parts)
    assert is_form(kind)
    assert texts_of_form(kind, body) == expected


def test_a_damaged_form_says_nothing_or_a_part_and_raises_nothing() -> None:
    rng = random.Random(1)
    kind, body = form(text("model", "ears"), FILE)
    for _ in range(2_000):
        damaged = bytearray(body)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(300)] = rng.randrange(256)
        del damaged[rng.randrange(len(damaged)) :]
        header = bytearray(kind.encode())
        header[rng.randrange(len(header))] = rng.randrange(256)
        for one in (kind, header.decode("latin-1")):
            found = texts_of_form(one, bytes(damaged))
            assert all(len(value) <= MAX_TEXT_LEN for value in found.values())


@pytest.mark.parametrize("kind", ["", "application/json", "multipart/mixed; boundary=x"])
def test_other_bodies_are_no_forms(kind: str) -> None:
    assert not is_form(kind)
