"""Tiny random models that make vectors or scores, saved by transformers, and what transformers says
of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import models, normalizers, pre_tokenizers, processors

from tests.executor.driver import Driver, Turn
from weft.plan.outputs import PooledVectors, PoolingRequest
from weft.plan.step import find

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    *"abcdefghijklmnopqrstuvwxyz",
    *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"),
]
VOCAB = 64
LAYOUT = "sentence_transformers.models."
TOKEN_SIZE = 8  # of the vectors of models with one for each token

DECODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "head_dim": 8,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
ENCODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "pad_token_id": 0,
}


# The names of these families for the keys of `ENCODER`.
DISTIL: dict[str, Any] = {"dim": 48, "hidden_dim": 80, "n_layers": 3, "n_heads": 4}
MPNET: dict[str, Any] = {"pad_token_id": 1, "relative_attention_num_buckets": 32}
# A window that is narrower than prompts.
MODERN: dict[str, Any] = {
    "local_attention": 12,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "bos_token_id": 2,
    "eos_token_id": 3,
}
DEBERTA: dict[str, Any] = {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "share_att_key": True,
    "position_buckets": 8,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "type_vocab_size": 0,
}
ENCODER_CLASSES = (
    *("Bert", "Roberta", "XLMRoberta", "Camembert", "DistilBert", "Electra", "MPNet"),
    *("ModernBert", "NomicBert", "DebertaV2"),
)


class Case(NamedTuple):
    architecture: str
    changes: dict[str, Any]
    pooling: str = ""  # of the sentence-transformers layout; "": there is none
    normalize: bool = True


CASES = {
    "bert-mean": Case("BertModel", {}, "mean"),
    "bert-cls": Case("BertModel", {"hidden_act": "gelu_new"}, "cls", normalize=False),
    "bert-pair": Case("BertForSequenceClassification", {"num_labels": 1}),
    "bert-labels": Case("BertForSequenceClassification", {"num_labels": 3}),
    "roberta": Case(
        "XLMRobertaForSequenceClassification",
        {"num_labels": 2, "type_vocab_size": 1, "pad_token_id": 1},
    ),
    "roberta-mean": Case("RobertaModel", {"type_vocab_size": 1, "pad_token_id": 1}, "mean"),
    "camembert": Case("CamembertModel", {"type_vocab_size": 1, "pad_token_id": 1}, "mean"),
    "roberta-xl": Case("XLMRobertaXLModel", {"type_vocab_size": 1, "pad_token_id": 1}, "mean"),
    "roberta-xl-labels": Case(
        "XLMRobertaXLForSequenceClassification",
        {"num_labels": 3, "type_vocab_size": 1, "pad_token_id": 1},
    ),
    "distilbert": Case("DistilBertModel", DISTIL, "cls"),
    "distilbert-labels": Case("DistilBertForSequenceClassification", {**DISTIL, "num_labels": 3}),
    "electra": Case("ElectraModel", {"embedding_size": 32}, "cls"),
    "electra-pair": Case("ElectraForSequenceClassification", {"num_labels": 1}),
    "mpnet": Case("MPNetModel", MPNET, "mean"),
    "mpnet-labels": Case("MPNetForSequenceClassification", {**MPNET, "num_labels": 2}),
    "modernbert": Case("ModernBertModel", MODERN, "mean"),
    "modernbert-biased": Case(
        "ModernBertModel",
        {**MODERN, "norm_bias": True, "attention_bias": True, "mlp_bias": True},
        "cls",
    ),
    "modernbert-labels": Case("ModernBertForSequenceClassification", {**MODERN, "num_labels": 3}),
    "modernbert-pair": Case(
        "ModernBertForSequenceClassification",
        {**MODERN, "num_labels": 1, "classifier_pooling": "mean", "classifier_bias": True},
    ),
    "nomic": Case("NomicBertModel", {"head_dim": 12}, "mean"),
    "nomic-labels": Case("NomicBertForSequenceClassification", {"num_labels": 2, "head_dim": 12}),
    "deberta": Case("DebertaV2Model", DEBERTA, "cls"),
    "deberta-own": Case(
        "DebertaV2Model",
        {**DEBERTA, "share_att_key": False, "position_buckets": -1, "norm_rel_ebd": "none"},
        "mean",
    ),
    "deberta-pair": Case(
        "DebertaV2ForSequenceClassification",
        {
            **DEBERTA,
            "num_labels": 1,
            "type_vocab_size": 2,
            "position_biased_input": True,
            "pooler_hidden_size": 48,
        },
    ),
    "splade-bert": Case("BertForMaskedLM", {}, "sparse", normalize=False),
    "splade-untied": Case(
        "BertForMaskedLM", {"tie_word_embeddings": False}, "sparse", normalize=False
    ),
    "splade-distilbert": Case("DistilBertForMaskedLM", DISTIL, "sparse", normalize=False),
    "splade-roberta": Case(
        "RobertaForMaskedLM", {"type_vocab_size": 1, "pad_token_id": 1}, "sparse", normalize=False
    ),
    "splade-mpnet": Case("MPNetForMaskedLM", MPNET, "sparse", normalize=False),
    "splade-modernbert": Case("ModernBertForMaskedLM", MODERN, "sparse", normalize=False),
    "colbert-bert": Case("BertModel", {}, "tokens"),
    "colbert-modernbert": Case("ModernBertModel", MODERN, "tokens"),
    "fill-mean": Case("BertForMaskedLM", {}, "mean"),
    "qwen3-last": Case("Qwen3ForCausalLM", {}, "last"),
    "qwen3-mean": Case("Qwen3Model", {}, "mean"),
    "qwen3-labels": Case("Qwen3ForSequenceClassification", {"num_labels": 4}),
    "llama-score": Case("LlamaForSequenceClassification", {"num_labels": 1}),
    "gemma2-labels": Case("Gemma2ForSequenceClassification", {"num_labels": 3, "head_dim": 16}),
    "glm4-mean": Case("Glm4Model", {}, "mean"),
}
ENCODERS = [name for name, case in CASES.items() if case.architecture.startswith(ENCODER_CLASSES)]


class PooledReference(NamedTuple):
    folder: Path
    case: Case
    model: Any

    @property
    def is_encoder(self) -> bool:
        return self.case.architecture.startswith(ENCODER_CLASSES)

    def vector(self, ids: list[int], types: list[int] | None = None) -> np.ndarray:
        """What one prompt should give, in float32."""
        given: dict[str, Any] = {"input_ids": torch.tensor([ids])}
        if types is not None:
            given["token_type_ids"] = torch.tensor([types])
        with torch.inference_mode():
            if "ForSequence" in self.case.architecture:
                logits = self.model(**given).logits[0]
                found = logits.sigmoid() if len(logits) == 1 else logits.softmax(-1)
            elif self.case.pooling == "sparse":
                found = self.model(**given).logits[0].amax(0).relu().log1p()
            else:
                hidden = self.model(**given, output_hidden_states=True)
                states = (
                    hidden.hidden_states[-1][0] if "For" in self.case.architecture else hidden[0][0]
                )
                if self.case.pooling == "tokens":
                    linear = load_file(self.folder / "1_Dense" / "model.safetensors")
                    states = states @ linear["linear.weight"].T
                    vectors = torch.nn.functional.normalize(states, dim=-1)
                    return np.asarray(vectors.flatten())
                found = {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[
                    self.case.pooling
                ]
                if self.case.normalize:
                    found = torch.nn.functional.normalize(found, dim=0)
        return np.asarray(found)


def make_pooled(name: str, folder: Path) -> PooledReference:
    """Save the model with its tokenizer and, if it has one, its sentence-transformers layout."""
    case = CASES[name]
    family = case.architecture.partition("For")[0].removesuffix("Model")
    is_encoder = family.startswith(ENCODER_CLASSES)
    shape = ENCODER if is_encoder else DECODER
    config = getattr(transformers, f"{family}Config")(
        **{**shape, **case.changes}, attn_implementation="eager"
    )
    model = getattr(transformers, case.architecture)(config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(
                1 + 0.2 * noise if "norm" in key.lower() and "bias" not in key else 0.25 * noise
            )
    model.save_pretrained(folder)
    write_tokenizer(folder, pairs=is_encoder)
    if case.pooling:
        write_layout(folder, case.pooling, normalize=case.normalize)
    return PooledReference(folder, case, model)


def write_tokenizer(folder: Path, *, pairs: bool) -> None:
    """Letters; with [CLS] and [SEP] as BERT has them, or a last token alone, as Qwen3-Embedding has
    it."""
    backend = tokenizers.Tokenizer(
        models.WordPiece(
            {word: i for i, word in enumerate(WORDS)},
            unk_token="[UNK]",
            max_input_chars_per_word=200,
        )
    )
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    special = [("[CLS]", 2), ("[SEP]", 3)]
    single, pair = (
        ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1") if pairs else ("$A [SEP]", "$A $B [SEP]")
    )
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=special
    )
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"unk_token": "[UNK]"}))


def write_layout(folder: Path, kind: str, *, normalize: bool) -> None:
    if kind == "tokens":
        write_pylate(folder)
        return
    if kind == "sparse":
        write_splade(folder)
        return
    names = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{name}" if i else "", "type": LAYOUT + name}
        for i, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    keys = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken"}
    pooling = {f"pooling_mode_{key}": name == kind for name, key in keys.items()} | {
        "pooling_mode_max_tokens": False
    }
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 48, **pooling})
    )


def write_splade(folder: Path) -> None:
    part = "sentence_transformers.sparse_encoder.models."
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{part}MLMTransformer"},
        {"idx": 1, "name": "1", "path": "1_SpladePooling", "type": f"{part}SpladePooling"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_SpladePooling").mkdir()
    config = {"pooling_strategy": "max", "activation_function": "relu"}
    (folder / "1_SpladePooling" / "config.json").write_text(json.dumps(config))


def write_pylate(folder: Path) -> None:
    """A linear to 8 numbers, and letters as marks of queries and documents."""
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{LAYOUT}Transformer"},
        {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Dense").mkdir()
    config = {
        "in_features": 48,
        "out_features": TOKEN_SIZE,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    (folder / "1_Dense" / "config.json").write_text(json.dumps(config))
    linear = 0.25 * torch.randn(TOKEN_SIZE, 48, generator=torch.Generator().manual_seed(9))
    save_file({"linear.weight": linear}, folder / "1_Dense" / "model.safetensors")
    marks = {"query_prefix": "q", "document_prefix": "d"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(marks))


def run(
    driver: Driver, *turns: Turn, types: Sequence[int] | None = None, **changes: Any
) -> np.ndarray:
    """The vectors of those turns that are said to sample."""
    completes = np.array([turn.samples for turn in turns])
    plan = driver.plan(*(turn._replace(samples=False) for turn in turns))
    num = len(turns)
    values: dict[str, Any] = {
        "index": np.arange(num, dtype=np.int32),
        "completes": completes,
        "normalize": np.full(num, -1, np.int32),
        "dimensions": np.zeros(num, np.int32),
        "types": None if types is None else np.array(types, np.int32),
        **changes,
    }
    plan = replace(plan, outputs=(PoolingRequest(**values),))
    pooled = find(driver.runner.launch(plan).result().outputs, PooledVectors)
    assert pooled is not None
    return pooled.vectors[completes]
