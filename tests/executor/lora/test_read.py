from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.executor.lora.adapters import ALL, ENDS, QV, Base, load, make_adapter, write_adapter
from weft.config.projections import adapter_bytes
from weft.executor.lora.kinds.kind import AdapterError
from weft.executor.lora.pairs import read_adapter
from weft.executor.lora.read import inspect_adapter

PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"
TABLE = "base_model.model.model.embed_tokens"
HEAD = "base_model.model.lm_head"
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none"}


def tensors_of(rank: int = 2, prefix: str = PREFIX, size: int = 48) -> dict[str, Tensor]:
    return {
        f"{prefix}.lora_A.weight": torch.ones(rank, 48),
        f"{prefix}.lora_B.weight": torch.ones(size, rank),
    }


def table_of(num_rows: int, size: int = 48) -> dict[str, Tensor]:
    return {
        f"{TABLE}.lora_embedding_A": torch.ones(2, num_rows),
        f"{TABLE}.lora_embedding_B": torch.ones(size, 2),
    }


def refusal(base: Base, folder: Path, **settings: Any) -> str:
    """Why the adapter in a folder is refused: the same when it is looked at and when it is read."""
    with pytest.raises(AdapterError) as looked:
        inspect_adapter(folder, base.config, **settings)
    with pytest.raises(AdapterError) as read:
        read_adapter(folder, base.config, torch.float32, **settings)
    assert str(looked.value) == str(read.value)
    message = str(looked.value)
    assert "\n" not in message
    assert str(folder) not in message
    assert len(message) < 800
    return message


def test_an_adapter_is_known_by_the_digest_of_its_files(base, tmp_path: Path) -> None:
    made = make_adapter(base, tmp_path / "one", base.modules(QV), ranks={"q_proj": 12})
    info = inspect_adapter(made.folder, base.config)
    config = (made.folder / "adapter_config.json").read_bytes()
    content = (made.folder / "adapter_model.safetensors").read_bytes()
    assert info.uid == hashlib.sha256(config + content).hexdigest()[:32]
    assert info.rank == 12
    assert info.targets == ("q_proj", "v_proj")
    # Of three layers: q 48 x 48 of rank 12, v 16 x 48 of rank 8.
    assert info.num_bytes == 4 * 3 * (12 * (48 + 48) + 8 * (48 + 16))
    assert read_adapter(made.folder, base.config, torch.float32).info == info


def test_scales_follow_ranks_alphas_and_patterns(base, tmp_path: Path) -> None:
    for name, config, expected in (
        ("plain", {"lora_alpha": 16}, (2.0, 2.0)),
        ("rslora", {"lora_alpha": 4, "use_rslora": True}, (4 / 8**0.5, 4 / 8**0.5)),
        ("pattern", {"alpha_pattern": {"layers.0.self_attn.q_proj": 8}}, (1.0, 2.0)),
        ("first", {"alpha_pattern": {"q_proj": 8, r"layers\.\d\.self_attn\.q_proj": 1}}, (1, 2)),
        ("part", {"alpha_pattern": {"proj": 8}}, (2.0, 2.0)),
        ("whole", {"alpha_pattern": {"^model.layers.0.self_attn.q_proj": 24}}, (3.0, 2.0)),
    ):
        made = make_adapter(base, tmp_path / name, base.modules(QV, [0]))
        path = made.folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
        pairs = read_adapter(made.folder, base.config, torch.float32).pairs
        found = (
            pairs["layers.0.self_attn.q_proj"].scale,
            pairs["layers.0.self_attn.v_proj"].scale,
        )
        assert found == pytest.approx(expected), name


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "LOHA"}, "peft_type is LOHA; only LORA is supported"),
        ({"use_dora": True}, "use_dora is True, but the adapter has no model.layers.0.self_attn.q"),
        ({"use_qalora": True}, "QA-LoRA is not supported"),
        ({"use_bdlora": {"nblocks": 2}}, "BD-LoRA is not supported"),
        ({"bias": "some"}, "bias is some; none, all, lora_only are supported"),
        ({"alora_invocation_tokens": [5]}, "activated LoRA is not supported"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "replicated layers is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save names lm_head, but the adapter has no"),
        ({"modules_to_save": "lm_head"}, "modules_to_save is lm_head; names of modules are"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is set, but the adapter has"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is pissa, which also changes"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights is pissa_niter_16"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is olora"),
        ({"init_lora_weights": "corda"}, "init_lora_weights is corda"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights is loftq"),
        ({"init_lora_weights": ["x"]}, "init_lora_weights is ['x']"),
        ({"use_magic": True}, "use_magic is set; weft does not know this key"),
        ({"magic_config": {"x": 1}}, "magic_config is set; weft does not know this key"),
        ({"r": 0}, "is 0; a whole number above 0 is expected"),
        ({"r": "8"}, "is 8; a whole number above 0 is expected"),
        ({"r": 3}, "lora_A.weight is [2, 48] instead of [3, 48]"),
        ({"r": 65}, "is 65; at most 64 is allowed (--max-lora-rank)"),
        ({"lora_alpha": None}, "is None; a number below 1,000,000 is expected"),
        ({"lora_alpha": float("nan")}, "is nan; a number below 1,000,000 is expected"),
        ({"rank_pattern": [1]}, "rank_pattern is not an object"),
        ({"rank_pattern": {"(": 1}}, "rank_pattern: '(?:.*"),
        ({"rank_pattern": {"(?=q)q_proj": 1}}, "rank_pattern: look-around cannot be used here"),
        ({"alpha_pattern": {"(a{999}){99}": 1}}, "they have more than 20,000 transitions"),
        ({"alpha_pattern": {"a" * 301: 1}}, "at most 300 characters"),
        ({"layers_to_transform": [1, 2]}, "is not in layers_to_transform"),
        (
            {"layers_to_transform": "all"},
            "layers_to_transform is all; numbers of layers are expected",
        ),
    ],
)
def test_settings_that_mean_another_formula_are_refused_by_name(
    base, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    write_adapter(tmp_path, tensors_of(), CONFIG)
    inspect_adapter(tmp_path, base.config, max_rank=64)
    write_adapter(tmp_path, tensors_of(), {**CONFIG, **changes})
    assert said in refusal(base, tmp_path, max_rank=64)


def test_one_pair_for_embedding_and_head_is_refused(base, tmp_path: Path) -> None:
    tied = {**CONFIG, "ensure_weight_tying": True}
    write_adapter(tmp_path, tensors_of(), tied)
    inspect_adapter(tmp_path, base.config)
    write_adapter(tmp_path, table_of(131), tied)
    assert "ensure_weight_tying is set" in refusal(base, tmp_path)


def test_copies_of_the_weights_of_embedding_and_head_are_passed_over(base, tmp_path: Path) -> None:
    tensors = table_of(131) | tensors_of(prefix=HEAD, size=131)
    own = {f"{name}.base_layer.weight": torch.ones(131, 48) for name in (TABLE, HEAD)}
    write_adapter(tmp_path, tensors | own, CONFIG)
    info = inspect_adapter(tmp_path, base.config)
    assert info.targets == ("embed_tokens", "lm_head")
    assert info.num_bytes == 4 * 2 * 2 * (48 + 131)


def test_settings_that_change_nothing_are_read(base, tmp_path: Path) -> None:
    harmless = {
        "init_lora_weights": "gaussian",
        "loftq_config": {"bits": 4},
        "target_modules": "all-linear",
        "layers_to_transform": 0,
        "modules_to_save": None,
        "lora_dropout": 0.1,
        "fan_in_fan_out": False,
        "use_dora": False,
    }
    write_adapter(tmp_path, tensors_of(), {**CONFIG, **harmless})
    assert inspect_adapter(tmp_path, base.config).targets == ("q_proj",)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({}, "the adapter has no tensors"),
        (tensors_of(prefix=HEAD), "lm_head.lora_B.weight is [48, 2] instead of [131, 2]"),
        (tensors_of(prefix=TABLE), "the adapter has no model.embed_tokens.lora_embedding_A"),
        (table_of(131, size=47), "lora_embedding_B is [47, 2] instead of [48, 2]"),
        (table_of(132), "lora_embedding_A is [2, 132] instead of [2, 131]"),
        (table_of(131) | {f"{TABLE}.base_layer.weight": torch.ones(140, 48)}, "[140, 48] instead"),
        (
            tensors_of() | {f"{PREFIX}.base_layer.weight": torch.ones(48, 48)},
            "q_proj.base_layer.weight, which are weights of the model",
        ),
        (tensors_of() | {f"{HEAD}.weight": torch.ones(130, 48)}, "is [130, 48] instead of [131, 4"),
        (
            tensors_of() | {"base_model.model.score.weight": torch.ones(2, 48)},
            "the adapter replaces score; in this model it can replace down_proj, embed_tokens",
        ),
        (
            tensors_of() | {"base_model.model.model.norm.weight": torch.ones(48)},
            "the adapter replaces model.norm; in this model it can replace down_proj, embed_tokens",
        ),
        (
            tensors_of() | {"base_model.model.model.norm.bias": torch.ones(48)},
            "the adapter changes model.norm, which adapters cannot do",
        ),
        (tensors_of() | {f"{PREFIX}.bias": torch.ones(47)}, "q_proj.bias is [47] instead of [48]"),
        (
            tensors_of()
            | {f"{name}.bias": torch.ones(48) for name in (PREFIX, f"{PREFIX}.base_layer")},
            "q_proj.base_layer.bias and base_model.model.model.layers.0.self_attn.q_proj.bias",
        ),
        (tensors_of() | {f"{PREFIX}.weight": torch.ones(48, 48)}, "q_proj.lora_A.weight beside"),
        (tensors_of(prefix=PREFIX.replace("0", "3")), "the adapter changes model.layers.3.self_"),
        (
            tensors_of(prefix=PREFIX.replace("q_proj", "w_proj")),
            "down_proj, embed_tokens, gate_proj, k_proj",
        ),
        (
            tensors_of(prefix=PREFIX.removeprefix("base_model.")),
            "only these tensors are supported: base_model.mod",
        ),
        (tensors_of(size=47), "lora_B.weight is [47, 2] instead of [48, 2]"),
        ({f"{PREFIX}.lora_A.weight": torch.ones(2, 48)}, "q_proj.lora_B.weight"),
        (
            {**tensors_of(), f"{PREFIX}.lora_magnitude_vector": torch.ones(48)},
            "use_dora is False, but the adapter has a model.layers.0.self_attn.q_proj.lora_magni",
        ),
        ({**tensors_of(), f"{PREFIX}.lora_B.bias": torch.ones(47)}, "lora_B.bias is [47] instead"),
        (
            {f"{PREFIX}.lora_C.weight": torch.ones(48)},
            "replaces model.layers.0.self_attn.q_proj.lo",
        ),
        ({f"{PREFIX}.lora_C": torch.ones(48)}, "only these tensors are supported"),
        (
            tensors_of() | tensors_of(prefix=PREFIX.replace("model.layers", "layers", 1)),
            "the adapter has layers.0.self_attn.q_proj twice",
        ),
        (
            {name: value.to(torch.int32) for name, value in tensors_of().items()},
            "is I32; supported are F32, F16, BF16",
        ),
    ],
)
def test_tensors_that_fit_no_module_are_refused(
    base, tmp_path: Path, tensors: dict[str, Tensor], said: str
) -> None:
    write_adapter(tmp_path, tensors, CONFIG)
    assert said in refusal(base, tmp_path)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("side", ["A", "B"])
def test_values_that_are_not_finite_are_refused(
    base, tmp_path: Path, value: float, side: str
) -> None:
    tensors = tensors_of()
    tensors[f"{PREFIX}.lora_{side}.weight"][1, 1] = value
    write_adapter(tmp_path, tensors, CONFIG)
    with pytest.raises(AdapterError, match="has values that are not finite"):
        read_adapter(tmp_path, base.config, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("side", "value", "alpha"),
    [("A", 3e38, 4), ("B", 3e38, 4), ("A", 1e36, 4), ("B", 1e34, 4), ("B", 1e30, 999_999)],
)
def test_values_whose_products_leave_the_range_of_the_dtype_are_refused(
    base, tmp_path: Path, side: str, value: float, alpha: int, dtype: torch.dtype
) -> None:
    tensors = tensors_of()
    tensors[f"{PREFIX}.lora_{side}.weight"][1, 1] = value
    if side == "A":
        tensors[f"{PREFIX}.lora_B.weight"] *= 0  # times what is not finite, zeros are no numbers
    write_adapter(tmp_path, tensors, {**CONFIG, "lora_alpha": alpha})
    with pytest.raises(AdapterError, match=r"too large for|values that are not finite"):
        read_adapter(tmp_path, base.config, dtype)


def test_the_range_is_that_of_the_served_dtype(base, tmp_path: Path) -> None:
    tensors = tensors_of()
    tensors[f"{PREFIX}.lora_B.weight"][1, 1] = 60_000
    write_adapter(tmp_path, tensors, CONFIG)
    read_adapter(tmp_path, base.config, torch.float32)
    read_adapter(tmp_path, base.config, torch.bfloat16)
    with pytest.raises(AdapterError, match=r"too large for float16: with scale 2, they make 5.76e"):
        read_adapter(tmp_path, base.config, torch.float16)


def cut_at(num: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / "adapter_model.safetensors", num)


def lying_header(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes((1 << 40).to_bytes(8, "little") + path.read_bytes()[8:])


def huge_tensors(folder: Path) -> None:
    os.truncate(folder / "adapter_model.safetensors", 1 << 33)  # a hole, which takes no room


def huge_config(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(" " * (1 << 20) + "{}")


def only_pickle(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps({}))


def fifo(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    os.mkfifo(folder / "adapter_model.safetensors")


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def config_of(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "adapter_config.json").write_text(text)


def added(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "added_tokens.json").write_text(text)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut_at(0), "0 bytes without a header"),
        (cut_at(7), "7 bytes without a header"),
        (cut_at(100), "damaged"),
        (cut_at(400), "damaged"),
        (lying_header, "its header has 1,099,511,627,776 bytes"),
        (huge_tensors, "has 8,589,934,592 bytes; an adapter of this model"),
        (huge_config, "adapter_config.json has 1,048,578 bytes; at most 1,048,576 are read"),
        (only_pickle, "a pickle file, which weft never reads"),
        (fifo, "is not a regular file"),
        (remove("adapter_model.safetensors"), "there is no adapter_model.safetensors"),
        (remove("adapter_config.json"), "there is no adapter_config.json"),
        (config_of(""), "adapter_config.json is not JSON"),
        (config_of("[" * 100_000), "adapter_config.json is not JSON"),
        (config_of("[]"), "adapter_config.json is not a JSON object"),
        (added('{"<new>": 131}'), "gives '<new>' the id 131; the model has 0 to 130"),
        (added('{"<new>": "x"}'), "gives '<new>' the id x"),
    ],
)
def test_files_that_are_damaged_or_lie_are_refused(
    base, tmp_path: Path, damage: Callable[[Path], object], said: str
) -> None:
    write_adapter(tmp_path, tensors_of(), CONFIG)
    (tmp_path / "added_tokens.json").write_text('{"<pad>": 0}')
    inspect_adapter(tmp_path, base.config)
    damage(tmp_path)
    assert said in refusal(base, tmp_path)


def test_memory_of_adapters_is_what_kernels_keep(base, drive, tmp_path: Path) -> None:
    driver = drive(base, kernels="auto")
    made = make_adapter(base, tmp_path / "all", [*base.modules(ALL), *ENDS], rank=10)
    assert load(driver, base, 0, made.folder).ok
    kept = 0
    (adapting,) = driver.runner.passes
    ops = adapting._table._ops
    for table in ops._tables.values():
        rows = table._kept[0]
        kept += rows.a.nbytes + rows.b.nbytes
    for piece in ops._pieces.values():
        for part in piece._kept[0]:
            kept += part.a.nbytes + part.b.nbytes
    assert kept == adapter_bytes(base.config, 10)
