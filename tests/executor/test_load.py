from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.executor.driver import MODEL
from weft.config.model import BadCheckpoint, ModelConfig, ModelNotFound
from weft.models.registry import DecoderModel, make_model
from weft.ops.plain import PlainOps
from weft.weights.load import load_weights, randomize


def make(config: ModelConfig = MODEL) -> DecoderModel:
    return make_model(config, PlainOps(getattr(torch, config.dtype), torch.device("cpu")))


def content(model: DecoderModel) -> dict[str, torch.Tensor]:
    return {weight.name: weight.get() for weight in model.weights()}


def checkpoint(config: ModelConfig = MODEL) -> dict[str, torch.Tensor]:
    model = make(config)
    randomize(model.weights())
    return content(model)


def load(folder: Path, config: ModelConfig = MODEL) -> dict[str, torch.Tensor]:
    model = make(config)
    load_weights(model.weights(), folder)
    return content(model)


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_random_weights_are_the_same_each_time_and_differ_by_name():
    first = checkpoint()
    assert_same(checkpoint(), first)
    assert not torch.equal(
        first["model.layers.0.mlp.up_proj.weight"], first["model.layers.1.mlp.up_proj.weight"]
    )
    assert first["model.norm.weight"].eq(1).all()


def test_one_file(tmp_path):
    save_file(checkpoint(), tmp_path / "model.safetensors")
    assert_same(load(tmp_path), checkpoint())


def test_several_files_with_an_index(tmp_path):
    """A file that the index does not name is left alone."""
    names = sorted(checkpoint())
    index = {name: f"part-{i % 3}.safetensors" for i, name in enumerate(names)}
    for file in set(index.values()):
        save_file(
            {name: checkpoint()[name] for name in names if index[name] == file}, tmp_path / file
        )
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    save_file({"other.weight": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    assert_same(load(tmp_path), checkpoint())


def test_weights_are_converted_to_the_dtype_of_the_model(tmp_path):
    save_file(checkpoint(), tmp_path / "model.safetensors")
    converted = {name: tensor.bfloat16() for name, tensor in checkpoint().items()}
    assert_same(load(tmp_path, replace(MODEL, dtype="bfloat16")), converted)


def test_a_tied_head_and_old_buffers_in_the_checkpoint_are_ignored(tmp_path):
    tied = replace(MODEL, tie_embeddings=True)
    extra = {
        "lm_head.weight": torch.ones(3),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    save_file({**checkpoint(tied), **extra}, tmp_path / "model.safetensors")
    assert_same(load(tmp_path, tied), checkpoint(tied))


def test_everything_that_does_not_fit_is_named_in_one_error(tmp_path):
    tensors = checkpoint()
    del tensors["model.norm.weight"]
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.ones(1)
    tensors["lm_head.weight"] = torch.ones(61, 8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint) as error:
        load(tmp_path)
    assert "1 missing: model.norm.weight;" in str(error.value)
    assert "1 unexpected: model.layers.2.mlp.up_proj.weight;" in str(error.value)
    assert "1 of another shape: lm_head.weight [61, 8] instead of [61, 16])" in str(error.value)


def test_long_lists_of_names_are_cut(tmp_path):
    save_file({"model.norm.weight": torch.ones(16)}, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=r"\d+ missing: (\S+, ){5}\.\.\.\)"):
        load(tmp_path)


UP = "model.layers.0.mlp.up_proj.weight"
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("name", [UP, "model.norm.weight"])
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_with_a_value_that_is_not_finite_is_named(tmp_path, name, value, dtype):
    tensors = {each: values.to(dtype) for each, values in checkpoint().items()}
    tensors[name].view(-1)[-1] = value
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        BadCheckpoint, match=rf"model\.safetensors: {name} has values that are not f"
    ):
        load(tmp_path)


def test_a_damaged_file_is_named(tmp_path):
    save_file(checkpoint(), tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors is damaged"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no weights in"),
        ({"pytorch_model.bin": "x"}, "only pickled ones, .* never read"),
        ({"model-Q4_K_M.gguf": "x"}, "is not a GGUF file"),
        (
            {"model.safetensors.index.json": '{"weight_map": {"a": "m-1.safetensors"}}'},
            "lacks 1 of its 1 weight files",
        ),
        ({"model.safetensors.index.json": "{}"}, "index.json is damaged"),
    ],
)
def test_a_folder_without_weights_says_what_is_wrong(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises((ModelNotFound, BadCheckpoint), match=message):
        load(tmp_path)


def test_an_index_cannot_point_out_of_its_folder(tmp_path):
    save_file(checkpoint(), tmp_path / "model.safetensors")
    inner = tmp_path / "inner"
    inner.mkdir()
    index = {"weight_map": {"lm_head.weight": "../model.safetensors"}}
    (inner / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelNotFound, match="lacks 1 of its 1"):
        load(inner)
