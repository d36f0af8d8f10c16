"""A GGUF file of BERT is the encoder of its safetensors, with its tokenizer and its pooling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file

from tests.caches import set_own_cache
from tests.executor.gguf_files import plain, write_gguf
from tests.executor.gguf_models import described
from weft.config.model import ModelConfig, ModelError
from weft.models.registry import make_model
from weft.ops.cpp.abi import WeightFormat
from weft.ops.cpp.library import Unavailable, load
from weft.ops.cpp.ops import CppOps
from weft.weights.load import load_weights, unread_of

WORDS = (
    "the",
    "cat",
    "run",
    "un",
    "don",
    "naive",
    "paris",
    "42",
    "3",
    "1",
    "9",
    "?",
    "'",
    ",",
    "!",
)
PARTS = ("##s", "##ning", "##der", "##t", "##a", "##b", "##c", "##1", "##2", "##!")
MARKS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz\u4f60\u597d")
TEXTS = (
    "The cats running under Paris, don't!",
    "na\u00efve \u4f60\u597d 42 [SEP] x\u0301 \u00c9t\u00e9",
    "",
    " abc12!  [MASK] ",
)
NAMES = (
    ("embeddings.word_embeddings", "token_embd"),
    ("embeddings.token_type_embeddings", "token_types"),
    ("embeddings.position_embeddings", "position_embd"),
    ("embeddings.LayerNorm", "token_embd_norm"),
    ("encoder.layer.", "blk."),
    ("attention.self.query", "attn_q"),
    ("attention.self.key", "attn_k"),
    ("attention.self.value", "attn_v"),
    ("attention.output.dense", "attn_output"),
    ("attention.output.LayerNorm", "attn_output_norm"),
    ("intermediate.dense", "ffn_up"),
    ("output.dense", "ffn_down"),
    ("output.LayerNorm", "layer_output_norm"),
)


def vocabulary(*more: str) -> list[str]:
    return [*MARKS, *WORDS, *PARTS, *LETTERS, *more]


def in_file(token: str) -> str:
    if token in MARKS:
        return token
    return token.removeprefix("##") if token.startswith("##") else f"\u2581{token}"


def metadata(tokens: list[str], **changes: Any) -> dict[str, Any]:
    kinds = [3 if token in MARKS else 1 for token in tokens]
    found = {
        "general.architecture": "bert",
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": [in_file(token) for token in tokens],
        "tokenizer.ggml.token_type": np.array(kinds, dtype=np.int32),
        "tokenizer.ggml.token_type_count": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.cls_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.mask_token_id": 4,
        "bert.block_count": 2,
        "bert.context_length": 64,
        "bert.embedding_length": 64,
        "bert.feed_forward_length": 96,
        "bert.attention.head_count": 4,
        "bert.attention.causal": False,
        "bert.attention.layer_norm_epsilon": 1e-12,
        "bert.pooling_type": 1,
    }
    return {**found, **changes}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_own_cache(tmp_path / "cache", monkeypatch)


def bert(folder: Path, num_tokens: int) -> Path:
    config = transformers.BertConfig(
        vocab_size=num_tokens,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=64,
    )
    torch.manual_seed(5)
    transformers.BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    return folder


def file_of(folder: Path, path: Path, tokens: list[str], **changes: Any) -> Path:
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for ours, theirs in NAMES:
            name = name.replace(ours, theirs)
        if "position_ids" not in name:
            tensors[name] = plain(tensor)
    return write_gguf(path, metadata(tokens, **changes), tensors)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    try:
        library = load("")
    except Unavailable as exc:
        pytest.skip(str(exc))
    config = ModelConfig.from_folder(folder)
    model = make_model(config, CppOps(library, WeightFormat.F32))
    load_weights(model.weights(), folder, unread_of(config))
    return {weight.name: weight.get() for weight in model.weights()}


def test_a_file_is_the_encoder_of_its_safetensors(tmp_path: Path) -> None:
    tokens = vocabulary()
    checkpoint = bert(tmp_path / "checkpoint", len(tokens))
    folder = described(file_of(checkpoint, tmp_path / "a.gguf", tokens))
    ours = weights_of(folder)
    theirs = weights_of(checkpoint)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    config = ModelConfig.from_folder(folder)
    expected = ModelConfig.from_folder(checkpoint)
    for name in ("encoder", "num_heads"):
        assert getattr(config, name) == getattr(expected, name), name
    assert config.norm_eps == pytest.approx(expected.norm_eps)


@pytest.mark.parametrize(("kind", "expected"), [(1, "mean"), (2, "cls"), (3, "last")])
def test_the_pooling_is_that_of_the_file(tmp_path: Path, kind: int, expected: str) -> None:
    tokens = vocabulary()
    checkpoint = bert(tmp_path / "checkpoint", len(tokens))
    changes = {"bert.pooling_type": kind}
    folder = described(file_of(checkpoint, tmp_path / "a.gguf", tokens, **changes))
    pooling = ModelConfig.from_folder(folder).pooling
    assert pooling is not None
    assert (pooling.task, pooling.kind, pooling.normalize) == ("embed", expected, True)


def test_a_classifier_is_refused(tmp_path: Path) -> None:
    tokens = vocabulary()
    checkpoint = bert(tmp_path / "checkpoint", len(tokens))
    changes = {"bert.pooling_type": 4}
    with pytest.raises(ModelError, match=r"bert.pooling_type is 4; 1, 2, 3 are supported"):
        described(file_of(checkpoint, tmp_path / "a.gguf", tokens, **changes))


@pytest.mark.parametrize("is_cased", [False, True])
def test_texts_have_the_tokens_of_transformers(tmp_path: Path, is_cased: bool) -> None:
    tokens = vocabulary("Paris", "The") if is_cased else vocabulary()
    checkpoint = bert(tmp_path / "checkpoint", len(tokens))
    folder = described(file_of(checkpoint, tmp_path / "a.gguf", tokens))
    ours = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocab = {token: index for index, token in enumerate(tokens)}
    theirs = transformers.BertTokenizer(vocab=vocab, do_lower_case=not is_cased)
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text)["input_ids"], text
    pair = ours.encode(TEXTS[0], TEXTS[1])
    expected = theirs(TEXTS[0], TEXTS[1])
    assert (pair.ids, pair.type_ids) == (expected["input_ids"], expected["token_type_ids"])
    said = json.loads((folder / "tokenizer_config.json").read_text())
    assert (said["cls_token"], said["sep_token"]) == ("[CLS]", "[SEP]")
