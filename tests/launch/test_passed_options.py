"""Options reach the parts that they are for, which have tests of what they do with them."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch.server_process import TIMEOUT_S, ServerProcess
from tests.launch.tiny_model import write_tiny_model
from tests.models.pictures import make_with_pictures
from tests.text.media_fakes import SEEING
from tests.text.tokens import infill_tokenizer
from weft.assemble import build
from weft.assemble.build import Built, build_engine
from weft.assemble.model_config import choose_model
from weft.assemble.prepare import prepare
from weft.config.engine import EngineConfig
from weft.config.keys import digest, read_keys
from weft.config.limits import Limits
from weft.config.machine import Machine
from weft.config.server import ServerConfig
from weft.grammar.pool import GrammarPool
from weft.journal.file import JournalReader
from weft.journal.records import BEGINNING
from weft.messages.requests import Abort
from weft.server import media
from weft.server.media import serve_media
from weft.text.media.loader import MediaLoader

MACHINE = Machine(
    cores=1, free_bytes=4_000_000_000, total_bytes=4_000_000_000, gpus=(), no_gpu_reason="none"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def built_with(model: Path, **settings: Any) -> Built:
    """An engine with random weights."""
    config = EngineConfig(
        model=str(model), device="cpu", threads=1, load_format="dummy", **settings
    )
    prepared = prepare(config, MACHINE)
    return build_engine(prepared.config, prepared.folder)


def answer(server: ServerProcess, path: str, key: str = "") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path, headers={"authorization": f"Bearer {key}"} if key else {})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def test_a_server_has_the_name_and_the_metrics_that_options_give_it(model: Path) -> None:
    options = ("--served-model-name", "loom", "--metrics-compat", "vllm")
    with ServerProcess(model, *options) as server:
        server.wait_ready()
        _, listed = answer(server, "/v1/models")
        assert [one["id"] for one in json.loads(listed)["data"]] == ["loom"]
        status, metrics = answer(server, "/metrics")
    assert status == 200
    assert "\nvllm:num_requests_running{" in metrics
    assert 'model_name="loom"' in metrics


def test_an_address_for_traces_that_is_none_ends_the_start_with_its_name(model: Path) -> None:
    with ServerProcess(model, "--otlp-endpoint", "127.0.0.1:4317") as server:
        assert server.end() == 2
    assert any("127.0.0.1:4317" in line for line in server.lines), server.lines


def test_keys_of_administrators_are_read_from_their_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# on call\n@anna first-key\nsecond-key\n")
    config = ServerConfig(admin_api_key="third-key", admin_api_key_file=str(file))
    digests, _ = read_keys(config)
    keys = ("third-key", "first-key", "second-key")
    assert digests.admin == tuple(digest(key) for key in keys)
    assert digests.name(digest("first-key")) == "anna"
    assert digests.user == ()


def test_limits_of_sessions_and_stages_reach_the_scheduler(model: Path) -> None:
    built = built_with(model, max_session_tokens=77, pp_max_micro_batch_size=3)
    built.runner.close()
    settings = built.engine.scheduler.settings
    assert settings.sessions.max_tokens == 77
    assert settings.max_stage_rows == 3


def test_memory_for_grammars_is_that_of_the_option(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def pool(*parts: Any, max_bytes: int, **others: Any) -> GrammarPool:
        asked.append(max_bytes)
        return GrammarPool(*parts, max_bytes=max_bytes, **others)

    monkeypatch.setattr(build, "GrammarPool", pool)
    built_with(model, grammar_cache_mb=3).runner.close()
    assert asked == [3_000_000]


def num_states(path: Path) -> int:
    with JournalReader(path) as reader:
        return sum(record.startswith(BEGINNING) for record in reader)


@pytest.mark.parametrize(("state_mb", "max_mb"), [(0, 256), (1, 256), (0, 1)])
def test_a_journal_begins_again_after_the_bytes_that_options_say(
    model: Path, tmp_path: Path, state_mb: int, max_mb: int
) -> None:
    path = tmp_path / "recorded"
    built = built_with(model, journal=str(path), journal_state_mb=state_mb, journal_max_mb=max_mb)
    for _ in range(3):
        built.engine.submit(Abort(names=("x" * 600_000,)))
        built.engine.step()
    built.runner.close()
    assert path.with_name("recorded.1").exists() == (max_mb == 1)
    assert num_states(path) == 1 + state_mb


def test_a_model_that_also_takes_pictures_takes_text_alone_if_told_so(tmp_path: Path) -> None:
    folder = make_with_pictures("gemma3", tmp_path).folder
    assert choose_model(EngineConfig(model=str(folder)), folder).vision is not None
    config = EngineConfig(model=str(folder), language_model_only=True)
    assert choose_model(config, folder).vision is None


def test_memory_for_prepared_pictures_is_that_of_the_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def loader(*parts: Any) -> MediaLoader:
        asked.append(parts[-1])
        return MediaLoader(*parts)

    monkeypatch.setattr(media, "MediaLoader", loader)
    config = ServerConfig(media_cache_mb=1.5)
    served = serve_media(SEEING, infill_tokenizer("<pad>"), config, Limits())
    served.close()
    assert asked == [1_500_000]
