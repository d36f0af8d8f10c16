"""What a model is for, as its files and the settings say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.config.machines import MODEL, machine
from weft.config.engine import EngineConfig
from weft.config.model import ModelConfig, UnsupportedModel
from weft.config.options import SettingsError
from weft.config.pooling import PoolingConfig, classifier
from weft.config.resolve import kept_as, resolve

BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
}


MAXIMUM = {"pooling_mode_max_tokens": True}


def write(folder: Path, **files: Any) -> Path:
    for name, content in {"config.json": BERT, **files}.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    return folder


def modules(*kinds: str) -> list[dict[str, Any]]:
    return [
        {"type": f"sentence_transformers.models.{kind}", "path": f"{i}_{kind}"}
        for i, kind in enumerate(kinds)
    ]


def test_an_encoder_without_a_layout_gives_its_first_state() -> None:
    config = ModelConfig.from_hf(BERT, "bert")
    assert config.pooling == PoolingConfig(task="embed", kind="cls", normalize=True)
    assert config.encoder.num_positions == 512
    assert config.max_position == 512
    assert config.encoder.first_position == 0


def test_positions_of_roberta_begin_behind_padding() -> None:
    changes = {"architectures": ["RobertaModel"], "max_position_embeddings": 514, "pad_token_id": 1}
    config = ModelConfig.from_hf({**BERT, **changes}, "roberta")
    assert config.encoder.num_positions == 514
    assert config.max_position == 512
    assert config.encoder.first_position == 2


def test_the_layout_says_how_long_an_input_may_be(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        **{
            "modules.json": modules("Transformer", "Pooling"),
            "1_Pooling/config.json": {
                "pooling_mode_mean_tokens": True,
                "pooling_mode_cls_token": False,
            },
            "sentence_bert_config.json": {"max_seq_length": 256},
        },
    )
    config = ModelConfig.from_folder(folder)
    assert config.max_position == 256
    assert config.pooling == PoolingConfig(task="embed", kind="mean", normalize=False)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"modules.json": modules("Transformer", "Dense")}, "modules Transformer, Dense"),
        ({"modules.json": {"a": 1}}, "not a JSON list"),
        ({"modules.json": modules("Transformer", "Pooling")}, "cannot be read"),
        (
            {
                "modules.json": modules("Transformer", "Pooling"),
                "1_Pooling/config.json": {"pooling_mode_max_tokens": True},
            },
            "pooling is pooling_mode_max_tokens",
        ),
        (
            {"modules.json": [*modules("Transformer"), {"type": "a.Pooling", "path": "../x"}]},
            "outside",
        ),
        ({"config.json": {**BERT, "is_decoder": True}}, "is_decoder"),
        ({"config.json": {**BERT, "hidden_act": "silu"}}, "only 'gelu'"),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, files: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        ModelConfig.from_folder(write(tmp_path, **files))


@pytest.mark.parametrize(
    ("config", "labels", "activation"),
    [
        ({"num_labels": 1}, 1, "sigmoid"),
        ({"id2label": {"0": "no", "1": "yes"}}, 2, "softmax"),
        ({}, 2, "softmax"),
        ({"num_labels": 1, "problem_type": "regression"}, 1, "none"),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, 3, "sigmoid"),
        (
            {
                "num_labels": 1,
                "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
            },
            1,
            "none",
        ),
    ],
)
def test_labels_and_what_makes_probabilities_of_scores(
    config: dict[str, Any], labels: int, activation: str
) -> None:
    found = classifier(config, "cls")
    assert len(found.labels) == labels
    assert found.activation == activation


def test_an_encoder_takes_no_kv_memory_and_is_not_chunked() -> None:
    model = ModelConfig.from_hf(BERT, "bert")
    config, sizing = resolve(EngineConfig(max_running_requests=8), model, machine(2.0))
    assert (config.task, config.chunked_prefill_size, config.prefix_cache) == ("embed", -1, False)
    assert sizing.kv_bytes == 0
    assert config.kv_tokens >= 8 * 512
    assert "computed whole" in str(sizing)
    for setting in ({"kv_tokens": 512}, {"kv_dtype": "int8"}):
        with pytest.raises(SettingsError, match="is an encoder"):
            resolve(EngineConfig(**setting), model, machine(2.0))  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="does not fit into memory"):
        resolve(EngineConfig(), model, machine(0.1))


def test_a_model_that_generates_embeds_if_asked() -> None:
    config = resolve(EngineConfig(task="embed"), MODEL, machine()).config
    assert config.task == "embed"
    assert kept_as(config, MODEL).pooling == PoolingConfig(
        task="embed", kind="last", normalize=True
    )
    assert resolve(EngineConfig(), MODEL, machine()).config.task == "generate"
    with pytest.raises(SettingsError, match="--task is generate, but bert"):
        resolve(EngineConfig(task="generate"), ModelConfig.from_hf(BERT, "bert"), machine())
    with pytest.raises(SettingsError, match="--task is classify, but tiny"):
        resolve(EngineConfig(task="classify"), MODEL, machine())
