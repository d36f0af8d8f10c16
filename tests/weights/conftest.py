from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.weights.hub_server import REPO, WEIGHTS, Hub, content, serving
from weft.weights.pull import pull as pulling


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    found = Hub()
    found.repos[REPO] = {
        "config.json": b"{}",
        "tokenizer.json": content(1, 5_000),
        WEIGHTS: content(2),
        "modeling.py": b"print(1)",
        "pytorch_model.bin": content(3, 2_000),
        "original/consolidated.safetensors": content(4, 2_000),
    }
    found.repos["org/small-GGUF"] = {
        "README.md": b"",
        "small-Q1_0.gguf": content(5, 10_000),
        "small-Q4_K_M.gguf": content(6, 20_000),
        "small-Q8_0.gguf": content(7, 40_000),
        "parts/small-F16-00001-of-00002.gguf": content(8, 50_000),
        "parts/small-F16-00002-of-00002.gguf": content(9, 30_000),
        "mmproj-small-F16.gguf": content(10, 3_000),
    }
    found.repos["org/gated"] = dict(found.repos[REPO])
    found.gated.add("org/gated")
    with serving(found):
        monkeypatch.setattr(constants, "ENDPOINT", found.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(pulling, "SPARE_BYTES", 0)
        yield found
