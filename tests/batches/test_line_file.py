"""Files that grow by whole lines."""

from __future__ import annotations

import os
from codecs import BOM_UTF8
from pathlib import Path

import pytest

from weft.batches.line_file import LineFile, lines_of


@pytest.mark.parametrize("cut", range(8))
def test_what_is_left_of_a_last_line_is_cut_off(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "lines"
    file = LineFile(path)
    file.append([b"first", b"second"])
    file.close()
    size = path.stat().st_size
    os.truncate(path, size - cut)
    again = LineFile(path)
    again.append([b"third"])
    again.close()
    whole = [b"first", b"second", b"third"]
    if cut:
        whole.remove(b"second")
    assert list(lines_of(path)) == whole


def test_of_a_line_that_is_too_long_only_the_beginning_is_read(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    lines = [b"x" * 9, b"y" * 10, b"z" * 11, b"", b" " * 30, b"w" * 3_000_000, b"short"]
    path.write_bytes(b"\n".join(lines))
    found = list(lines_of(path, longest=10))
    assert found == [b"x" * 9, b"y" * 10, b"z" * 11, b" " * 11, b"w" * 11, b"short"]
    assert list(lines_of(path)) == [line for line in lines if line.strip()]


def test_lines_of_windows_are_read(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(BOM_UTF8 + b"first\r\nsecond\r\n")
    assert list(lines_of(path)) == [b"first", b"second"]


def test_a_file_without_a_whole_line_is_emptied(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"x" * 3_000_000)
    LineFile(path).close()
    assert path.stat().st_size == 0


def test_nothing_is_left_of_lines_that_could_not_be_appended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines"
    file = LineFile(path)
    file.append([b"first"])
    write = os.write

    def full(fd: int, data: bytes) -> int:
        if len(data) < 5:
            raise OSError(28, "No space left on device")
        return write(fd, data[: len(data) - 3])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        file.append([b"second", b"third"])
    monkeypatch.undo()
    file.append([b"fourth"])
    file.close()
    assert list(lines_of(path)) == [b"first", b"fourth"]
