"""An engine with a real (tiny, random) model writes a journal that `weft replay` repeats."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.tiny_model import write_tiny_model
from weft.assemble.build import build_engine
from weft.assemble.prepare import prepare
from weft.cli.main import main
from weft.config.engine import EngineConfig
from weft.config.options import SettingsError
from weft.journal.recorder import RecordedEngine
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def config(model: Path, journal: Path) -> EngineConfig:
    return EngineConfig(
        model=str(model),
        load_format="dummy",
        device="cpu",
        threads=1,
        kv_tokens=512,
        journal=str(journal),
    )


def test_an_engine_with_a_model_is_replayed_without_it(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    journal = tmp_path / "j"
    prepared = prepare(config(model, journal))
    built = build_engine(prepared.config, prepared.folder)
    try:
        for id in range(1, 6):
            sampling = SamplingParams(
                max_new_tokens=10, logprobs=2, min_new_tokens=3, frequency_penalty=0.5
            )
            prompt = bytes([id, 0, 0, 0]) * 20
            built.engine.submit(
                GenerateRequest(id=id, rid=f"r{id}", input_ids=prompt, sampling=sampling)
            )
            built.engine.step()
        while built.engine.has_work:
            built.engine.step()
    finally:
        built.runner.close()
    caplog.set_level("DEBUG", "weft")
    caplog.clear()
    assert main(["replay", str(journal), "--rid", "r3", "--check"]) == 0
    assert not caplog.records, "what the engine logs again was logged before"
    told = capsys.readouterr().out
    assert "and 5 requests" in told
    assert "every decision is as recorded" in told
    assert "r3 (request 3): finished" in told


def test_the_files_of_an_engine_with_a_model_are_replayed_alone(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = tmp_path / "j"
    prepared = prepare(config(model, journal))
    built = build_engine(prepared.config, prepared.folder)
    assert isinstance(built.engine, RecordedEngine)
    built.engine._recorder._max_bytes = (
        1  # the next file begins as soon as as much is recorded as its state has
    )
    try:
        for id in range(1, 40):
            sampling = SamplingParams(max_new_tokens=20, ignore_eos=True)
            built.engine.submit(
                GenerateRequest(
                    id=id, rid=f"r{id}", input_ids=bytes([id, 0, 0, 0]) * 5, sampling=sampling
                )
            )
            built.engine.step()
        while built.engine.has_work:
            built.engine.step()
    finally:
        built.runner.close()
    for name in ("j.1", "j"):
        assert main(["replay", str(tmp_path / name), "--check"]) == 0
        told = capsys.readouterr().out
        assert "it continues at step" in told
        assert "every decision is as recorded" in told


def test_a_journal_that_cannot_be_written_is_the_users_error(model: Path, tmp_path: Path) -> None:
    prepared = prepare(config(model, tmp_path / "none" / "j"))
    with pytest.raises(SettingsError, match="--journal: cannot write"):
        build_engine(prepared.config, prepared.folder)
