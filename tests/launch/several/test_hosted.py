"""What a model of a server with several says that cannot be loaded."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.launch.tiny_model import write_tiny_model
from weft.config.keys import KeyDigests
from weft.config.machine import Machine
from weft.launch.front import FrontParts
from weft.launch.serve import serve_command
from weft.launch.several.hosted import HostedModel, HouseParts, LoadFailed
from weft.launch.several.specs import read_specs
from weft.store.store import ModelStore


def test_a_model_that_is_too_large_names_the_limit(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "one")
    settings = serve_command().read(["--models-dir", str(tmp_path)], {})
    [spec] = read_specs(settings, ModelStore())
    parts = SimpleNamespace(
        machine=Machine(1, 4_000, 4_000), digests=KeyDigests(), share_bytes=1_000
    )
    parts.budget_bytes = 2_000
    host = HostedModel(spec, cast(HouseParts, parts))
    with pytest.raises(LoadFailed, match="All models together may take --memory, 2 kB") as found:
        asyncio.run(host.prepare())
    assert found.value.is_users, "nobody is told to try again"


def test_the_tokenizer_of_a_model_that_is_unloaded_rests(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "one")
    settings = serve_command().read(["--models-dir", str(tmp_path)], {})
    [spec] = read_specs(settings, ModelStore())
    host = HostedModel(spec, cast(HouseParts, None))
    rested: list[str] = []
    workers = SimpleNamespace(rest=lambda: rested.append("tokenizer"))
    tokenizer = SimpleNamespace(workers=workers)
    host.parts = cast(FrontParts, SimpleNamespace(tokenizer=tokenizer))
    asyncio.run(host.close())
    assert rested == ["tokenizer"]
