"""GGUF files with a layer that predicts a token ahead (`nextn`): it is the model's MTP layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.caches import set_own_cache
from tests.executor.gguf_ahead import VARIANTS, ahead_weights, layer_of, written
from tests.executor.gguf_models import ADDED_ONE, described
from tests.models.windowed import Served
from weft.assemble.checkpoint import read_headers
from weft.config.model import ModelConfig
from weft.weights.load import load_weights


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_own_cache(tmp_path / "cache", monkeypatch)


@pytest.mark.parametrize("architecture", VARIANTS)
def test_the_layer_ahead_is_the_mtp_layer(tmp_path: Path, architecture: str) -> None:
    ahead = ahead_weights(architecture, VARIANTS[architecture][0])
    folder = described(written(tmp_path, architecture, ahead))
    config = ModelConfig.from_folder(folder)
    assert config.num_ahead == 1
    layer = layer_of(config, list(read_headers(folder)))
    load_weights(layer.weights(), folder, ("",))
    found = {weight.name: weight.get() for weight in layer.weights()}
    has_added_one = architecture.startswith(ADDED_ONE)
    for name, expected in ahead.items():
        if name.endswith("kv_b_proj.weight"):
            continue  # its halves are tensors of their own in these files
        if has_added_one and name.endswith("norm.weight"):
            expected = expected + 1
        torch.testing.assert_close(found[name], expected, msg=name)


@pytest.mark.parametrize("architecture", ["glm4moe", "qwen35"])
def test_it_guesses_and_changes_no_token(tmp_path: Path, architecture: str) -> None:
    ahead = ahead_weights(architecture, VARIANTS[architecture][0])
    folder = described(written(tmp_path, architecture, ahead))
    prompts = [list(range(3 + shift, 40 + shift)) for shift in range(3)]
    found = []
    for speculative in ("off", "mtp"):
        engine = Served(
            folder,
            speculative=speculative,
            context_length=128,
            kv_tokens=1_024,
            max_mamba_cache_size=48,
            max_running_requests=4,
        )
        engine.run(*prompts, max_new=30)
        found.append(engine.outputs)
        if speculative == "mtp":
            assert engine.engine.services.stats().total_drafts_mtp > 3
        engine.runner.close()
    assert found[0] == found[1]


def test_a_layer_without_its_norms_is_left_out(tmp_path: Path) -> None:
    ahead = ahead_weights("glm4moe", VARIANTS["glm4moe"][0])
    del ahead["model.layers.2.hnorm.weight"]
    folder = described(written(tmp_path, "glm4moe", ahead))
    config = ModelConfig.from_folder(folder)
    assert config.mtp(list(read_headers(folder))) is None
