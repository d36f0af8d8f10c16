"""What tests of `weft.LLM` share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.oracle_llm import oracle_llm
from tests.launch.tiny_model import write_tiny_model
from weft import LLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def llm(folder: Path) -> LLM:
    return oracle_llm(folder)[0]
