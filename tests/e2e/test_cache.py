"""The cache on disk of a real server: what was computed before a restart is found after it, and
gives the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.disk_cache import wait_for
from tests.e2e.kill_cache import MODEL, end, run
from tests.e2e.server import HANG_S, Server

PROMPT = [10 + number * 37 % 4_000 for number in range(2_000)]


def generate(server: Server) -> tuple[list[int], int]:
    told = server.post(
        "/generate",
        input_ids=PROMPT,
        sampling_params={"temperature": 0, "max_new_tokens": 12, "ignore_eos": True},
    )
    return told["output_ids"], told["meta_info"]["cached_tokens"]


def test_a_prompt_is_found_after_a_restart_and_after_a_kill(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    # However slow the disk is, the request waits for it.
    patience = ("--cache-wait-ms", str(int(1_000 * HANG_S)), "--drain-s", str(HANG_S))
    options = (*MODEL, *patience, "--cache-dir", str(folder))
    options = (*options, "--journal", str(tmp_path / "journal"))
    server = Server(*options)
    expected, num_cached = generate(server)
    assert num_cached == 0
    assert server.stop() == 0  # it was used once: written when the server ends
    assert len(list(folder.rglob("*.kv"))) == 31

    server = Server(*options)
    wait_for(server, "open", num_blocks=31)
    output, num_cached = generate(server)
    assert output == expected
    assert num_cached >= 1_984
    told = server.get("/cache")
    assert told["disk"] == "open"
    assert told["disk_hit_tokens"] == num_cached
    assert told["faults"] == 0
    generate(server)
    end(server)

    server = Server(*options)
    wait_for(server, "open", num_blocks=31)
    for path in folder.rglob("*.kv"):  # one byte of each
        content = bytearray(path.read_bytes())
        content[-7] ^= 1
        path.write_bytes(content)
    output, num_cached = generate(server)
    assert output == expected
    assert num_cached == 0
    assert server.get("/cache")["faults"] == 1
    generate(server)
    wait_for(server, "open", num_blocks=31)
    assert server.post("/cache/clear")["success"]
    assert server.get("/cache")["disk_blocks"] == 0
    end(server)


@pytest.mark.slow
def test_a_server_that_is_killed_while_it_writes_leaves_nothing_wrong(tmp_path: Path) -> None:
    assert run(tmp_path, 2, seed=7) > 0
