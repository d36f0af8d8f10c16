"""DoRA, biases, whole matrices and rows of tokens: what they change beside merged weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.executor.driver import Turn
from tests.executor.lora.adapters import (
    ALL,
    ENDS,
    FUSED,
    QV,
    TABLE,
    Base,
    Made,
    load,
    logprobs_with,
    make_adapter,
    merged_logprobs,
)
from weft.config.projections import adapter_bytes
from weft.executor.lora.changes import added
from weft.executor.lora.kinds.kind import AdapterError
from weft.executor.lora.pairs import LoraPair
from weft.executor.lora.read import inspect_adapter
from weft.ops.lora import LoraPart
from weft.ops.plain import PlainMatrix
from weft.ops.protocol import Divided, Shard
from weft.ops.sharding import ShardedMatrix

TOKENS = [(7 * number + 3) % 120 + 5 for number in range(23)]
PREFIX = "base_model.model."
Change = Callable[[Base, Made, dict[str, Tensor], dict[str, Any]], None]


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def changed(base: Base, made: Made, change: Change) -> Made:
    """The adapter with what `change` makes of its deltas, its tensors and its settings."""
    file = made.folder / "adapter_model.safetensors"
    settings = made.folder / "adapter_config.json"
    tensors = load_file(file)
    config = json.loads(settings.read_text())
    change(base, made, tensors, config)
    save_file(tensors, file)
    settings.write_text(json.dumps(config))
    return made


def weight_of(base: Base, module: str) -> Tensor:
    weights = base.model.state_dict()
    return weights[f"{module}.weight"]


def with_lengths(base: Base, made: Made, tensors: dict[str, Tensor], config: Any) -> None:
    config["use_dora"] = True
    for seed, (module, delta) in enumerate(made.deltas.items()):
        changed_weight = weight_of(base, module) + delta
        dim = 0 if module == TABLE else 1
        norm = changed_weight.norm(dim=dim)
        length = norm * (1 + 0.3 * random(len(norm), seed=seed))
        tensors[f"{PREFIX}{module}.lora_magnitude_vector"] = length
        gain = (length / norm).unsqueeze(dim)
        made.deltas[module] = gain * changed_weight - weight_of(base, module)


def with_biases(base: Base, made: Made, tensors: dict[str, Tensor], config: Any) -> None:
    """Of all linears of two layers, of which the last has no pairs."""
    config["bias"] = "all"
    weights = base.model.state_dict()
    for module in base.modules(ALL, layers=[0, 2]):
        bias = weights[f"{module}.bias"]
        new = bias + random(len(bias))
        middle = ".base_layer" if module in made.deltas else ""
        tensors[f"{PREFIX}{module}{middle}.bias"] = new
        made.deltas[f"{module}.bias"] = new - bias


def with_shifts(base: Base, made: Made, tensors: dict[str, Tensor], config: Any) -> None:
    config["lora_bias"] = True
    for module in list(made.deltas):
        shift = random(len(weight_of(base, module)))
        tensors[f"{PREFIX}{module}.lora_B.bias"] = shift
        made.deltas[f"{module}.bias"] = 2 * shift  # alpha / rank


def with_whole(*modules: str) -> Change:
    def change(base: Base, made: Made, tensors: dict[str, Tensor], config: Any) -> None:
        config["modules_to_save"] = [module.rpartition(".")[2] for module in modules]
        for seed, module in enumerate(modules):
            delta = 0.2 * random(*weight_of(base, module).shape, seed=seed)
            tensors[f"{PREFIX}{module}.weight"] = weight_of(base, module) + delta
            made.deltas[module] = delta

    return change


def with_tokens(base: Base, made: Made, tensors: dict[str, Tensor], config: Any) -> None:
    ids = [17, 130, 3, 24, 52]
    config["trainable_token_indices"] = ids
    delta = torch.zeros_like(weight_of(base, TABLE))
    delta[ids] = random(len(ids), 48)
    rows = weight_of(base, TABLE)[ids] + delta[ids]
    tensors[f"{PREFIX}{TABLE}.token_adapter.trainable_tokens_delta"] = rows
    made.deltas[TABLE] = delta
    if base.model.config.tie_word_embeddings:
        made.deltas["lm_head"] = delta


def with_tokens_of_both(base: Base, made: Made, tensors: dict[str, Tensor], config: Any) -> None:
    config["trainable_token_indices"] = {"embed_tokens": [17, 3], "lm_head": [8]}
    for module, ids in (("model.embed_tokens", [17, 3]), ("lm_head", [8])):
        delta = torch.zeros_like(weight_of(base, module))
        delta[ids] = random(len(ids), 48)
        rows = weight_of(base, module)[ids] + delta[ids]
        tensors[f"{PREFIX}{module}.token_adapter.trainable_tokens_delta"] = rows
        made.deltas[module] = delta


# name -> family, modules with a pair, what else, modules that may be replaced
KINDS: dict[str, tuple[str, tuple[str, ...], Change, str]] = {
    "dora": ("llama", ALL, with_lengths, ""),
    "dora of fused matrices": ("phi3", FUSED, with_lengths, ""),
    "dora of ends": ("qwen3", (*QV, *ENDS), with_lengths, ""),
    "dora of a scaled embedding": ("gemma2", (*QV, TABLE), with_lengths, ""),
    "biases": ("llama", ("self_attn.q_proj", "mlp.down_proj"), with_biases, ""),
    "biases of B": ("llama", ALL, with_shifts, ""),
    "whole ends": ("llama", QV, with_whole(*ENDS), "embed_tokens, lm_head"),
    "whole head that is tied": ("qwen3", QV, with_whole("lm_head"), "lm_head"),
    "whole linear": (
        "llama",
        QV,
        with_whole("model.layers.1.mlp.down_proj", "model.layers.0.self_attn.k_proj"),
        "down_proj,k_proj",
    ),
    "tokens": ("llama", QV, with_tokens, ""),
    "tokens of a tied head": ("qwen3", QV, with_tokens, ""),
    "tokens of both": ("llama", QV, with_tokens_of_both, ""),
}


def make(base: Base, folder: Path, kind: str) -> Made:
    _, endings, change, _ = KINDS[kind]
    modules = [name for name in endings if name in ENDS]
    modules += base.modules([name for name in endings if name not in ENDS], layers=[0, 1])
    return changed(base, make_adapter(base, folder, modules), change)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_changed_weights_beside_other_adapters(
    base_of, drive, tmp_path: Path, kernels: str, kind: str
) -> None:
    family, _, _, full = KINDS[kind]
    base = base_of(family)
    made = make(base, tmp_path / "one", kind)
    other = make_adapter(base, tmp_path / "other", ENDS, seed=3)
    driver = drive(base, num_adapter_slots=2, max_rank=8, kernels=kernels, lora_full_modules=full)
    for slot, each in enumerate((other, made)):
        uid = inspect_adapter(each.folder, base.config, max_rank=8, full_modules=full).uid
        reply = load(driver, base, slot, each.folder, uid)
        assert reply.ok, reply.message
    expected = [
        merged_logprobs(base, each, TOKENS) for each in (other, made, made._replace(deltas={}))
    ]
    assert (expected[1] - expected[2]).abs().max() > 0.05
    # A chunk, another one, then token by token.
    for begin, end in ((0, 9), (9, 20), (20, 21), (21, 22), (22, 23)):
        turns = [Turn(row, TOKENS[begin:end]) for row in range(3)]
        found = logprobs_with(driver, [0, 1, -1], *turns)
        for row, of_row in enumerate(expected):
            torch.testing.assert_close(found[row], of_row[end - 1], atol=2e-4, rtol=0)
    # In the slot of the former adapter, nothing of it is left.
    uid = inspect_adapter(other.folder, base.config).uid
    assert load(driver, base, 1, other.folder, uid).ok
    found = logprobs_with(driver, [1], Turn(3, TOKENS))
    torch.testing.assert_close(found[0], expected[0][-1], atol=2e-4, rtol=0)


def refused(base: Base, folder: Path, **settings: Any) -> str:
    with pytest.raises(AdapterError) as found:
        inspect_adapter(folder, base.config, **settings)
    return str(found.value)


def test_a_whole_matrix_takes_the_rank_of_its_smaller_side(base, tmp_path: Path) -> None:
    made = make(base, tmp_path / "one", "whole ends")
    assert refused(base, made.folder, max_rank=40) == (
        "the adapter replaces lm_head, which takes a rank of 48; at most 40 is allowed "
        "(--lora-full-modules, --max-lora-rank)"
    )
    assert inspect_adapter(made.folder, base.config, max_rank=48).rank == 48
    inspect_adapter(made.folder, base.config, max_rank=8, full_modules="lm_head,embed_tokens")
    more = adapter_bytes(base.config, 8, full_modules="lm_head") - adapter_bytes(base.config, 8)
    # Inputs are padded to 64, outputs to 160, ranks to 16 and 48; in float32.
    assert more == 4 * (64 + 160) * (48 - 16)


@pytest.mark.parametrize(
    ("indices", "said"),
    [
        ([1, 1, 2, 3, 4], "has a token twice"),
        ([1, 2, 3, 4, 131], "has 131; 0 to 130 are allowed"),
        ([1, 2, 3, 4, True], "has True; 0 to 130 are allowed"),
        ([1, 2, 3, 4], "trainable_tokens_delta is [5, 48] instead of [4, 48]"),
        ({"lm_head": [1]}, "names no tokens of model.embed_tokens"),
        ("all", "names no tokens of model.embed_tokens"),
    ],
)
def test_tokens_that_fit_no_rows_are_refused(
    base, tmp_path: Path, indices: object, said: str
) -> None:
    made = make(base, tmp_path / "one", "tokens")
    path = made.folder / "adapter_config.json"
    config = {**json.loads(path.read_text()), "trainable_token_indices": indices}
    path.write_text(json.dumps(config))
    assert said in refused(base, made.folder)


def test_more_tokens_than_ranks_are_refused(base, tmp_path: Path) -> None:
    made = make(base, tmp_path / "one", "tokens")
    tensors = load_file(made.folder / "adapter_model.safetensors")
    rows = {name: value for name, value in tensors.items() if "tokens" in name}
    save_file(rows, made.folder / "adapter_model.safetensors")
    assert "has 5 tokens of model.embed_tokens; at most 4" in refused(base, made.folder, max_rank=4)


def test_lengths_that_no_row_can_get_are_refused(base, drive, tmp_path: Path) -> None:
    made = make(base, tmp_path / "one", "dora")
    path = made.folder / "adapter_model.safetensors"
    tensors = load_file(path)
    name = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_magnitude_vector"
    tensors[name][3] = 1e9
    save_file(tensors, path)
    driver = drive(base, kernels="auto")
    reply = load(driver, base, 0, made.folder)
    assert not reply.ok
    assert "lora_magnitude_vector of layers.0.self_attn.q_proj makes rows" in reply.message


def test_a_bias_that_the_model_lacks_is_refused(base_of, drive, tmp_path: Path) -> None:
    base = base_of("qwen3")
    made = make_adapter(base, tmp_path / "one", base.modules(QV))
    path = made.folder / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors[f"{PREFIX}model.layers.0.self_attn.q_proj.base_layer.bias"] = torch.ones(72)
    save_file(tensors, path)
    driver = drive(base, kernels="auto")
    reply = load(driver, base, 0, made.folder)
    assert not reply.ok
    assert reply.message == (
        "the adapter has a bias of layers.0.self_attn.q_proj; the model has none"
    )


def sharded(divided: Divided, rank: int) -> ShardedMatrix:
    """One of two ranks that share a matrix of 6 outputs and 8 inputs."""
    local = PlainMatrix(8, (6,), False, torch.float32, torch.device("cpu"))
    return ShardedMatrix(local, 8, (6,), Shard(divided), rank=rank, num_ranks=2)


def test_ranks_take_gains_of_their_outputs_and_one_takes_the_shift() -> None:
    gain, shift = torch.arange(6.0), torch.arange(6.0)
    part = LoraPart(torch.ones(2, 8), torch.ones(6, 2), 1.0, gain, shift)
    for rank, rows in enumerate((slice(0, 3), slice(3, 6))):
        (of_outputs,) = sharded(Divided.OUTPUTS, rank).adapted([part])
        (of_inputs,) = sharded(Divided.INPUTS, rank).adapted([part])
        assert of_outputs is not None
        assert of_inputs is not None
        torch.testing.assert_close(of_outputs.gain, gain[rows])
        torch.testing.assert_close(of_outputs.shift, shift[rows])
        torch.testing.assert_close(of_inputs.gain, gain)
        assert (of_inputs.shift is None) == (rank == 1)


def test_what_other_ranks_have_reaches_no_term() -> None:
    weights = random(6, 8)
    pair = LoraPair(random(2, 8), random(6, 2), 0.5, length=1 + random(6).abs())

    def change(of: LoraPair, rows: Tensor) -> LoraPart:
        return added(
            "q_proj",
            of,
            lambda begin, end: rows[begin:end],
            None,
            num_rows=6,
            is_table=False,
            dtype=torch.float32,
        )

    outputs = weights.clone()
    outputs[3:] = torch.nan
    gain, shares = change(pair, weights).gain, change(pair, outputs).gain
    assert gain is not None
    assert shares is not None
    assert torch.equal(gain[:3], shares[:3])
    inputs = weights.clone()
    inputs[:, 4:] = torch.nan
    with pytest.raises(AdapterError, match="it is computed with --tp-size 1"):
        change(pair, inputs)
    new = LoraPair(random(6, 8, seed=9), None, 1.0)
    parts = [change(new, rows) for rows in (weights, inputs)]
    terms = [part.b @ part.a[:, :4] for part in parts]
    torch.testing.assert_close(terms[0], terms[1])
