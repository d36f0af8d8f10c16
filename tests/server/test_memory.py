"""A front whose address space is limited, as a system would tell it."""

from __future__ import annotations

import math
import os
import resource
from pathlib import Path

import httpx
import pytest

from tests.server.fake import RunningServer
from weft.config.options import SettingsError
from weft.launch import front
from weft.server import limits as memory

USED_PAGES = 100_000
BODY = {"prompt": "x", "user": "u" * 1_000_000}


def limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spare: int) -> None:
    """`spare` bytes are left beside what is used."""
    statm = tmp_path / "statm"
    statm.write_text(f"{USED_PAGES} 50 4 1 0 90 0\n")
    most = USED_PAGES * os.sysconf("SC_PAGE_SIZE") + spare
    monkeypatch.setattr(memory, "STATM", statm)
    monkeypatch.setattr(
        memory.resource, "getrlimit", {resource.RLIMIT_AS: (most, most)}.__getitem__
    )


def test_a_body_that_may_exceed_a_limited_address_space_is_a_503(
    http: httpx.Client, server: RunningServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    needed = memory.RESERVE_BYTES + memory.BYTES_PER_BODY_BYTE * 1_000_000
    limit(monkeypatch, tmp_path, needed)
    answer = http.post("/v1/completions", json=BODY)  # a little longer than its user
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert "144 MB are left (ulimit -v)" in answer.json()["error"]["message"]
    assert server.engine.seen == []
    assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200
    limit(monkeypatch, tmp_path, 0)
    assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 503
    assert http.get("/health").status_code == 200


def test_a_server_without_room_for_requests_does_not_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limit(monkeypatch, tmp_path, 999_000_000)
    with pytest.raises(SettingsError, match=r"999 MB are left .* at least 1,000 MB"):
        front._require_memory()


def test_address_space_without_limit_is_room_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(memory.resource, "getrlimit", {resource.RLIMIT_AS: unlimited}.__getitem__)
    assert memory.spare_bytes() == math.inf
    front._require_memory()
