"""What the package compressed-tensors packs is read as it unpacks it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.executor.driver import make_driver
from tests.models.packed import Format, Packed, PackedCheckpoint, compressed, grouped
from weft.config.model import ModelConfig

maker = pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")


def made(bits: int, symmetric: bool, group: int) -> Format:
    """`pack-quantized`, by the package; the scales are ours."""
    strategy = "group" if group else "channel"
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": strategy,
        "group_size": group or None,
    }

    def pack(weight: Tensor) -> Packed:
        from compressed_tensors.compressors import PackedQuantizationCompressor as Compressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        arguments = QuantizationArgs(**weights)
        scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
        found = grouped(weight, bits, group, is_symmetric=symmetric, scale_type=torch.bfloat16)
        zeros = torch.from_numpy(found.zeros - 2 ** (bits - 1)).to(torch.int8)
        state = {"weight": weight, "weight_scale": found.scales.float(), "weight_zero_point": zeros}
        packed = Compressor.compress(state, scheme)
        unpacked = Compressor.decompress(dict(packed), scheme)["weight"]
        return packed, unpacked.float()

    return Format(compressed("pack-quantized", **weights), pack)


@pytest.mark.parametrize("group", [32, 0])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_packed_weights_are_those_that_their_maker_unpacks(
    tmp_path: Path, bits: int, symmetric: bool, group: int
) -> None:
    packed = PackedCheckpoint(made(bits, symmetric, group), tmp_path)
    model = ModelConfig.from_folder(tmp_path)
    driver = make_driver(model, tmp_path, kernels="auto", quantize="stored", dtype="float32")
    for weight in driver.steps._model.weights():  # type: ignore[attr-defined]
        assert torch.equal(weight.get(), packed.stands_for[weight.name]), weight.name
    driver.runner.close()
