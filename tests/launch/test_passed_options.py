"""Options reach the parts that they are for, which have tests of what they do with them."""

from __future__ import annotations

import http.client
import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.launch.server_process import TIMEOUT_S, ServerProcess
from tests.launch.tiny_model import write_tiny_model
from tests.models.pictures import make_with_pictures
from tests.text.media_fakes import SEEING
from tests.text.tokens import infill_tokenizer
from weft.assemble import build, handoff
from weft.assemble.build import Built, build_engine
from weft.assemble.handoff import handoff_settings
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
from weft.launch import front
from weft.launch.route import route
from weft.messages.requests import Abort
from weft.observe.metrics import Metrics
from weft.observe.trace import NoTracer
from weft.relay.app import Relay
from weft.scheduler.settings import HandoffSettings
from weft.server import media
from weft.server.context import ModelFacts
from weft.server.media import serve_media
from weft.text.media.fetch import MediaAccess
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


def test_a_server_writes_its_log_in_the_form_of_the_option(model: Path) -> None:
    with ServerProcess(model, "--log-format", "json") as server:
        assert server.get("/health") == 200
        server.signal(signal.SIGTERM)
        assert server.end() == 0
    assert server.lines
    assert all("event" in json.loads(line) for line in server.lines)


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
    built = built_with(
        model, max_session_tokens=77, session_timeout_s=9.0, pp_max_micro_batch_size=3
    )
    built.runner.close()
    settings = built.engine.scheduler.settings
    assert settings.sessions.max_tokens == 77
    assert settings.sessions.timeout_s == 9.0
    assert settings.max_stage_rows == 3


def test_the_model_is_taken_from_the_revision_of_the_option(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    def local_path(name: str, revision: str) -> Path:
        asked.append((name, revision))
        return model

    monkeypatch.setattr("weft.assemble.model_folder.local_path", local_path)
    assert prepare(EngineConfig(model="org/model", revision="v2"), MACHINE).folder == model
    assert asked == [("org/model", "v2")]


def test_a_handoff_has_the_times_and_the_fallback_of_the_options() -> None:
    config = EngineConfig(
        disaggregation_mode="decode",
        handoff_lease_s=4.0,
        handoff_wait_s=5.0,
        handoff_fallback="fail",
    )
    found = handoff_settings(config)
    assert found == HandoffSettings(mode="decode", lease_s=4.0, wait_s=5.0, fallback="fail")


def test_a_prefill_server_lends_on_the_address_of_the_option() -> None:
    config = EngineConfig(handoff_host="0.0.0.0", disaggregation_bootstrap_port=0)
    with handoff.listen(config) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_the_cache_on_disk_has_the_size_of_the_option(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    class Asked(Exception):
        pass

    def tiers(*parts: Any, max_bytes: int, **others: Any) -> None:
        asked.append(max_bytes)
        raise Asked

    monkeypatch.setattr("weft.assemble.cache.DiskTiers", tiers)
    with pytest.raises(Asked):
        built_with(model, cache_dir=str(tmp_path), cache_disk_gb=0.25)
    assert asked == [250_000_000]


def test_a_front_of_servers_probes_them_as_often_as_the_option_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[float] = []

    class Asked(Exception):
        pass

    async def watch(relay: Relay, probe_s: float) -> None:
        asked.append(probe_s)
        raise Asked

    monkeypatch.setattr(Relay, "watch", watch)
    with pytest.raises(Asked):
        route(("--worker", "http://127.0.0.1:9", "--port", "0", "--probe-s", "0.75"))
    assert asked == [0.75]


def test_memory_and_time_for_grammars_are_those_of_the_options(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, float]] = []

    def pool(*parts: Any, max_bytes: int, make_sandbox: Any, **others: Any) -> GrammarPool:
        *_, timeout_s = make_sandbox.args
        asked.append((max_bytes, timeout_s))
        return GrammarPool(*parts, max_bytes=max_bytes, make_sandbox=make_sandbox, **others)

    monkeypatch.setattr(build, "GrammarPool", pool)
    built_with(model, grammar_cache_mb=3, grammar_timeout_s=2.5).runner.close()
    assert asked == [(3_000_000, 2.5)]


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


def test_memory_and_time_for_pictures_are_those_of_the_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    times: list[float] = []

    def loader(*parts: Any) -> MediaLoader:
        asked.append(parts[-1])
        return MediaLoader(*parts)

    def access(*parts: Any, timeout_s: float) -> MediaAccess:
        times.append(timeout_s)
        return MediaAccess(parts[0], *parts[1:], timeout_s=timeout_s)  # type: ignore[misc]

    monkeypatch.setattr(media, "MediaLoader", loader)
    monkeypatch.setattr(media, "MediaAccess", access)
    config = ServerConfig(media_cache_mb=1.5, media_timeout_s=3.5)
    served = serve_media(SEEING, infill_tokenizer("<pad>"), config, Limits())
    served.close()
    assert asked == [1_500_000]
    assert times == [3.5]


@pytest.mark.parametrize("seconds", [0.0, 2.5])
def test_the_front_explains_what_is_slower_than_the_option(seconds: float) -> None:
    config = ServerConfig(log_slow_s=seconds)
    context: Any = SimpleNamespace(config=config, limits=Limits())
    engines: Any = SimpleNamespace(send=lambda message: None)
    parts = front.FrontParts(infill_tokenizer(), None, Metrics(), ModelFacts())
    client = front._client(context, parts, engines, NoTracer())
    slow = client.recorder._slow
    if seconds:
        assert slow is not None
        assert slow._longest_s == seconds
    else:
        assert slow is None
