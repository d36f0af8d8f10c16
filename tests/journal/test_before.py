"""Journals that an earlier weft recorded (`before/`): this one decides what that one decided, step
by step."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from weft.cli.main import main

BEFORE = sorted((Path(__file__).parent / "before").glob("*.journal.gz"))


@pytest.mark.parametrize("packed", BEFORE, ids=[path.name.partition(".")[0] for path in BEFORE])
def test_a_journal_of_an_earlier_weft_is_replayed_decision_by_decision(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recorded"
    path.write_bytes(gzip.decompress(packed.read_bytes()))

    status = main(["replay", str(path), "--check"])

    told = capsys.readouterr().out
    assert "every decision is as recorded" in told, told
    assert status == 0


def test_there_are_journals_of_an_earlier_weft() -> None:
    assert len(BEFORE) > 8
