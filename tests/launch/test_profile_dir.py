"""The folder for traces is made at the start, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nano_adapters import NANO
from weft.assemble.prepare import prepare
from weft.config.engine import EngineConfig
from weft.config.options import SettingsError


def test_a_folder_for_traces_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "traces"
    prepared = prepare(EngineConfig(model=str(NANO), profile_dir=str(folder)))
    assert folder.is_dir()
    assert prepared.config.profile_dir == str(folder)


def test_a_folder_for_traces_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "traces"):
        with pytest.raises(SettingsError, match=r"--profile-dir is .*, which cannot be made: "):
            prepare(EngineConfig(model=str(NANO), profile_dir=str(path)))
