"""A model that a process computes with is not removed."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.tiny_model import write_tiny_model
from weft.config.model import ModelNotFound
from weft.store.store import ModelStore
from weft.weights.fetch import weight_files
from weft.weights.in_use import is_in_use, mark_in_use

HOLD = """
import sys
from pathlib import Path
from weft.weights.in_use import mark_in_use
mark_in_use(Path(sys.argv[1]))
print("marked", flush=True)
sys.stdin.read()
"""


def test_a_model_is_in_use_until_the_last_process_that_computes_with_it_ends(
    tmp_path: Path,
) -> None:
    folder = write_tiny_model(tmp_path / "models" / "one")
    store = ModelStore(str(folder.parent))
    entry = store.find("one")
    end = mark_in_use(folder)
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"marked\n"
        end()
        with pytest.raises(ModelNotFound, match="one is in use, so it is not removed: unload it"):
            store.removal(entry)
        other.kill()
    assert not is_in_use(entry.files)
    store.removal(entry).do()
    assert not folder.exists()


def test_a_copy_in_use_does_not_keep_the_other(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "one")
    store = ModelStore(str(tmp_path))
    end = mark_in_use(store.copy(store.find("one"), "two"))
    store.removal(store.find("one")).do()
    assert [one.name for one in store.entries() if one.source == "folder"] == ["two"]
    assert not folder.exists()
    with pytest.raises(ModelNotFound, match="two is in use"):
        store.removal(store.find("two"))
    end()


def test_a_folder_without_weights_gets_no_mark(tmp_path: Path) -> None:
    mark_in_use(tmp_path)()
    assert not is_in_use([tmp_path / "nothing"])


def test_whoever_looks_at_the_same_moment_is_no_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_model(tmp_path / "models" / "one")
    entry = ModelStore(str(folder.parent)).find("one")

    def looked_at() -> None:
        """Another process looks, and is still at it; then it has seen enough."""
        file = os.open(weight_files(folder)[0], os.O_RDONLY)
        fcntl.flock(file, fcntl.LOCK_EX)
        monkeypatch.setattr("weft.weights.in_use.time.sleep", lambda seconds: os.close(file))

    looked_at()
    assert not is_in_use(entry.files)
    looked_at()
    end = mark_in_use(folder)
    monkeypatch.setattr("weft.weights.in_use.time.sleep", lambda seconds: None)
    assert is_in_use(entry.files), "its mark was set all the same"
    end()
