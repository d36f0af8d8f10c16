"""Options for several models reach the parts that keep them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.launch.tiny_model import write_tiny_model
from weft.config.keys import KeyDigests
from weft.config.server import ServerConfig
from weft.launch.serve import serve_command
from weft.launch.several import serve
from weft.launch.several.roster import HouseRoster
from weft.launch.several.serve import ManyModels, SeveralFront
from weft.observe.trace import NoTracer


def many_models(folder: Path, *options: str) -> ManyModels:
    for name in ("one", "two", "three"):
        write_tiny_model(folder / name)
    words = [str(folder / "one"), str(folder / "two"), str(folder / "three")]
    settings = serve_command().read([*words, *options], {})
    return ManyModels(settings, settings.make(ServerConfig), KeyDigests())


def test_the_rules_have_budget_number_and_patience(tmp_path: Path) -> None:
    options = ("--memory", "3", "--models-max", "2", "--load-patience-s", "7")
    many = many_models(tmp_path, *options)
    rules = many.rules
    assert rules.budget_bytes == 3_000_000_000
    assert rules.max_models == 2
    assert rules.patience_s == 7.0
    assert many.share_bytes == 1_500_000_000


def test_requests_wait_for_models_as_many_and_as_long_as_the_options_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []

    class Roster(HouseRoster):
        def __init__(self, *parts: Any, **settings: Any) -> None:
            made.append(settings)
            super().__init__(*parts, **settings)

    monkeypatch.setattr(serve, "HouseRoster", Roster)

    async def make() -> None:
        many = many_models(tmp_path, "--max-load-waiting", "5", "--load-wait-s", "9")
        front = SeveralFront(many, NoTracer())
        assert callable(front.app)
        front.lost.cancel()
        front.house.close()

    asyncio.run(make())
    [settings] = made
    assert settings["most_waiting"] == 5
    assert settings["longest_wait_s"] == 9.0
