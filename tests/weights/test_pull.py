"""Models are pulled from a server that speaks the hub's protocol: whole and checked, whatever is
cut off, refused or wrong on the way."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from huggingface_hub import constants, snapshot_download

from tests.weights.hub_server import COMMIT, REPO, WEIGHTS, Hub, content
from weft.weights.fetch import local_path
from weft.weights.pull import pull as pulling
from weft.weights.pull import transfer
from weft.weights.pull.listing import PullError
from weft.weights.pull.names import BadName, hub_name
from weft.weights.pull.progress import ProgressWatcher, PullProgress
from weft.weights.pull.pull import PullWatcher, pull


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times that were waited for, which take no time."""
    found: list[float] = []
    monkeypatch.setattr("time.sleep", found.append)
    monkeypatch.setattr(transfer, "_sleep", lambda wait_s, watcher: found.append(wait_s))
    return found


class Written(PullWatcher):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)


def files_of(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_a_model_is_pulled_without_code_pickles_and_copies(hub: Hub) -> None:
    pulled = pull(hub_name(REPO))
    expected = {name: hub.repos[REPO][name] for name in ("config.json", "tokenizer.json", WEIGHTS)}
    assert files_of(pulled.folder) == expected
    assert pulled.commit == COMMIT


def test_the_library_of_the_hub_finds_what_was_pulled(hub: Hub) -> None:
    folder = pull(hub_name(REPO)).folder
    assert Path(snapshot_download(REPO, local_files_only=True)) == folder


def test_what_is_here_is_not_fetched_again(hub: Hub) -> None:
    pull(hub_name(REPO))
    before = dict(hub.counts)
    pull(hub_name(REPO))
    assert dict(hub.counts) == before


def test_the_token_is_for_the_hub_alone(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    pull(hub_name("org/gated"))
    of_hub = [headers for url, headers in hub.requests if "/cdn/" not in url and "cdn/" not in url]
    of_others = [headers for url, headers in hub.requests if "cdn/" in url]
    assert of_others
    assert all(headers.get("authorization") == f"Bearer {hub.token}" for headers in of_hub)
    assert not any("authorization" in headers for headers in of_others)


def test_a_gated_model_is_explained(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PullError, match=r"org/gated is gated: .*status 401; hf auth login"):
        pull(hub_name("org/gated"))
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(PullError, match=r"status 403; the account of the token has no access"):
        pull(hub_name("org/gated"))


def test_a_model_that_is_not_there_is_named(hub: Hub) -> None:
    with pytest.raises(PullError, match=r"there is no org/none on the hub, or it is private"):
        pull(hub_name("org/none"))


def test_a_cut_connection_goes_on_where_it_ended(hub: Hub, waits: list[float]) -> None:
    hub.cut[WEIGHTS] = lambda number, data: data[: len(data) // 2] if number < 4 else data
    pulled = pull(hub_name(REPO))
    assert (pulled.folder / WEIGHTS).read_bytes() == content(2)
    begins = [int(text[6:-1] or 0) for text in hub.ranges_of(WEIGHTS) if text]
    assert begins == sorted(begins)
    assert begins[-1] > 200_000


def test_a_pull_that_was_ended_goes_on_in_another_process(
    hub: Hub, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "MAX_TRIES", 1)
    hub.cut[WEIGHTS] = lambda number, data: data[:100_000] if number == 1 else b""
    with pytest.raises(PullError, match=r"was cut off .* the same command goes on from there"):
        pull(hub_name(REPO))
    del hub.cut[WEIGHTS]
    hub.requests.clear()
    pulled = pull(hub_name(REPO))
    assert (pulled.folder / WEIGHTS).read_bytes() == content(2)
    assert set(hub.ranges_of(WEIGHTS)) == {"bytes=100000-"}


def test_a_server_without_ranges_sends_the_whole_file_again(hub: Hub, waits: list[float]) -> None:
    hub.ignores_ranges = True
    hub.cut[WEIGHTS] = lambda number, data: data[:100_000] if number == 1 else data
    assert (pull(hub_name(REPO)).folder / WEIGHTS).read_bytes() == content(2)


def test_wrong_bytes_are_no_model(hub: Hub) -> None:
    hub.corrupt.add(WEIGHTS)
    with pytest.raises(PullError, match="came with other bytes than the hub's digest says"):
        pull(hub_name(REPO))
    blobs = pulling.repo_folder(REPO) / "blobs"
    assert not [path for path in blobs.iterdir() if path.name.startswith(hub.etag(content(2)))]
    assert not (pulling.repo_folder(REPO) / "refs").exists()


def test_what_an_earlier_try_left_is_replaced_if_it_is_damaged(hub: Hub) -> None:
    blobs = pulling.repo_folder(REPO) / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hub.etag(content(2))}.incomplete").write_bytes(bytes(1_000))
    watcher = Written()
    assert (pull(hub_name(REPO), watcher=watcher).folder / WEIGHTS).read_bytes() == content(2)
    assert any("fetched once more" in line for line in watcher.lines)
    assert not list(blobs.glob("*.incomplete"))


@pytest.mark.parametrize("num_bytes", [300_000, 300_001])
def test_a_part_as_long_as_the_file_is_checked(hub: Hub, num_bytes: int) -> None:
    blobs = pulling.repo_folder(REPO) / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hub.etag(content(2))}.incomplete").write_bytes(bytes(num_bytes))
    assert (pull(hub_name(REPO)).folder / WEIGHTS).read_bytes() == content(2)


def test_a_busy_hub_is_waited_for_as_it_asks(hub: Hub, waits: list[float]) -> None:
    hub.refusals[f"api/models/{REPO}"] = [(429, "7"), (503, "")]
    hub.refusals[f"cdn/{REPO}//{WEIGHTS}"] = [(429, "11"), (500, "")]
    watcher = Written()
    pull(hub_name(REPO), watcher=watcher)
    assert 7.0 in waits
    assert 11.0 in waits
    assert any("status 429" in line and "7 s" in line for line in watcher.lines)


def test_a_hub_that_wants_too_long_a_wait_is_told_of(hub: Hub, waits: list[float]) -> None:
    hub.refusals[f"cdn/{REPO}//{WEIGHTS}"] = [(429, "100000")]
    with pytest.raises(PullError, match=r"refuses more requests for 100,000 s .*is kept"):
        pull(hub_name(REPO))


def test_a_full_disk_is_told_before_and_after(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    class Disk(NamedTuple):
        total: int
        used: int
        free: int

    with monkeypatch.context() as small:
        small.setattr(shutil, "disk_usage", lambda path: Disk(10**9, 0, 1_000))
        with pytest.raises(PullError, match=r"are to come, and the disk of .* has 1 kB"):
            pull(hub_name(REPO))
    assert not hub.ranges_of(WEIGHTS)

    def full(file: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "write", full)
        with pytest.raises(PullError, match=r"the disk of .* is full; what has come is kept"):
            pull(hub_name(REPO))
    assert pull(hub_name(REPO)).folder.exists()


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/etc/x", "a\nb", "a\\b", "", "x//y"])
def test_files_with_names_that_lead_elsewhere_are_refused(hub: Hub, name: str) -> None:
    hub.listed_as["config.json"] = name
    with pytest.raises(PullError, match="that weft does not fetch"):
        pull(hub_name(REPO))


@pytest.mark.parametrize("revision", ["../x", "a/../b", "a\x1b", "/etc"])
def test_revisions_that_lead_elsewhere_are_refused(hub: Hub, revision: str) -> None:
    with pytest.raises(PullError, match="is no name of a branch"):
        pull(hub_name(REPO), revision)
    assert not hub.requests


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "a/..",
        "a/b/../c.gguf",
        "a/b\x1b",
        "a/b\n",
        "a",
        "a/b:",
        "a/b:../c",
        "a/b/c.bin",
        "a:b",
    ],
)
def test_names_that_are_none_are_refused_by_name(name: str) -> None:
    with pytest.raises(BadName) as refused:
        hub_name(name)
    assert repr(name)[1:-1] in str(refused.value)


def test_a_type_of_gguf_is_chosen_by_name_or_by_memory(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.weights.pull.choose.WORK_BYTES", 0)
    monkeypatch.setattr(pulling, "_free_bytes", lambda: 30_000)
    assert pull(hub_name("org/small-GGUF:q8_0")).name.kind == "q8_0"
    for path in (pulling.repo_folder("org/small-GGUF") / "blobs").iterdir():
        path.unlink()
    pulled = pull(hub_name("org/small-GGUF"))
    assert pulled.name.kind == "Q4_K_M"
    names = ["small-Q4_K_M.gguf", "mmproj-small-F16.gguf"]
    assert [file.path for file in pulled.files] == names
    monkeypatch.setattr(pulling, "_free_bytes", lambda: 15_000)
    # What is here is taken, as far as it fits.
    for path in (pulling.repo_folder("org/small-GGUF") / "blobs").iterdir():
        path.unlink()
    with pytest.raises(PullError) as refused:
        pull(hub_name("org/small-GGUF"))
    assert "Q4_K_M (20 kB) does not fit" in str(refused.value)
    assert "Q1_0 (10 kB) is of a type that weft does not read" in str(refused.value)


def test_a_model_in_parts_and_a_file_by_its_path(hub: Hub) -> None:
    pulled = pull(hub_name("org/small-GGUF:F16"))
    assert [file.num_bytes for file in pulled.files] == [50_000, 30_000]
    again = pull(hub_name("org/small-GGUF/parts/small-F16-00002-of-00002.gguf"))
    assert again.files == pulled.files
    with pytest.raises(PullError, match=r"has no file x.gguf; its GGUF files are small-Q1_0"):
        pull(hub_name("org/small-GGUF/x.gguf"))
    with pytest.raises(PullError, match=r"no GGUF file of type Q5_K; its types are Q1_0, Q4_K_M"):
        pull(hub_name("org/small-GGUF:Q5_K"))


def test_a_name_of_the_hub_is_a_path_to_a_model(hub: Hub) -> None:
    assert local_path("org/small-GGUF:Q4_K_M").name == "small-Q4_K_M.gguf"
    assert local_path("hf.co/org/small-GGUF:Q4_K_M").name == "small-Q4_K_M.gguf"
    assert local_path("org/small-GGUF/small-Q8_0.gguf").name == "small-Q8_0.gguf"
    parts = local_path("org/small-GGUF:F16")
    assert parts.name == "small-F16-00001-of-00002.gguf"
    assert (local_path(REPO) / WEIGHTS).is_file()


def test_what_is_here_does_while_the_hub_fails(hub: Hub, waits: list[float]) -> None:
    folder = local_path(REPO)
    hub.refusals[f"api/models/{REPO}"] = 9 * [(500, "")]
    assert local_path(REPO) == folder
    hub.refusals.clear()
    hub.repos.pop(REPO)
    assert local_path(REPO) == folder


def test_two_pulls_at_once_fetch_each_file_once(hub: Hub) -> None:
    hub.began[WEIGHTS] = threading.Event()
    hub.waits_for[WEIGHTS] = threading.Event()
    folders: list[Path] = []
    second = Written()
    waiting = threading.Event()

    class Second(Written):
        def note(self, line: str) -> None:
            super().note(line)
            waiting.set()

    second = Second()
    threads = [
        threading.Thread(target=lambda: folders.append(pull(hub_name(REPO)).folder)),
        threading.Thread(target=lambda: folders.append(pull(hub_name(REPO), "", second).folder)),
    ]
    threads[0].start()
    hub.began[WEIGHTS].wait()
    threads[1].start()
    waiting.wait()
    hub.waits_for[WEIGHTS].set()
    for thread in threads:
        thread.join()
    assert len(set(folders)) == 1
    assert hub.counts[WEIGHTS] == 1
    assert "another process fetches" in second.lines[0]


def test_the_library_of_the_hub_waits_for_the_same_lock(hub: Hub) -> None:
    pull(hub_name(REPO))
    name = pulling.repo_folder(REPO).name
    lock = Path(constants.HF_HUB_CACHE) / ".locks" / name / f"{hub.etag(content(2))}.lock"
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_stopped_pull_keeps_what_has_come(hub: Hub) -> None:
    hub.waits_for[WEIGHTS] = threading.Event()

    class Stopping(PullWatcher):
        def at(self, part: Any, num_bytes: int) -> None:
            if part.file.path == WEIGHTS and num_bytes:
                self.stopped.set()
                hub.waits_for[WEIGHTS].set()

    with pytest.raises(PullError, match="it was stopped; what has come is kept"):
        pull(hub_name(REPO), watcher=Stopping())
    left = pulling.repo_folder(REPO) / "blobs" / f"{hub.etag(content(2))}.incomplete"
    assert 0 < left.stat().st_size < 300_000
    assert content(2).startswith(left.read_bytes())


def test_progress_has_a_rate_and_the_time_that_is_left(hub: Hub) -> None:
    now = [0.0]
    shown: list[PullProgress] = []

    def show(progress: PullProgress) -> None:
        now[0] += 1.0
        shown.append(progress)

    pull(hub_name(REPO), watcher=ProgressWatcher(show, lambda line: None, lambda: now[0]))
    total = 2 + 5_000 + 300_000
    assert shown[-1].done_bytes == shown[-1].total_bytes == total
    middle = next(one for one in shown if 0 < one.done_bytes < total and one.rate)
    assert middle.left_s is not None
    assert "/s, " in middle.line
    assert middle.line.endswith(" left")
    assert any(one.is_checking for one in shown)


def test_a_file_system_without_links_gets_copies(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: Any, target_is_directory: bool = False) -> None:
        raise OSError(os.strerror(1))

    monkeypatch.setattr(Path, "symlink_to", refuse)
    folder = pull(hub_name(REPO)).folder
    assert not (folder / WEIGHTS).is_symlink()
    assert (folder / WEIGHTS).read_bytes() == content(2)
