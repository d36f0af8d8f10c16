"""GGUF files as models: weights under weft's names, and folders that describe them."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.caches import set_own_cache
from tests.executor.driver import Turn, make_driver
from tests.executor.gguf_files import (
    Stored,
    plain,
    random_blocks,
    write_gguf,
    write_split,
)
from tests.executor.gguf_models import (
    EXPERT_VARIANTS,
    LATENT_VARIANTS,
    STATE_VARIANTS,
    TEMPLATE,
    VARIANTS,
    described,
    gguf_name,
    hf_weights,
    loaded,
    metadata,
    stored,
    tensors_of,
    write_folder,
)
from weft.assemble.checkpoint import check_files, read_headers
from weft.assemble.model_folder import SOURCES, WEFT, model_folder, model_name
from weft.assemble.prepare import load_tokenizer, prepare
from weft.config import gguf
from weft.config.amounts import types
from weft.config.engine import EngineConfig
from weft.config.gguf import GgufModel
from weft.config.model import (
    BadCheckpoint,
    ModelConfig,
    ModelError,
    ModelNotFound,
    UnsupportedModel,
)
from weft.config.options import SettingsError
from weft.config.resolve import kept_as
from weft.models.layers.rope import inverse_frequencies
from weft.models.registry import make_model
from weft.ops.cpp.abi import WeightFormat
from weft.ops.cpp.library import Unavailable, load
from weft.ops.cpp.ops import CppOps
from weft.plan.device import GetWeight, ReleaseMemory, ResumeMemory, UpdateFromDisk
from weft.weights.gguf.blocks import BLOCKS
from weft.weights.gguf.codes import codes_of
from weft.weights.load import load_weights
from weft.weights.root import default_root


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    set_own_cache(tmp_path / "cache", monkeypatch)
    return tmp_path / "cache"


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_file_has_the_model_of_its_safetensors(tmp_path: Path, architecture: str) -> None:
    weights = hf_weights(architecture)
    file = write_gguf(tmp_path / "tiny.gguf", metadata(architecture), stored(weights, architecture))
    folder = described(file)
    check_files(folder)
    assert_same(loaded(folder), weights)
    ours = ModelConfig.from_folder(folder, "tiny")
    theirs = ModelConfig.from_folder(
        write_folder(tmp_path / "folder", weights, architecture), "tiny"
    )
    assert ours.bos_token_id == 256
    assert ours.eos_token_ids == theirs.eos_token_ids == (257,)
    for name in ("architecture", "head_dim", "norm_eps", "decoder", "dtype"):
        if name == "norm_eps":
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name))
        else:
            assert getattr(ours, name) == getattr(theirs, name), name


ALL_VARIANTS = [
    *((architecture, *variant) for architecture, variant in VARIANTS.items()),
    *((architecture, *variant) for architecture, variant in EXPERT_VARIANTS.items()),
    *((architecture, *variant) for architecture, variant in STATE_VARIANTS.items()),
    *LATENT_VARIANTS.values(),
]


@pytest.mark.parametrize(("architecture", "config", "keys"), ALL_VARIANTS)
def test_every_architecture_computes_what_its_safetensors_do(
    tmp_path: Path, architecture: str, config: dict[str, Any], keys: dict[str, Any]
) -> None:
    weights = hf_weights(architecture, **config)
    folder = write_folder(tmp_path / "folder", weights, architecture, **config)
    tensors = stored(weights, architecture)
    file = write_gguf(tmp_path / "tiny.gguf", metadata(architecture, **keys), tensors)
    tokens = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    logprobs = []
    for source in (folder, described(file)):
        driver = make_driver(ModelConfig.from_folder(source), source, kernels="torch")
        logprobs.append(driver.run(Turn(0, tokens))[0])
        driver.runner.close()
    torch.testing.assert_close(logprobs[0], logprobs[1], atol=2e-4, rtol=0)


def test_the_largest_gemma_scales_scores_by_its_hidden_size() -> None:
    found = {"num_hidden_layers": 62, "hidden_size": 5_376, "num_attention_heads": 32}
    model = GgufModel("a.gguf", metadata("gemma3"), {})
    keys = gguf._Keys(model)
    more = keys.architecture.more(keys, {**found, "head_dim": 128, "rope_parameters": {}})
    assert more["query_pre_attn_scalar"] == 168


def test_parts_and_folders_are_the_same_model(tmp_path: Path) -> None:
    weights = hf_weights()
    (tmp_path / "parts").mkdir()
    paths = write_split(tmp_path / "parts" / "tiny", metadata(), stored(weights), 3)
    assert paths[0].name == "tiny-00001-of-00003.gguf"
    for named in (paths[0], paths[2], tmp_path / "parts"):
        folder = described(named)
        assert folder.name == "tiny"
        assert len(list(folder.glob("*.gguf"))) == 3
        assert_same(loaded(folder), weights)
    paths[1].unlink()
    with pytest.raises(ModelNotFound, match="lacks 1 of the 3 files of tiny"):
        described(paths[0])


def test_parts_of_two_models_are_not_one(tmp_path: Path) -> None:
    weights = stored(hf_weights())
    first, second = write_split(tmp_path / "tiny", metadata(), weights, 2)
    folder = described(first)
    assert folder
    second.write_bytes(first.read_bytes())
    with pytest.raises(BadCheckpoint, match=r"is file 0 of its model, not 1"):
        check_files(folder)


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_widened_exactly(tmp_path: Path, kind: str) -> None:
    """Of q, too, whose rows are in another order in the file."""
    size = BLOCKS[kind].size
    shapes = {"embedding_length": size, "rope__dimension_count": size // 4}
    weights = hf_weights(hidden_size=size, head_dim=size // 4)
    tensors = stored(weights)
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors[gguf_name(name)] = random_blocks(kind, (size, size))
    other = "model.embed_tokens.weight"
    tensors[gguf_name(other)] = random_blocks(kind, (len(weights[other]), size), seed=1)
    found = loaded(described(write_gguf(tmp_path / "a.gguf", metadata(**shapes), tensors)))
    rows = widened(tensors[gguf_name(name)]).view(4, size // 8, 2, size)
    assert torch.equal(found[name], rows.transpose(1, 2).reshape(size, size))
    assert torch.equal(found[other], widened(tensors[gguf_name(other)]))


@pytest.mark.parametrize("kind", BLOCKS)
def test_the_kernels_keep_codes_as_they_are_stored(tmp_path: Path, kind: str) -> None:
    """Nothing is lost, and nothing is widened: q, k and v are of two types here."""
    try:
        library = load("")
    except Unavailable as exc:
        pytest.skip(str(exc))
    size = BLOCKS[kind].size
    shapes = {"embedding_length": size, "rope__dimension_count": size // 4}
    weights = hf_weights(hidden_size=size, head_dim=size // 4)
    tensors = stored(weights)
    for name in ("token_embd", "output", "blk.0.attn_output", "blk.1.ffn_gate", "blk.1.ffn_up"):
        shape = tensors[f"{name}.weight"].shape
        tensors[f"{name}.weight"] = random_blocks(kind, (shape[0], shape[1]), seed=len(name))
    for name in ("attn_q", "attn_k", "attn_v"):
        shape = tensors[f"blk.0.{name}.weight"].shape
        type_of_v = "Q8_0" if name == "attn_v" else kind
        tensors[f"blk.0.{name}.weight"] = random_blocks(type_of_v, (shape[0], shape[1]))
    folder = described(write_gguf(tmp_path / "a.gguf", metadata(**shapes), tensors))
    expected = loaded(folder)
    ops = CppOps(library, WeightFormat.BF16, keeps_codes=True)
    model = make_model(ModelConfig.from_folder(folder), ops)
    load_weights(model.weights(), folder)
    kept = {weight.name: weight.get() for weight in model.weights()}
    coded = [name for name in kept if tensors[gguf_name(name)].kind in BLOCKS]
    assert len(coded) == 8
    for name in coded:
        assert torch.equal(kept[name], expected[name]), name


def test_codes_are_kept_unless_the_user_or_the_device_wants_otherwise(tmp_path: Path) -> None:
    weights = hf_weights(hidden_size=32, head_dim=8)
    tensors = stored(weights)
    tensors["output.weight"] = random_blocks("Q4_0", (260, 32))
    tensors["token_embd.weight"] = random_blocks("Q8_0", (260, 32))
    values = metadata(embedding_length=32, rope__dimension_count=8)
    file = write_gguf(tmp_path / "a.gguf", values, tensors)
    asked = {
        "auto": "float32, weights Q8_0, Q4_0 as stored",
        "none": "float32",
        "int8": "float32, weights Q8_0, Q4_0 as stored, others in int8",
        "int4": "float32, weights Q8_0, Q4_0 as stored, others in int4",
    }
    num_bytes = {}
    for quantize, text in asked.items():
        model = kept(str(file), quantize=quantize)
        assert types(model) == text
        num_bytes[quantize] = model.weights_bytes
    assert types(kept(str(file), kernels="torch")) == "float32"
    assert num_bytes["int8"] < num_bytes["auto"] < num_bytes["none"]
    tensors["blk.0.attn_output.weight"] = random_blocks("Q8_0", (32, 32))
    write_gguf(file, values, tensors)
    assert types(kept(str(file), quantize="int4")) == "float32, weights in int4"


def kept(model: str, **settings: Any) -> ModelConfig:
    """The model as an engine with these settings would keep it."""
    prepared = prepare(EngineConfig(model=model, kv_tokens=256, **settings))
    return kept_as(prepared.config, prepared.model)


def widened(stored: Stored) -> Tensor:
    """[rows, in], or [experts, rows, in]"""
    rows = np.frombuffer(stored.data, np.uint8).reshape(math.prod(stored.shape[:-1]), -1)
    return codes_of(stored.kind, rows).dequantized().view(stored.shape)


QWEN3_MOE = {
    "hidden_size": 256,
    "head_dim": 64,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}
QWEN3_MOE_KEYS = {
    "embedding_length": 256,
    "rope__dimension_count": 64,
    "expert_count": 3,
    "expert_used_count": 2,
    "expert_feed_forward_length": 256,
}


EXPERT_KINDS = ("Q2_K", "Q3_K", "IQ1_S", "IQ2_XXS", "IQ3_S", "TQ2_0", "Q4_0", "Q4_K", "Q5_K")


@pytest.mark.parametrize("kind", [*EXPERT_KINDS, "Q6_K", "Q8_0", "MXFP4"])
def test_codes_of_experts_are_kept_and_computed_with(tmp_path: Path, kind: str) -> None:
    """Of all experts in one tensor. The downs are of another type, as in a Q4_K_M."""
    try:
        library = load("")
    except Unavailable as exc:
        pytest.skip(str(exc))
    weights = hf_weights("qwen3moe", **QWEN3_MOE)
    tensors = stored(weights, "qwen3moe")
    for name in [name for name in tensors if "_exps." in name]:
        other = "Q6_K" if "down" in name else kind
        tensors[name] = random_blocks(other, tensors[name].shape, seed=len(name))
    file = write_gguf(tmp_path / "a.gguf", metadata("qwen3moe", **QWEN3_MOE_KEYS), tensors)
    folder = described(file)
    expected = loaded(folder)
    gates = widened(tensors["blk.1.ffn_gate_exps.weight"])
    assert torch.equal(expected["model.layers.1.mlp.experts.2.gate_proj.weight"], gates[2])
    config = ModelConfig.from_folder(folder)
    ops = CppOps(library, WeightFormat.BF16, keeps_codes=True)
    model = make_model(config, ops)
    load_weights(model.weights(), folder)
    of_experts = [weight for weight in model.weights() if ".experts." in weight.name]
    assert len(of_experts) == 2 * 3 * 3
    for weight in of_experts:
        assert torch.equal(weight.get(), expected[weight.name]), weight.name
    logprobs = []
    for kernels in ("torch", "auto"):
        driver = make_driver(config, folder, kernels=kernels)
        logprobs.append(driver.run(Turn(0, list(range(1, 30))))[0])
        driver.runner.close()
    # The kernels round what they multiply with codes.
    torch.testing.assert_close(logprobs[0], logprobs[1], atol=0.02, rtol=0)


def test_codes_of_heads_are_kept(tmp_path: Path) -> None:
    """Of attention by latents, whose files have K and V of all heads as two tensors."""
    try:
        library = load("")
    except Unavailable as exc:
        pytest.skip(str(exc))
    architecture, config, keys = LATENT_VARIANTS["Youtu"]
    weights = hf_weights(architecture, **config)
    tensors = stored(weights, architecture)
    for layer in range(2):
        name = f"blk.{layer}.attn_v_b.weight"
        tensors[name] = random_blocks("Q4_0", tensors[name].shape, seed=layer)
    folder = described(write_gguf(tmp_path / "a.gguf", metadata(architecture, **keys), tensors))
    ops = CppOps(library, WeightFormat.BF16, keeps_codes=True)
    model = make_model(ModelConfig.from_folder(folder), ops)
    load_weights(model.weights(), folder)
    found = {weight.name: weight.get() for weight in model.weights()}
    for layer in range(2):
        expected = widened(tensors[f"blk.{layer}.attn_v_b.weight"]).flatten(0, 1)
        name = f"model.layers.{layer}.self_attn.v_b_proj.weight"
        assert torch.equal(found[name], expected)
        keys_of_heads = found[name.replace("v_b_proj", "k_b_proj")]
        stored_keys = tensors_of(weights, architecture)[f"blk.{layer}.attn_k_b.weight"]
        assert torch.equal(keys_of_heads, stored_keys.flatten(0, 1).bfloat16().float())


def test_old_files_have_a_tensor_for_each_expert(tmp_path: Path) -> None:
    config, keys = EXPERT_VARIANTS["llama"]
    weights = hf_weights(**config)
    tensors = stored(weights)
    for name in [name for name in tensors if "_exps." in name]:
        whole = torch.frombuffer(bytearray(tensors[name].data), dtype=torch.float32)
        del tensors[name]
        for expert, values in enumerate(whole.view(8, -1)):
            shape = (64, 96) if "down" in name else (96, 64)
            tensors[name.replace("_exps.", f".{expert}.")] = plain(values.view(shape))
    file = write_gguf(tmp_path / "a.gguf", metadata(**keys), tensors)
    assert_same(loaded(described(file)), weights)


def test_layers_that_guess_ahead_are_left_out(tmp_path: Path) -> None:
    config, keys = EXPERT_VARIANTS["glm4moe"]
    weights = hf_weights("glm4moe", **config)
    tensors = stored(weights, "glm4moe")
    tensors["blk.2.nextn.eh_proj.weight"] = plain(torch.ones(64, 128))
    tensors["blk.2.attn_q.weight"] = plain(torch.ones(64, 64))
    values = metadata("glm4moe", **keys, block_count=3, nextn_predict_layers=1)
    assert_same(loaded(described(write_gguf(tmp_path / "a.gguf", values, tensors))), weights)


def test_queries_keys_and_values_may_be_one_tensor(tmp_path: Path) -> None:
    config, keys = VARIANTS["phi2"]
    weights = hf_weights("phi2", **config)
    tensors = tensors_of(weights, "phi2")
    for kind in ("weight", "bias"):
        apart = [tensors.pop(f"blk.{layer}.attn_{part}.{kind}") for layer, part in LAYERS_QKV]
        for layer in range(2):
            whole = torch.cat(apart[3 * layer : 3 * layer + 3])
            tensors[f"blk.{layer}.attn_qkv.{kind}"] = whole
    written = {name: plain(tensor) for name, tensor in tensors.items()}
    file = write_gguf(tmp_path / "a.gguf", metadata("phi2", **keys), written)
    assert_same(loaded(described(file)), weights)


LAYERS_QKV = [(layer, part) for layer in range(2) for part in "qkv"]


@pytest.mark.parametrize("context_length", [32, 256])
def test_phi_has_factors_for_short_and_for_long_contexts(
    tmp_path: Path, context_length: int
) -> None:
    weights = hf_weights("phi3")
    tensors = stored(weights, "phi3")
    short = torch.linspace(1.0, 2.0, 8)
    long = torch.linspace(1.0, 30.0, 8)
    tensors["rope_factors_short.weight"] = plain(short)
    tensors["rope_factors_long.weight"] = plain(long)
    keys = {
        "rope__scaling__original_context_length": 64,
        "rope__scaling__attn_factor": 1.2,
    }
    folder = described(write_gguf(tmp_path / "a.gguf", metadata("phi3", **keys), tensors))
    rope = ModelConfig.from_folder(folder).decoder.layer(0).attention.rope
    assert rope is not None
    assert rope.attention_factor == pytest.approx(1.2)
    frequencies = 1.0 / 5_000.0 ** (torch.arange(0, 16, 2) / 16)
    found = inverse_frequencies(rope, 16, context_length)
    torch.testing.assert_close(found, frequencies / (long if context_length > 64 else short))


def test_tied_output_and_factors_of_rotation(tmp_path: Path) -> None:
    weights = hf_weights(tie_word_embeddings=True)
    tensors = stored(weights)
    factors = torch.linspace(1.0, 8.0, 8)
    tensors["rope_freqs.weight"] = plain(factors)
    folder = described(write_gguf(tmp_path / "a.gguf", metadata(), tensors))
    config = ModelConfig.from_folder(folder)
    assert config.tie_embeddings
    rope = config.decoder.layer(0).attention.rope
    assert rope is not None
    plain_frequencies = 1.0 / 5_000.0 ** (torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(inverse_frequencies(rope, 16), plain_frequencies / factors)
    assert_same(loaded(folder), weights)


@pytest.mark.parametrize("factors", [torch.ones(7), torch.zeros(8), torch.full((8,), torch.nan)])
def test_factors_of_rotation_that_are_none_are_refused(tmp_path: Path, factors: Tensor) -> None:
    tensors = stored(hf_weights())
    tensors["rope_freqs.weight"] = plain(factors)
    with pytest.raises(BadCheckpoint, match=r"rope_freqs\.weight has"):
        described(write_gguf(tmp_path / "a.gguf", metadata(), tensors))


def test_the_folder_is_made_once_for_each_state_of_a_file(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "a.gguf", metadata(), stored(hf_weights()))
    folder = described(file)
    written = (folder / "config.json").stat().st_mtime_ns
    assert described(file) == folder
    assert (folder / "config.json").stat().st_mtime_ns == written
    write_gguf(file, metadata(context_length=128), stored(hf_weights()))
    assert ModelConfig.from_folder(described(file)).max_position == 128


def test_a_family_that_changes_makes_a_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for source in SOURCES:
        for file in WEFT.glob(source):
            copy = tmp_path / "weft" / file.relative_to(WEFT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
    monkeypatch.setattr("weft.assemble.model_folder.WEFT", tmp_path / "weft")
    file = write_gguf(tmp_path / "a.gguf", metadata(), stored(hf_weights()))
    folder = described(file)
    assert described(file) == folder
    with (tmp_path / "weft" / "config" / "families" / "meta.py").open("a") as family:
        family.write("# changed")
    assert described(file) != folder


def test_a_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "occupied").write_text("")
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "occupied"))
    folder = described(write_gguf(tmp_path / "a.gguf", metadata(), stored(hf_weights())))
    assert ModelConfig.from_folder(folder).num_layers == 2


def test_names_are_those_of_files_without_their_endings(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "Tiny.Q8_0.gguf", metadata(), stored(hf_weights()))
    config = EngineConfig(model=str(file))
    assert model_name(config, model_folder(config)) == "Tiny.Q8_0"
    assert prepare(config).model.name == "Tiny.Q8_0"


def test_new_weights_are_looked_for_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    file = write_gguf(tmp_path / "models" / "tiny" / "a.gguf", metadata(), stored(hf_weights()))
    assert default_root(described(file)) == (tmp_path / "models").resolve()


def test_template_and_tokens_come_from_the_metadata(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "a.gguf", metadata(), stored(hf_weights()))
    tokenizer = load_tokenizer(described(file))
    assert tokenizer.chat_templates == {"default": TEMPLATE}
    assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert tokenizer.encode("abc<|im_end|>") == [259, 257]


def test_a_tokenizer_beside_the_file_or_named_comes_first(tmp_path: Path) -> None:
    weights = stored(hf_weights())
    file = write_gguf(tmp_path / "a.gguf", metadata(), weights)
    other = json.loads((described(file) / "tokenizer.json").read_text())
    other["model"]["merges"] = []
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(other))
    named = load_tokenizer(described(file, tokenizer=str(tmp_path / "other")))
    assert len(named.encode("abc")) == 3
    # What it does not say is as the file says.
    assert named.chat_templates == {"default": TEMPLATE}
    (tmp_path / "tokenizer.json").write_text(json.dumps(other))
    assert len(load_tokenizer(described(file)).encode("abc")) == 3


def test_a_tokenizer_can_be_named_where_the_files_own_is_not_read(tmp_path: Path) -> None:
    weights = stored(hf_weights())
    whole = described(write_gguf(tmp_path / "a.gguf", metadata(), weights))
    unknown = metadata() | {"tokenizer.ggml.pre": "of-tomorrow"}
    file = write_gguf(tmp_path / "b.gguf", unknown, weights)
    with pytest.raises(
        BadCheckpoint, match=r"'of-tomorrow', which is not supported; .*--tokenizer"
    ):
        described(file)
    assert load_tokenizer(described(file, tokenizer=str(whole))).vocab_size == 260
    none_at_all = {
        key: value for key, value in metadata().items() if not key.startswith("tokenizer.ggml.")
    }
    bare = write_gguf(tmp_path / "c.gguf", none_at_all, weights)
    assert load_tokenizer(described(bare, tokenizer=str(whole))).vocab_size == 260
    with pytest.raises(SettingsError, match="--tokenizer: there is no folder"):
        described(file, tokenizer="/no/such")
    with pytest.raises(SettingsError, match="for GGUF files"):
        described(write_folder(tmp_path / "folder", hf_weights()), tokenizer=str(whole))


REFUSED = {
    "another architecture": ({"general.architecture": "jamba"}, "'jamba' is not supported; supp"),
    "experts": (
        {"llama.expert_count": 8, "llama.expert_used_count": 2},
        r"has no tensor blk\.1\.ffn_gate_inp",
    ),
    "experts of an architecture without them": (
        {"general.architecture": "qwen2", "qwen2.expert_count": 8},
        r"qwen2\.expert_count is 8, which is not supported",
    ),
    "a scale of scores": ({"llama.attention.scale": 0.5}, r"attention.scale is 0.5"),
    "part of a head rotated": ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8"),
    "rotation of long texts": ({"llama.rope.scaling.type": "longrope"}, "'longrope', which is not"),
    "layers that differ": (
        {"llama.attention.head_count_kv": np.array([1, 2], dtype=np.int32)},
        "differs between layers",
    ),
    "no size": ({"llama.block_count": None}, "has no llama.block_count"),
    "a size that is a text": ({"llama.block_count": "two"}, "must be given as int"),
    "many layers": ({"llama.block_count": 2**31}, "block_count is 2,147,483,648, but it has 21"),
    "a scale for each layer": (
        {"llama.attention.scale": np.array([0, 0], dtype=np.int32)},
        r"attention.scale is \[0 0\], which is not supported",
    ),
    "parts that are no number": (
        {"split.count": np.array([1, 1], dtype=np.int32)},
        r"split.count is \[1 1\]; it must be given as int",
    ),
    "no heads": ({"llama.attention.head_count": 0}, "is"),
    "wide layers": ({"llama.embedding_length": 2**31, "llama.rope.dimension_count": None}, "says"),
    "wide feed-forward": ({"llama.feed_forward_length": 2**31}, "ffn_gate.weight is"),
    "no context": ({"llama.context_length": 0}, r"a\.gguf: llama\.context_length is 0; it must be"),
    "no rotation": ({"llama.rope.freq_base": 0.0}, r"llama\.rope\.freq_base is 0; it must be"),
    "an end that is no token": ({"tokenizer.ggml.eos_token_id": 260}, "are in the vocabulary"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, "has no tokenizer.ggml.tokens"),
    "tokens that are numbers": ({"tokenizer.ggml.tokens": 3}, "has no tokenizer.ggml.tokens"),
    "more tokens than rows": (
        {"tokenizer.ggml.tokens": [str(index) for index in range(500)]},
        "one number for each",
    ),
    "many tokens": (
        {
            "tokenizer.ggml.tokens": [*"abc", *(f"x{index}" for index in range(500))],
            "tokenizer.ggml.token_type": None,
            "tokenizer.ggml.merges": [],
        },
        "its tokenizer has 503 tokens, its embedding 260",
    ),
    "another tokenizer": ({"tokenizer.ggml.model": "rwkv"}, "'rwkv', which is not supported"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_computed_is_refused_by_name(tmp_path: Path, what: str) -> None:
    changes, message = REFUSED[what]
    values = {**metadata(), **changes}
    values = {key: value for key, value in values.items() if value is not None}
    file = write_gguf(tmp_path / "a.gguf", values, stored(hf_weights()))
    with pytest.raises(ModelError, match=message) as raised:
        prepare(EngineConfig(model=str(file)))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        (("gemma3", *VARIANTS["gemma3"]), {"rope__freq_base": 0.0}, "gemma3.rope.freq_base is 0"),
        (
            LATENT_VARIANTS["V2, in groups, with YaRN"],
            {"rope__scaling__yarn_log_multiplier": -1.0},
            "mscale (from deepseek2.rope.scaling.yarn_log_multiplier) is -10",
        ),
    ],
)
def test_what_was_computed_of_the_file_is_refused_in_its_words(
    tmp_path: Path, variant: tuple[str, Any, Any], changes: dict[str, Any], message: str
) -> None:
    architecture, config, keys = variant
    tensors = stored(hf_weights(architecture, **config), architecture)
    values = metadata(architecture, **{**keys, **changes})
    with pytest.raises(ModelError, match=re.escape(message)):
        described(write_gguf(tmp_path / "a.gguf", values, tensors))


def test_heads_without_values_are_refused_where_a_part_of_each_rotates(tmp_path: Path) -> None:
    config, keys = VARIANTS["phi2"]
    tensors = stored(hf_weights("phi2", **config), "phi2")
    values = metadata("phi2", **{**keys, "attention__head_count": 65})
    with pytest.raises(ModelError, match=r"phi2\.attention\.head_count 65: heads must have"):
        described(write_gguf(tmp_path / "a.gguf", values, tensors))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"attention__indexer__head_count": 4},
            "attn_q_b.weight has 48 rows; its metadata says 64",
        ),
        ({"attention__indexer__top_k": None}, "has no glm-dsa.attention.indexer.top_k"),
        ({"expert_gating_func": 1}, "expert_gating_func is 1; 2 is supported"),
        ({"attention__indexer__types": np.array([True])}, "types has 1 layers of 2"),
        ({"block_count": 2**31}, "block_count is 2,147,483,648, but it has"),
        (
            {"attention__indexer__types": 1},
            "types is 1; a list of bool or int, one for each layer, is expected",
        ),
    ],
)
def test_an_indexer_of_other_sizes_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    architecture, config, keys = LATENT_VARIANTS["GLM-5"]
    tensors = stored(hf_weights(architecture, **config), architecture)
    values = metadata(architecture, **{**keys, **changes})
    with pytest.raises(ModelError, match=re.escape(message)):
        described(write_gguf(tmp_path / "a.gguf", values, tensors))


def test_layers_of_long_contexts_share_a_choice_without_a_list(tmp_path: Path) -> None:
    architecture, config, keys = LATENT_VARIANTS["GLM-5"]
    tensors = stored(hf_weights(architecture, **{**config, "num_hidden_layers": 4}), architecture)
    found = []
    for length in (1_048_575, 1_048_576):
        values = metadata(architecture, **{**keys, "block_count": 4, "context_length": length})
        folder = described(write_gguf(tmp_path / f"{length}.gguf", values, tensors))
        found.append(json.loads((folder / "config.json").read_text())["indexer_types"])
    assert found == [["full"] * 4, ["full", "full", "full", "shared"]]


def test_merges_that_make_no_token_are_refused(tmp_path: Path) -> None:
    values = metadata() | {"tokenizer.ggml.merges": ["a b", "zz zzz"]}
    file = write_gguf(tmp_path / "a.gguf", values, stored(hf_weights()))
    with pytest.raises(BadCheckpoint, match="is not a tokenizer"):
        load_tokenizer(described(file))


def test_types_that_are_not_read_are_named(tmp_path: Path) -> None:
    tensors = stored(hf_weights(hidden_size=256, head_dim=64))
    tensors["blk.0.attn_v.weight"] = Stored("Q8_K", (128, 256), bytes(128 * 292))
    sizes = {"embedding_length": 256, "rope__dimension_count": 64}
    folder = described(write_gguf(tmp_path / "a.gguf", metadata(**sizes), tensors))
    with pytest.raises(BadCheckpoint, match=r"v_proj.weight Q8_K instead of one of .*Q4_K"):
        loaded(folder)


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    tensors = stored(hf_weights())
    tensors["blk.0.strange.weight"] = plain(torch.ones(3))
    del tensors["blk.1.attn_v.weight"]
    folder = described(write_gguf(tmp_path / "a.gguf", metadata(), tensors))
    with pytest.raises(BadCheckpoint, match=r"1 missing: .*v_proj.*1 unexpected: blk.0.strange"):
        loaded(folder)


def test_scales_that_are_no_numbers_are_refused_wherever_they_stand(tmp_path: Path) -> None:
    tensors = stored(hf_weights(hidden_size=32, head_dim=8))
    good = random_blocks("Q8_0", (260, 32))
    nan = np.array([np.nan], np.float16).tobytes()
    sizes = {"embedding_length": 32, "rope__dimension_count": 8}
    # At the beginning it is seen before anything is loaded.
    tensors["token_embd.weight"] = good._replace(data=nan + good.data[2:])
    with pytest.raises(BadCheckpoint, match="values that are not finite numbers"):
        check_files(described(write_gguf(tmp_path / "a.gguf", metadata(**sizes), tensors)))
    tensors["token_embd.weight"] = good._replace(data=good.data[:-34] + nan + good.data[-32:])
    folder = described(write_gguf(tmp_path / "b.gguf", metadata(**sizes), tensors))
    check_files(folder)
    with pytest.raises(BadCheckpoint, match=r"embed_tokens.weight has scales that are not finite"):
        loaded(folder)


def test_a_folder_with_several_models_names_them(tmp_path: Path) -> None:
    for name in ("a.Q4_0.gguf", "a.Q8_0.gguf", "mmproj-a.gguf"):
        write_gguf(tmp_path / name, metadata(), stored(hf_weights()))
    with pytest.raises(ModelNotFound, match=r"has 2 models, name one of them: a.Q4_0.gguf, a.Q8"):
        described(tmp_path)


def test_headers_can_be_listed(tmp_path: Path) -> None:
    weights = hf_weights()
    folder = described(write_gguf(tmp_path / "a.gguf", metadata(), stored(weights)))
    shapes = {name: entry.shape for name, entry in read_headers(folder).items()}
    assert shapes == {name: tuple(tensor.shape) for name, tensor in weights.items()}


def test_new_weights_may_come_from_a_file(tmp_path: Path) -> None:
    """Also where the file is a link to one with another name, as the hub's are."""
    weights = hf_weights()
    model = ModelConfig.from_folder(write_folder(tmp_path / "old", weights), "tiny")
    driver = make_driver(model, tmp_path / "old")
    (tmp_path / "new").mkdir()
    doubled = {name: 2 * tensor for name, tensor in weights.items()}
    write_gguf(tmp_path / "digest", metadata(), stored(doubled))
    (tmp_path / "new" / "a.gguf").symlink_to("../digest")
    reply = driver.runner.control(UpdateFromDisk("new")).result()
    assert reply.ok, reply.message
    name = "model.layers.1.self_attn.q_proj.weight"
    value = driver.runner.control(GetWeight(name, 64)).result()
    found = np.frombuffer(value.values, np.float32).reshape(value.shape)
    assert (found == doubled[name].numpy()).all()
    driver.runner.control(ReleaseMemory(("weights",))).result()
    assert driver.runner.control(ResumeMemory(("weights",))).result().is_reloaded
    driver.runner.close()


def test_a_window_of_mistral_is_obeyed(tmp_path: Path) -> None:
    values = metadata(attention__sliding_window=64)
    config = ModelConfig.from_folder(
        described(write_gguf(tmp_path / "a.gguf", values, stored(hf_weights())))
    )
    assert config.architecture == "MistralForCausalLM"
    assert config.window(0) == 64


def test_an_architecture_without_a_family_is_refused(tmp_path: Path) -> None:
    values = metadata() | {"general.architecture": "t5encoder"}
    with pytest.raises(UnsupportedModel, match="supported are arcee, bert, chatglm"):
        described(write_gguf(tmp_path / "a.gguf", values, {}))
