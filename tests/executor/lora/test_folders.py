"""Which folders adapters may be read from, also when they change between two looks."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.config.model import ModelNotFound
from weft.executor.lora.folders import AdapterFolders
from weft.executor.lora.read import CONFIG


def adapter(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text("{}")
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> AdapterFolders:
    adapter(tmp_path / "offered" / "a")
    adapter(tmp_path / "outside" / "a")
    (tmp_path / "models" / "m").mkdir(parents=True)
    return AdapterFolders(
        str(tmp_path / "models"),
        tmp_path / "models" / "m",
        directory=str(tmp_path / "offered"),
    )


def test_a_folder_that_is_swapped_for_a_link_after_it_was_offered_is_not_read(
    folders: AdapterFolders, tmp_path: Path
) -> None:
    path = folders.offered("a")
    assert folders.folder(path) == tmp_path / "offered" / "a"
    (tmp_path / "offered" / "a").rename(tmp_path / "moved")
    (tmp_path / "offered" / "a").symlink_to(tmp_path / "outside" / "a")
    assert folders.offered("a") == ""
    with pytest.raises(ModelNotFound):
        folders.folder(path)


def test_the_folder_of_adapters_does_not_move_with_its_name(
    folders: AdapterFolders, tmp_path: Path
) -> None:
    """Whoever may rename folders around it cannot offer others in its place."""
    path = folders.offered("a")
    (tmp_path / "offered").rename(tmp_path / "before")
    (tmp_path / "offered").symlink_to(tmp_path / "outside")
    assert folders.offered("a") == ""
    with pytest.raises(ModelNotFound):
        folders.folder(path)


@pytest.mark.parametrize("where", ["outside", "models/link", "offered/link/deeper"])
def test_links_lead_nowhere(folders: AdapterFolders, tmp_path: Path, where: str) -> None:
    (tmp_path / "models" / "link").symlink_to(tmp_path / "outside" / "a")
    (tmp_path / "offered" / "link").symlink_to(tmp_path / "outside")
    adapter(tmp_path / "outside" / "deeper")
    assert folders.offered("link") == ""
    with pytest.raises(ModelNotFound):
        folders.folder(str(tmp_path / where))
