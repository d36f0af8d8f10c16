"""Checkpoints that are stored in eight bits give what transformers gives with the weights that they
stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.executor.driver import Driver, Turn, make_driver
from tests.models.reference import TINY, VOCAB
from weft.config.model import BadCheckpoint, ModelConfig
from weft.models.registry import make_model
from weft.ops.plain import PlainOps, QuantizedMatrix
from weft.plan.device import UpdateFromDisk
from weft.weights.scales import kv_scales

SIZES = {"hidden_size": 144, "intermediate_size": 200, "num_hidden_layers": 2, "head_dim": 24}
FP8 = torch.float8_e4m3fn
FLOAT = {"type": "float", "num_bits": 8}
INT = {"type": "int", "num_bits": 8}
UP = "model.layers.0.mlp.up_proj.weight"
TOKENS = np.random.default_rng(3).integers(0, VOCAB, 40).tolist()


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": {"weights": weights}},
    }


def whole(weight: Tensor) -> Tensor:
    return weight.abs().max() / 448


def by_output(weight: Tensor) -> Tensor:
    return (weight.abs().amax(1, keepdim=True) / 448).bfloat16()


def by_block(weight: Tensor) -> Tensor:
    rows, columns = (-(-size // 128) for size in weight.shape)
    padded = torch.zeros(128 * rows, 128 * columns)
    padded[: len(weight), : weight.shape[1]] = weight
    return padded.view(rows, 128, columns, 128).abs().amax((1, 3)) / 448


def by_output_of_integers(weight: Tensor) -> Tensor:
    return weight.abs().amax(1, keepdim=True) / 127.5


# name -> quantization_config, scales of a weight, what their names end with, what weights are
# stored in
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor], str, torch.dtype]] = {
    "fp8, a scale for each matrix": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        whole,
        "_scale",
        FP8,
    ),
    "fp8, by output": (
        compressed("float-quantized", **FLOAT, strategy="channel"),
        by_output,
        "_scale",
        FP8,
    ),
    "fp8, by block": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        by_block,
        "_scale_inv",
        FP8,
    ),
    "fp8, as Ministral 3 has it": (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        lambda weight: whole(weight).bfloat16(),
        "_scale_inv",
        FP8,
    ),
    "int8, by output": (
        compressed("int-quantized", **INT),
        by_output_of_integers,
        "_scale",
        torch.int8,
    ),
}


class Stored:
    """A checkpoint in one of the formats, and the model in transformers with the weights that it
    stands for."""

    def __init__(self, name: str, folder: Path) -> None:
        described, make_scales, ending, dtype = FORMATS[name]
        self.folder = folder
        self.name = name
        torch.manual_seed(11)
        config = transformers.Qwen3Config(**{**TINY, **SIZES}, attn_implementation="eager")
        self.model = transformers.Qwen3ForCausalLM(config).eval()
        self.model.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        stands_for = {}
        for key, weight in list(tensors.items()):
            if not key.endswith("_proj.weight"):
                stands_for[key] = weight
                continue
            scales = make_scales(weight)
            spread = scales.float()
            if scales.numel() > 1 and scales.shape[1] > 1:
                spread = spread.repeat_interleave(128, 0).repeat_interleave(128, 1)
                spread = spread[: len(weight), : weight.shape[1]]
            bits = weight / spread
            bits = bits.round().clamp(-128, 127) if dtype == torch.int8 else bits.clamp(-448, 448)
            tensors[key], tensors[key + ending] = bits.to(dtype), scales
            # Scales of activations, by the names of several makers.
            tensors[key.replace("weight", "input_scale")] = torch.ones(1)
            tensors[key.replace("weight", "activation_scale")] = torch.ones(())
            stands_for[key] = tensors[key].float() * spread
        self.model.load_state_dict(stands_for)
        self.tensors = tensors
        self.stands_for = stands_for
        save_file(tensors, folder / "model.safetensors")
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps({**written, "quantization_config": described})
        )

    def logprobs(self) -> Tensor:
        with torch.inference_mode():
            return self.model(torch.tensor([TOKENS])).logits[0, -1].log_softmax(-1)


@pytest.fixture(scope="module", params=list(FORMATS))
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    return Stored(request.param, tmp_path_factory.mktemp("stored"))


@pytest.fixture
def drive() -> Iterator[Callable[..., Driver]]:
    drivers: list[Driver] = []

    def load(folder: Path, **settings: Any) -> Driver:
        drivers.append(make_driver(ModelConfig.from_folder(folder), folder, **settings))
        return drivers[-1]

    yield load
    for driver in drivers:
        driver.runner.close()


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_weights_are_what_is_stored_times_its_scale(
    stored: Stored, drive: Callable[..., Driver], kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they come in pieces that are no whole blocks."""
    monkeypatch.setattr("weft.weights.pieces.PIECE_BYTES", 1)
    actual = drive(stored.folder, kernels=kernels, dtype="float32").run(Turn(0, TOKENS))[0]
    assert (actual - stored.logprobs()).abs().max() < 1e-4


def test_eight_bits_that_are_kept_are_those_that_were_stored(
    stored: Stored, drive: Callable[..., Driver]
) -> None:
    """Where rows have one scale; a CPU's matrices of fp8 stand for a GPU's."""
    format = "int8" if "int8" in stored.name else "fp8"
    layer = drive(stored.folder, quantize=format, dtype="float32").steps._model.layers[0]  # type: ignore[attr-defined]
    matrix = layer.mlp.gate_up.matrix
    wanted = stored.stands_for[UP]
    if format == "int8":
        assert torch.equal(matrix.get(1), wanted)
        return
    assert isinstance(matrix, QuantizedMatrix)
    same = torch.equal(matrix.values[200:].float(), stored.tensors[UP].float())
    assert same == ("block" not in stored.name)
    assert (matrix.get(1) - wanted).abs().max() < 0.07 * wanted.abs().max()


def test_integers_of_eight_bits_are_kept_as_they_were_stored_by_the_kernels(
    tmp_path: Path, drive: Callable[..., Driver]
) -> None:
    stored = Stored("int8, by output", tmp_path)
    driver = drive(tmp_path, quantize="int8", dtype="float32", kernels="auto")
    kept = {weight.name: weight.get() for weight in driver.steps._model.weights()}  # type: ignore[attr-defined]
    assert torch.equal(kept[UP], stored.stands_for[UP])


def test_new_weights_may_be_stored_in_eight_bits(
    stored: Stored, drive: Callable[..., Driver], tmp_path: Path
) -> None:
    plain = tmp_path / "plain"
    stored.model.save_pretrained(plain)
    driver = drive(plain, weights_root=str(stored.folder.parent), dtype="float32")
    with torch.no_grad():
        before = driver.run(Turn(0, TOKENS))[0]
    reply = driver.runner.control(UpdateFromDisk(stored.folder.name)).result()
    assert reply.ok, reply.message
    assert torch.allclose(driver.run(Turn(1, TOKENS))[0], before, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(UP + "_scale"), rf"1 of another type: {UP} F8_E4M3 without scales"),
        (
            lambda t: t.update({UP + "_scale": torch.ones(3, 1)}),
            r"up_proj.weight_scale \[3, 1\] for \[200, 144\]",
        ),
        (
            lambda t: t.update({UP: t[UP].view(torch.uint8)}),
            f"{UP} U8 instead of one of F64, F32, F16, BF16",
        ),
        (
            lambda t: t.update({"model.other_scale": torch.ones(1)}),
            "1 unexpected: model.other_scale",
        ),
    ],
)
def test_scales_that_do_not_fit_are_named(
    tmp_path: Path,
    drive: Callable[..., Driver],
    change: Callable[[dict[str, Tensor]], object],
    message: str,
) -> None:
    stored = Stored("fp8, by output", tmp_path)
    change(stored.tensors)
    save_file(stored.tensors, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=message):
        drive(tmp_path)


@pytest.mark.parametrize(
    "names",
    [
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    ],
)
@pytest.mark.parametrize("base", ["model.", "", "model.language_model.", "language_model.model."])
def test_scales_of_kv_are_found_under_every_name(
    tmp_path: Path, names: tuple[str, str], base: str
) -> None:
    """Layer 1 has none; layer 2 has one for both."""
    key, value = (f"{base}layers.0.{name}" for name in names)
    both = f"{base}layers.2.self_attn.kv_scale"
    tensors = {
        key: torch.tensor([0.5]),
        value: torch.tensor(0.25).bfloat16(),
        both: torch.tensor([2.0]),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert kv_scales(tmp_path, 3) == [(0.5, 0.25), (1.0, 1.0), (2.0, 2.0)]
    for wrong in (torch.tensor([0.0]), torch.ones(2), torch.tensor([torch.nan]), torch.tensor([1])):
        save_file({key: wrong}, tmp_path / "model.safetensors")
        with pytest.raises(BadCheckpoint, match="is not a scale of a layer's KV"):
            kv_scales(tmp_path, 1)


def test_the_twin_of_fp8_rounds_weights_and_activations() -> None:
    config = ModelConfig.from_hf(
        {**TINY, "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5}, "twin"
    )
    ops = PlainOps(torch.float32, torch.device("cpu"), "fp8")
    matrix = make_model(config, ops).layers[0].mlp.down.matrix  # type: ignore[attr-defined]
    assert isinstance(matrix, QuantizedMatrix)
    matrix.put(0, torch.eye(48, 80))
    x = torch.linspace(-1, 1, 80)[None]
    y = ops.linear(x, matrix)[0]
    assert not torch.equal(y, x[0, :48])
    assert torch.allclose(y, x[0, :48], rtol=2**-4, atol=2**-9)
