"""Fetches one file of the hub: goes on where an earlier try ended, and gives it its name when its
digest is right.

    blobs/<etag>.incomplete   what has come; the name of the content is in it, so parts of another
                              version are never joined
    blobs/<etag>              the whole file, checked
    .locks/<repo>/<etag>.lock held by who fetches it; the library of the hub takes the same lock

The library drops what has come when a process ends, and compares no digests, so weft does this
itself. It knows no repository: the caller has listed the files.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import urlsplit

from weft.weights.pull.listing import (
    BUSY,
    MAX_WAIT_S,
    HubFile,
    PullError,
    first_line,
    refusal,
    wait_of,
)

MAX_TRIES = 6  # without a new byte
TIMEOUT_S = 30.0
READ_BYTES = 1 << 20
POLL_S = 0.2
# Headers that only the hub itself may see, not the servers to which it redirects.
PRIVATE = ("authorization", "cookie")


class Stopped(Exception):
    """Another file has failed, or the user has had enough."""


class DiskError(Exception):
    """The file cannot be written."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.errno = cause.errno


class Part(NamedTuple):
    """Where a file comes from and goes to."""

    repo: str
    file: HubFile
    url: str
    blob: Path
    lock: Path

    @property
    def incomplete(self) -> Path:
        return self.blob.with_name(f"{self.blob.name}.incomplete")


class Watcher:
    """What is told while files come; called by several threads."""

    def __init__(self) -> None:
        self.stopped = threading.Event()

    def at(self, part: Part, num_bytes: int) -> None:
        """So many bytes of the file are here."""

    def told(self, line: str) -> None:
        """Something makes the files wait."""

    def checking(self, part: Part) -> None:
        """All bytes are here, and the digest is computed."""


def fetch(part: Part, headers: Mapping[str, str], watcher: Watcher) -> None:
    """Fetch a file, unless it is there. Raises PullError, Stopped, DiskError and OSError."""
    if part.blob.exists():
        watcher.at(part, part.file.num_bytes)
        return
    with _alone(part, watcher):
        if part.blob.exists():  # another process was faster
            watcher.at(part, part.file.num_bytes)
            return
        while True:
            was_resumed = _num_here(part) > 0
            _fetch_bytes(part, headers, watcher)
            watcher.checking(part)
            if _is_right(part, watcher):
                os.replace(part.incomplete, part.blob)
                return
            part.incomplete.unlink()
            if not was_resumed:
                raise PullError(
                    f"{part.repo}: {part.file.path} came with other bytes than the hub's digest "
                    "says, and was removed; try again"
                )
            # What an earlier try has left may have been damaged since.
            watcher.told(f"{part.file.path} has other bytes than it should: fetched once more")


def _num_here(part: Part) -> int:
    try:
        return part.incomplete.stat().st_size
    except FileNotFoundError:
        return 0


def _fetch_bytes(part: Part, headers: Mapping[str, str], watcher: Watcher) -> None:
    """Fetch all bytes that are not here, over as many connections as it takes. Raises PullError,
    Stopped and DiskError."""
    num_failed = 0
    while True:
        num_before = _num_here(part)
        if num_before > part.file.num_bytes:
            part.incomplete.unlink()
            continue
        watcher.at(part, num_before)
        if num_before == part.file.num_bytes:
            part.incomplete.touch()
            return
        try:
            _fetch_rest(part, headers, num_before, watcher)
            reason = "the connection was closed early"
            wait_s = 0.0
        except urllib.error.HTTPError as exc:
            exc.close()
            wait_s = _wait_of(part, exc, num_failed)
            reason = f"status {exc.code}"
        except (OSError, http.client.HTTPException) as exc:
            reason = first_line(exc)
            wait_s = min(2.0**num_failed, 8.0)
        if _num_here(part) == part.file.num_bytes:
            continue
        num_failed = 0 if _num_here(part) > num_before else num_failed + 1
        if num_failed >= MAX_TRIES:
            raise PullError(
                f"{part.repo}: {part.file.path} was cut off {MAX_TRIES} times ({reason}); what has "
                "come is kept, and the same command goes on from there"
            )
        watcher.told(f"{part.file.path}: {reason}, tried again in {wait_s:.0f} s")
        _sleep(wait_s, watcher)


def _wait_of(part: Part, exc: urllib.error.HTTPError, num_failed: int) -> float:
    """Seconds to wait after this status. Raises PullError if waiting does not help."""
    if exc.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
        part.incomplete.unlink(missing_ok=True)
        return 0.0
    if exc.code not in BUSY:
        raise PullError(refusal(part.repo, exc.code, exc)) from exc
    wait_s = wait_of(exc.headers.get("retry-after"), num_failed + 1)
    if wait_s > MAX_WAIT_S:
        raise PullError(
            f"the hub refuses more requests for {wait_s:,.0f} s (status {exc.code}); what has come "
            "is kept"
        ) from exc
    return wait_s


def _fetch_rest(part: Part, headers: Mapping[str, str], begin: int, watcher: Watcher) -> None:
    """Fetch the bytes from `begin` on, until the server or the connection ends."""
    asked = dict(headers) | {"Accept-Encoding": "identity"}
    if begin:
        asked["Range"] = f"bytes={begin}-"
    request = urllib.request.Request(part.url, headers=asked)
    with _OPENER.open(request, timeout=TIMEOUT_S) as answer:
        if begin and not _begins_at(answer, begin):
            begin = 0  # the server sends the whole file
        num_here = begin
        with _opened(part.incomplete, begin) as write:
            while data := answer.read1(READ_BYTES):
                if watcher.stopped.is_set():
                    raise Stopped
                if num_here + len(data) > part.file.num_bytes:
                    raise PullError(
                        f"{part.repo}: the server sends more of {part.file.path} than the "
                        f"{part.file.num_bytes:,} bytes that it has"
                    )
                write(data)
                num_here += len(data)
                watcher.at(part, num_here)


@contextmanager
def _opened(path: Path, begin: int) -> Iterator[Callable[[bytes], None]]:
    """A function that writes to a file, from the byte `begin` on; what stood there is cut off.
    Raises DiskError, so that nobody takes it for an error of the connection."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as exc:
        raise DiskError(exc) from exc

    def write(data: bytes) -> None:
        try:
            done = 0
            while done < len(data):
                done += os.write(file, data[done:])
        except OSError as exc:
            raise DiskError(exc) from exc

    try:
        os.ftruncate(file, begin)
        os.lseek(file, begin, os.SEEK_SET)
        yield write
    finally:
        os.close(file)


def _begins_at(answer: Any, begin: int) -> bool:
    """Whether an answer has the asked range."""
    if answer.status != HTTPStatus.PARTIAL_CONTENT:
        return False
    return str(answer.headers.get("content-range", "")).startswith(f"bytes {begin}-")


def _is_right(part: Part, watcher: Watcher) -> bool:
    """Whether the file has the digest of its name. Raises Stopped."""
    digest = hashlib.sha256()
    if len(part.file.etag) == hashlib.sha1(usedforsecurity=False).digest_size * 2:
        # Git names small files by the digest of their content behind a header.
        digest = hashlib.sha1(b"blob %d\0" % part.file.num_bytes, usedforsecurity=False)
    with part.incomplete.open("rb", buffering=0) as file:
        while data := file.read(READ_BYTES):
            if watcher.stopped.is_set():
                raise Stopped
            digest.update(data)
    return digest.hexdigest() == part.file.etag


@contextmanager
def _alone(part: Part, watcher: Watcher) -> Iterator[None]:
    """Hold the lock of a file. While another process fetches it, tell how far that one is. Raises
    Stopped."""
    part.lock.parent.mkdir(parents=True, exist_ok=True)
    is_told = False
    with part.lock.open("a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not is_told:
                    watcher.told(f"another process fetches {part.file.path}: waiting for it")
                is_told = True
                watcher.at(part, min(_num_here(part), part.file.num_bytes))
                _sleep(POLL_S, watcher)
        yield


def _sleep(wait_s: float, watcher: Watcher) -> None:
    if watcher.stopped.wait(wait_s):
        raise Stopped


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, and keeps the token from other servers."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        after = super().redirect_request(req, fp, code, msg, headers, newurl)
        before = urlsplit(req.full_url)
        if after is None or urlsplit(newurl)[:2] == before[:2]:
            return after
        if before.scheme == "https" and urlsplit(newurl).scheme != "https":
            raise urllib.error.URLError(f"it redirects to {newurl[:100]!r}, which is not secure")
        for name in PRIVATE:
            after.headers.pop(name.capitalize(), None)
        return after


_OPENER = urllib.request.build_opener(_Redirects)
