"""Checkpoints that are packed in few bits are served with the weights that they stand for,
exactly."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.executor.driver import Driver, Turn, make_driver
from tests.models.packed import (
    FORMATS,
    TOKENS,
    Format,
    PackedCheckpoint,
    awq,
    bitsandbytes,
    gptq,
    mxfp4,
    nvfp4,
    pack_quantized,
)
from tests.seeds import slow
from weft.assemble import prepare
from weft.config.engine import EngineConfig
from weft.config.model import BadCheckpoint, ModelConfig, ModelNotFound
from weft.config.options import SettingsError
from weft.ops.cpp.build import CannotBuild
from weft.plan.device import UpdateFromDisk
from weft.weights.gguf.codes import BadScales
from weft.weights.known import BUNDLED
from weft.weights.packed.float4 import mxfp4_codes

UP = "model.layers.0.mlp.up_proj"


@pytest.fixture(scope="module", params=list(FORMATS))
def packed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> PackedCheckpoint:
    return PackedCheckpoint(FORMATS[request.param], tmp_path_factory.mktemp("packed"))


@pytest.fixture
def drive() -> Iterator[Callable[..., Driver]]:
    drivers: list[Driver] = []

    def load(folder: Path, **settings: Any) -> Driver:
        settings = {"dtype": "float32", "kernels": "auto", "quantize": "stored", **settings}
        drivers.append(make_driver(ModelConfig.from_folder(folder), folder, **settings))
        return drivers[-1]

    yield load
    for driver in drivers:
        driver.runner.close()


def weights(driver: Driver) -> dict[str, torch.Tensor]:
    return {weight.name: weight.get() for weight in driver.steps._model.weights()}  # type: ignore[attr-defined]


def kept_in_codes(driver: Driver) -> list[bool]:
    """Of the matrices of the first layer."""
    layer = driver.steps._model._model.layers[0]  # type: ignore[attr-defined]
    products = (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)
    return [panels.codes is not None for product in products for panels in product.matrix.pieces]


@pytest.mark.parametrize("piece_bytes", [1, *slow([8 << 20])])
def test_every_weight_is_what_its_format_says_bit_for_bit(
    packed: PackedCheckpoint,
    drive: Callable[..., Driver],
    piece_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weft.weights.pieces.PIECE_BYTES", piece_bytes)
    for settings in ({}, {"kernels": "torch", "quantize": "none"}):
        found = weights(drive(packed.folder, **settings))
        for name, weight in packed.stands_for.items():
            assert torch.equal(found[name], weight), name


def test_the_kernels_compute_what_transformers_does_but_for_rounded_activations(
    packed: PackedCheckpoint, drive: Callable[..., Driver]
) -> None:
    expected = packed.logprobs()
    actual = drive(packed.folder).run(Turn(0, TOKENS))[0]
    assert (actual - expected).norm() < 0.01 * expected.norm()


def test_torch_computes_what_transformers_does(
    packed: PackedCheckpoint, drive: Callable[..., Driver]
) -> None:
    expected = packed.logprobs()
    actual = drive(packed.folder, kernels="torch", quantize="none").run(Turn(0, TOKENS))[0]
    assert (actual - expected).norm() < 2e-4 * expected.norm()


SPOILED: dict[str, tuple[Format, Callable[[PackedCheckpoint], object], str]] = {
    "no scales": (gptq(), lambda c: c.tensors.pop(UP + ".scales"), "up_proj.scales is missing"),
    "codes of another shape": (
        gptq(),
        lambda c: c.tensors.update({UP + ".qweight": torch.zeros(16, 250, dtype=torch.int32)}),
        r"up_proj.qweight \[16, 250\] instead of \[16, 256\]",
    ),
    "codes of another type": (
        gptq(),
        lambda c: c.tensors.update({UP + ".qweight": torch.zeros(16, 256)}),
        "up_proj.qweight F32 instead of I32",
    ),
    "other bits than the config's": (
        gptq(),
        lambda c: c.describe(bits=8),
        r"q_proj.qweight \[16, 128\] instead of \[32, 128\]",
    ),
    "other groups than the config's": (
        gptq(),
        lambda c: c.describe(group_size=64),
        r"scales \[4, 128\] instead of \[2, 128\]",
    ),
    "another method than the config's": (
        gptq(),
        lambda c: c.describe(quant_method="fp8"),
        "qweight is packed as gptq and awq do it, but config.json says fp8",
    ),
    "scales that are not finite": (
        gptq(),
        lambda c: c.tensors[UP + ".scales"].fill_(torch.inf),
        "up_proj has scales that are not finite",
    ),
    "a number of a group that is not there": (
        gptq(),
        lambda c: c.tensors[UP + ".g_idx"].fill_(4),
        "up_proj.g_idx has numbers of groups that are not in 0 to 3",
    ),
    "groups of different sizes": (
        gptq(),
        lambda c: c.tensors[UP + ".g_idx"][40:].fill_(3),
        "up_proj.g_idx has groups of other sizes than 32",
    ),
    "zero points that differ though they are symmetric": (
        gptq(sym=False),
        lambda c: c.describe(sym=True),
        "qzeros has different zero points, but config.json says that they are symmetric",
    ),
    "a bias that the model has not": (
        gptq(),
        lambda c: c.tensors[UP + ".bias"].fill_(1),
        "1 unexpected: .*up_proj.bias",
    ),
    "a shape that is another": (
        pack_quantized(),
        lambda c: c.tensors.update({UP + ".weight_shape": torch.tensor([256, 120])}),
        r"up_proj.weight_shape says \[256, 120\] instead of \[256, 128\]",
    ),
    "no zero points": (
        pack_quantized(symmetric=False),
        lambda c: c.tensors.pop(UP + ".weight_zero_point"),
        "up_proj.weight_zero_point is missing",
    ),
    "zero points out of range": (
        pack_quantized(symmetric=False, plain_zeros=True),
        lambda c: c.tensors[UP + ".weight_zero_point"].fill_(8),
        "up_proj.weight_zero_point has zero points that are not in -8 to 7",
    ),
    "an exponent that is no number": (
        mxfp4(),
        lambda c: c.tensors[UP + ".weight_scale"].fill_(255),
        "up_proj has scales that are not finite",
    ),
    "a factor of scales that is 0": (
        nvfp4(),
        lambda c: c.tensors[UP + ".weight_global_scale"].zero_(),
        "up_proj has scales that are not finite",
    ),
    "a description that makes no sense": (
        bitsandbytes(),
        lambda c: c.tensors[UP + ".weight.quant_state.bitsandbytes__nf4"].zero_(),
        "up_proj.weight.quant_state.bitsandbytes__nf4 is not valid JSON of the expected form",
    ),
    "blocks without scales": (
        bitsandbytes(),
        lambda c: c.tensors.pop(UP + ".weight.absmax"),
        "up_proj.weight.absmax is missing",
    ),
    "outputs that are no whole words": (
        awq(),
        lambda c: c.tensors.update({UP + ".qweight": torch.zeros(128, 31, dtype=torch.int32)}),
        r"up_proj.qweight \[128, 31\] instead of \[128, 32\]",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_what_does_not_fit_is_named(
    name: str, tmp_path: Path, drive: Callable[..., Driver]
) -> None:
    format, spoil, message = SPOILED[name]
    packed = PackedCheckpoint(format, tmp_path)
    spoil(packed)
    packed.save()
    with pytest.raises(BadCheckpoint, match=message) as error:
        drive(packed.folder)
    assert "\n" not in str(error.value)


def test_single_matrices_may_have_other_bits_and_groups(
    tmp_path: Path, drive: Callable[..., Driver]
) -> None:
    packed = PackedCheckpoint(gptq(), tmp_path)
    other, weight = gptq(8, 64, sym=False).pack(packed.stands_for[UP + ".weight"])
    packed.tensors |= {f"{UP}.{ending}": tensor for ending, tensor in other.items()}
    packed.save()
    packed.describe(dynamic={"+:.*up_proj.*": {"bits": 8, "group_size": 64, "sym": False}})
    assert torch.equal(weights(drive(packed.folder))[UP + ".weight"], weight)


def test_zero_points_of_the_second_version_under_the_name_of_the_first_are_reported(
    tmp_path: Path, drive: Callable[..., Driver], caplog: pytest.LogCaptureFixture
) -> None:
    """Where they are said to be asymmetric, they may be meant so."""
    packed = PackedCheckpoint(gptq(stored_shift=0), tmp_path)
    packed.describe(sym=False)
    drive(packed.folder)
    assert "qzeros are 8, as in the format gptq_v2; they are read as 9" in caplog.text


def test_codes_are_kept_where_a_gate_and_its_up_are_stored_alike(
    tmp_path: Path, drive: Callable[..., Driver]
) -> None:
    packed = PackedCheckpoint(gptq(), tmp_path, left_out="gate_proj")
    assert kept_in_codes(drive(packed.folder)) == [True, True, False, True]


def test_codes_are_kept_where_inputs_stand_in_another_order(
    tmp_path: Path, drive: Callable[..., Driver]
) -> None:
    packed = PackedCheckpoint(gptq(act_order=True), tmp_path)
    assert kept_in_codes(drive(packed.folder)) == [True] * 4


def test_inputs_of_a_gate_and_its_up_may_stand_in_different_orders(
    tmp_path: Path, drive: Callable[..., Driver]
) -> None:
    """Then these are widened; queries, keys and values have an order each."""
    packed = PackedCheckpoint(gptq(act_order=True), tmp_path)
    for name in ("mlp.gate_proj", "self_attn.k_proj"):
        module = f"model.layers.0.{name}"
        weight = packed.stands_for[f"{module}.weight"]
        tensors, packed.stands_for[f"{module}.weight"] = gptq().pack(weight)
        packed.tensors |= {f"{module}.{ending}": tensor for ending, tensor in tensors.items()}
    packed.save()
    driver = drive(packed.folder)
    assert kept_in_codes(driver) == [True, True, True, True, False, True]
    found = weights(driver)
    for name, weight in packed.stands_for.items():
        assert torch.equal(found[name], weight), name


def test_new_weights_may_be_packed(tmp_path: Path, drive: Callable[..., Driver]) -> None:
    packed = PackedCheckpoint(gptq(act_order=True), tmp_path / "new")
    plain = tmp_path / "old"
    packed.model.save_pretrained(plain)
    driver = drive(plain, weights_root=str(tmp_path), quantize="none")
    packed.tensors[UP + ".scales"].view(-1)[0] = torch.nan
    packed.save()
    reply = driver.runner.control(UpdateFromDisk("new")).result()
    assert (reply.ok, reply.is_reloaded) == (False, False)
    assert "not finite" in reply.message
    packed.tensors[UP + ".scales"].view(-1)[0] = 0
    packed.save()
    reply = driver.runner.control(UpdateFromDisk("new")).result()
    assert reply.ok, reply.message
    changed = UP + ".weight"
    found = weights(driver)
    for name in packed.coded:
        assert name == changed or torch.equal(found[name], packed.stands_for[name])


def test_memory_counts_codes_where_they_are_kept_and_floats_where_they_are_widened(
    tmp_path: Path, drive: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = PackedCheckpoint(gptq(sym=False), tmp_path)
    copy_tokenizer(tmp_path)
    asked = EngineConfig(model=str(tmp_path), kv_tokens=128, device="cpu")
    kept = prepare.prepare(asked)
    assert kept.config.quantize == "stored"
    tensors = drive(tmp_path).runner.store._memory.weights  # type: ignore[attr-defined]
    matrices = sum(tensor.nbytes for tensor in tensors if tensor.dtype == torch.uint8)
    # Panels fill the small vocabulary up to whole ones.
    assert 0.95 * matrices < kept.sizing.weight_bytes <= matrices
    monkeypatch.setattr(prepare, "find_or_build", cannot_build)
    widened = prepare.prepare(asked)
    assert widened.config.quantize == "none"
    num_weights = sum(weight.numel() for weight in packed.stands_for.values() if weight.dim() > 1)
    assert widened.sizing.weight_bytes == 4 * num_weights


def cannot_build(name: str) -> Path:
    raise CannotBuild(f"there is no compiler for {name}")


def copy_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, folder)


def test_rows_of_gpt_oss_are_codes_and_scales(tmp_path: Path) -> None:
    tensors, weight = mxfp4().pack(torch.randn(24, 96, generator=torch.manual_seed(0)))
    blocks = tensors["weight_packed"].view(24, 3, 16)
    assert torch.equal(mxfp4_codes(blocks, tensors["weight_scale"]).dequantized(), weight)
    with pytest.raises(BadScales):
        mxfp4_codes(blocks, torch.full((24, 3), 255, dtype=torch.uint8))


def test_the_name_of_the_format_may_be_given_and_is_compared(tmp_path: Path) -> None:
    PackedCheckpoint(gptq(), tmp_path)
    copy_tokenizer(tmp_path)
    for said in ("auto", "gptq", "gptq_marlin"):
        asked = EngineConfig(model=str(tmp_path), kv_tokens=128, quantization=said)
        assert prepare.prepare(asked).model.stored.method == "gptq"
    wrong = EngineConfig(model=str(tmp_path), kv_tokens=128, quantization="awq")
    with pytest.raises(SettingsError, match=r"--quantization is awq, but .* are stored as gptq"):
        prepare.prepare(wrong)


def test_the_kind_of_files_may_be_given_and_is_compared(tmp_path: Path) -> None:
    PackedCheckpoint(gptq(), tmp_path)
    copy_tokenizer(tmp_path)
    asked = EngineConfig(model=str(tmp_path), kv_tokens=128, load_format="safetensors")
    assert prepare.prepare(asked).folder == tmp_path
    with pytest.raises(ModelNotFound, match="has no GGUF file"):
        prepare.prepare(replace(asked, load_format="gguf"))
    gguf = tmp_path / "model.gguf"
    gguf.touch()
    with pytest.raises(SettingsError, match=r"--load-format is safetensors, but .* is a GGUF file"):
        prepare.prepare(replace(asked, model=str(gguf)))


def test_a_copy_of_the_weights_under_other_names_is_not_read(
    tmp_path: Path, drive: Callable[..., Driver]
) -> None:
    packed = PackedCheckpoint(gptq(), tmp_path)
    save_file({"layers.0.wq.weight": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    assert weights(drive(tmp_path)).keys() == packed.stands_for.keys()


def test_new_codes_in_another_order_of_inputs_replace_those_that_are_kept(
    tmp_path: Path, drive: Callable[..., Driver]
) -> None:
    """The matrix keeps its own form: what comes is rounded to that."""
    old = PackedCheckpoint(gptq(8), tmp_path / "old")
    new = PackedCheckpoint(gptq(8, act_order=True), tmp_path / "new")
    driver = drive(old.folder, weights_root=str(tmp_path))
    reply = driver.runner.control(UpdateFromDisk("new")).result()
    assert reply.ok, reply.message
    found = weights(driver)[UP + ".weight"]
    expected = new.stands_for[UP + ".weight"]
    assert (found - expected).abs().max() < 0.01 * expected.abs().max()
