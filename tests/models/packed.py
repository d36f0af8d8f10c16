"""Checkpoints of few bits, packed here by the tables of their formats, not by the programs of their
makers.

A packer takes a matrix and gives the tensors that stand for it, by the endings of their names, with
what they stand for in float32. All loops are over single codes: slow, and with nothing in common
with what reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.reference import TINY, VOCAB

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "head_dim": 32,
    "num_attention_heads": 4,
}
TOKENS = np.random.default_rng(3).integers(0, VOCAB, 40).tolist()
AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]  # nibble i of a word holds this column

Packed = tuple[dict[str, Tensor], Tensor]
Ints = NDArray[np.int64]


class Format(NamedTuple):
    """How a checkpoint is stored: its `quantization_config`, and its packer."""

    described: dict[str, Any]
    pack: Callable[[Tensor], Packed]


def words(codes: Ints, bits: int, columns: list[int] | None = None) -> Tensor:
    """[rows, codes] -> int32 [rows, words], the first code of a word in its lowest bits; the last
    word is filled up."""
    per_word = 32 // bits
    num_words = -(-codes.shape[1] // per_word)
    found = np.zeros((len(codes), num_words), np.uint64)
    for word in range(num_words):
        for place in range(per_word):
            column = word * per_word + (columns[place] if columns else place)
            if column < codes.shape[1]:
                found[:, word] |= codes[:, column].astype(np.uint64) << np.uint64(bits * place)
    return torch.from_numpy(found.astype(np.uint32).view(np.int32))


class Grouped(NamedTuple):
    """A matrix in codes, its inputs in the order in which groups take them."""

    codes: Ints  # [out, in], of the inputs in their own order
    zeros: Ints  # [out, groups]
    scales: Tensor  # [out, groups]
    index: Ints  # [in] the group of each input

    @property
    def weight(self) -> Tensor:
        """[out, in] float32"""
        zeros = self.zeros[:, self.index]
        steps = torch.from_numpy((self.codes - zeros).astype(np.float32))
        return steps * self.scales.float()[:, torch.from_numpy(self.index)]


def grouped(
    weight: Tensor,
    bits: int,
    group: int,
    *,
    is_symmetric: bool,
    scale_type: torch.dtype = torch.float16,
    shuffle: bool = False,
) -> Grouped:
    size = weight.shape[1]
    group = group if group > 0 else size
    index = np.arange(size) // group
    if shuffle:
        index = np.random.default_rng(size).permutation(index)
    num_groups = -(-size // group)
    most = 2**bits - 1
    scales = torch.empty(len(weight), num_groups)
    zeros = np.full((len(weight), num_groups), (most + 1) // 2)
    for number in range(num_groups):
        part = weight[:, torch.from_numpy(index == number)]
        low = part.amin(1).clamp(max=0)
        high = part.amax(1).clamp(min=0)
        if is_symmetric:
            scales[:, number] = part.abs().amax(1) * 2 / most
            continue
        scales[:, number] = (high - low) / most
        # From 1 on, for GPTQ stores one less.
        zeros[:, number] = (-low / scales[:, number]).round().clamp(1, most).numpy()
    kept = scales.to(scale_type)
    steps = weight / kept.float()[:, torch.from_numpy(index)]
    codes = steps.round().long().numpy() + zeros[:, index]
    return Grouped(codes.clip(0, most), zeros, kept, index)


def gptq(
    bits: int = 4,
    group: int = 32,
    *,
    sym: bool = True,
    v2: bool = False,
    stored_shift: int | None = None,
    act_order: bool = False,
) -> Format:
    """`stored_shift`: what is taken off the zero points before they are stored, where that is not
    what the format says."""
    shift = stored_shift if stored_shift is not None else int(not v2)

    def pack(weight: Tensor) -> Packed:
        found = grouped(weight, bits, group, is_symmetric=sym, shuffle=act_order)
        tensors = {
            "qweight": words(found.codes, bits).t().contiguous(),
            "qzeros": words(found.zeros.T - shift, bits),
            "scales": found.scales.t().contiguous(),
            "g_idx": torch.from_numpy(found.index.astype(np.int32)),
            "bias": torch.zeros(len(weight), dtype=torch.float16),
        }
        return tensors, found.weight

    described = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": sym,
        "desc_act": act_order,
        "checkpoint_format": "gptq_v2" if v2 else "gptq",
    }
    return Format(described, pack)


def awq(group: int = 32) -> Format:
    def pack(weight: Tensor) -> Packed:
        found = grouped(weight, 4, group, is_symmetric=False)
        tensors = {
            "qweight": words(found.codes.T, 4, AWQ_COLUMNS),
            "qzeros": words(found.zeros.T, 4, AWQ_COLUMNS),
            "scales": found.scales.t().contiguous(),
        }
        return tensors, found.weight

    described = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "version": "gemm",
        "zero_point": True,
    }
    return Format(described, pack)


def compressed(format: str, **group: Any) -> dict[str, Any]:
    """The `quantization_config` of compressed-tensors with a group of matrices."""
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": group}},
    }


def pack_quantized(
    bits: int = 4,
    group: int = 32,
    *,
    symmetric: bool = True,
    act_order: bool = False,
    plain_zeros: bool = False,
) -> Format:
    """`plain_zeros`: zero points as whole bytes, as older versions have them."""
    middle = 2 ** (bits - 1)

    def pack(weight: Tensor) -> Packed:
        found = grouped(
            weight,
            bits,
            group,
            is_symmetric=symmetric,
            scale_type=torch.bfloat16,
            shuffle=act_order,
        )
        tensors = {
            "weight_packed": words(found.codes, bits),
            "weight_scale": found.scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric and plain_zeros:
            tensors["weight_zero_point"] = torch.from_numpy((found.zeros - middle).astype(np.int8))
        elif not symmetric:
            tensors["weight_zero_point"] = words(found.zeros.T, bits).t().contiguous()
        if act_order:
            tensors["weight_g_idx"] = torch.from_numpy(found.index.astype(np.int32))
        return tensors, found.weight

    strategy = "group" if group > 0 else "channel"
    described = compressed(
        "pack-quantized",
        type="int",
        num_bits=bits,
        strategy=strategy,
        group_size=group if group > 0 else None,
        symmetric=symmetric,
        actorder="group" if act_order else None,
    )
    return Format(described, pack)


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e2m1(steps: Tensor) -> Ints:
    """The codes [out, in] of the nearest values."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)])
    return (steps[..., None] - table).abs().argmin(-1).numpy()


def values_of(codes: Ints) -> Tensor:
    return torch.tensor([*E2M1, *(-value for value in E2M1)])[torch.from_numpy(codes)]


def pairs(codes: Ints, *, high_first: bool = False) -> Tensor:
    """Two codes a byte, the first in the low bits."""
    first, second = (
        (codes[:, 1::2], codes[:, ::2]) if high_first else (codes[:, ::2], codes[:, 1::2])
    )
    return torch.from_numpy((first | second << 4).astype(np.uint8))


def spread(scales: Tensor, group: int) -> Tensor:
    return scales.repeat_interleave(group, dim=1)


def mxfp4() -> Format:
    def pack(weight: Tensor) -> Packed:
        peaks = weight.view(len(weight), -1, 32).abs().amax(2)
        exponents = (peaks / 6).log2().ceil().int()
        scales = torch.exp2(exponents.float())
        codes = e2m1(weight / spread(scales, 32))
        tensors = {"weight_packed": pairs(codes), "weight_scale": (exponents + 127).to(torch.uint8)}
        return tensors, values_of(codes) * spread(scales, 32)

    return Format(compressed("mxfp4-pack-quantized", type="float", num_bits=4, group_size=32), pack)


def nvfp4(*, modelopt: bool = False) -> Format:
    def pack(weight: Tensor) -> Packed:
        peaks = weight.view(len(weight), -1, 16).abs().amax(2)
        factor = 448 * 6 / weight.abs().max()
        if modelopt:
            factor = 1 / factor
        fine = (peaks / 6 / factor if modelopt else peaks / 6 * factor).to(torch.float8_e4m3fn)
        scales = fine.float() * factor if modelopt else fine.float() / factor
        codes = e2m1(weight / spread(scales, 16))
        tensors = {"weight_scale": fine, "input_global_scale": torch.ones(1)}
        if modelopt:
            tensors |= {"weight": pairs(codes), "weight_scale_2": factor}
        else:
            tensors |= {"weight_packed": pairs(codes), "weight_global_scale": factor[None]}
        return tensors, values_of(codes) * spread(scales, 16)

    if modelopt:
        return Format({"quant_method": "modelopt", "quant_algo": "NVFP4"}, pack)
    return Format(compressed("nvfp4-pack-quantized", type="float", num_bits=4, group_size=16), pack)


def bitsandbytes(*, nested: bool = False) -> Format:
    def pack(weight: Tensor) -> Packed:
        generator = torch.Generator().manual_seed(0)
        table = torch.linspace(-1, 1, 16) ** 3
        blocks = weight.reshape(-1, 64)
        scales = blocks.abs().amax(1)
        tensors = {"weight.quant_map": table, "weight.absmax": scales}
        described = {"quant_type": "nf4", "blocksize": 64, "shape": list(weight.shape)}
        if nested:
            places = torch.randint(0, 256, scales.shape, generator=generator).to(torch.uint8)
            fine = torch.rand(256, generator=generator)
            coarse = torch.rand(-(-len(scales) // 256), generator=generator) / 50
            scales = fine[places.long()] * coarse.repeat_interleave(256)[: len(scales)] + 0.01
            tensors |= {
                "weight.absmax": places,
                "weight.nested_quant_map": fine,
                "weight.nested_absmax": coarse,
            }
            described |= {"nested_blocksize": 256, "nested_offset": 0.01}
        codes = ((blocks / scales[:, None])[..., None] - table).abs().argmin(-1).numpy()
        tensors["weight"] = pairs(codes.reshape(1, -1), high_first=True).view(-1, 1)
        state = json.dumps(described).encode()
        tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(
            list(state), dtype=torch.uint8
        )
        stands_for = table[torch.from_numpy(codes)] * scales[:, None]
        return tensors, stands_for.view(weight.shape)

    described = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return Format(described, pack)


FORMATS: dict[str, Format] = {
    "gptq": gptq(),
    "gptq, group 64": gptq(group=64),
    "gptq, group 128": gptq(group=128),
    "gptq, one group": gptq(group=-1),
    "gptq, asymmetric": gptq(sym=False),
    "gptq, 8 bits": gptq(8),
    "gptq, 8 bits, asymmetric": gptq(8, 128, sym=False),
    "gptq_v2": gptq(v2=True),
    "gptq_v2, asymmetric": gptq(sym=False, v2=True),
    "gptq_v2 that is called gptq": gptq(stored_shift=0),
    "gptq, inputs in another order": gptq(act_order=True),
    "gptq, asymmetric, inputs in another order": gptq(group=64, sym=False, act_order=True),
    "awq": awq(),
    "awq, group 128": awq(128),
    "pack-quantized": pack_quantized(),
    "pack-quantized, by output": pack_quantized(group=-1),
    "pack-quantized, asymmetric": pack_quantized(group=128, symmetric=False),
    "pack-quantized, zero points of whole bytes": pack_quantized(symmetric=False, plain_zeros=True),
    "pack-quantized, inputs in another order": pack_quantized(act_order=True),
    "pack-quantized, 8 bits": pack_quantized(8),
    "pack-quantized, 8 bits, asymmetric": pack_quantized(8, symmetric=False),
    "mxfp4": mxfp4(),
    "nvfp4": nvfp4(),
    "nvfp4 of modelopt": nvfp4(modelopt=True),
    "nf4": bitsandbytes(),
    "nf4, scales in eight bits": bitsandbytes(nested=True),
}


class PackedCheckpoint:
    """A tiny checkpoint in one of the formats, and the model in transformers with the weights that
    it stands for."""

    def __init__(self, format: Format, folder: Path, *, left_out: str = "layers.1.mlp") -> None:
        """`left_out`: in the names of matrices that stay floats, as some do in the files that
        people have."""
        self.folder = folder
        torch.manual_seed(11)
        config = transformers.Qwen3Config(**{**TINY, **SIZES}, attn_implementation="eager")
        self.model = transformers.Qwen3ForCausalLM(config).eval()
        self.model.save_pretrained(folder)
        self.tensors: dict[str, Tensor] = {}
        self.stands_for: dict[str, Tensor] = {}
        self.coded: list[str] = []
        for name, weight in load_file(folder / "model.safetensors").items():
            if not name.endswith("_proj.weight") or left_out in name:
                self.tensors[name] = self.stands_for[name] = weight
                continue
            self.coded.append(name)
            tensors, self.stands_for[name] = format.pack(weight)
            for ending, tensor in tensors.items():
                self.tensors[f"{name.removesuffix('.weight')}.{ending}"] = tensor
        self.model.load_state_dict(self.stands_for)
        self.save()
        self.describe(**format.described)

    def save(self) -> None:
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, self.folder / "model.safetensors")

    def describe(self, **quantization: Any) -> None:
        """Write this into its `config.json`."""
        file = self.folder / "config.json"
        written = json.loads(file.read_text())
        written["quantization_config"] = {**written.get("quantization_config", {}), **quantization}
        file.write_text(json.dumps(written))

    def logprobs(self) -> Tensor:
        with torch.inference_mode():
            return self.model(torch.tensor([TOKENS])).logits[0, -1].log_softmax(-1)
