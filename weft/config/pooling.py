"""The output of a model that does not generate: one vector, or one score per label, of a whole
prompt.

Read from the files of the sentence-transformers layout (`modules.json`, `1_Pooling/config.json`,
`sentence_bert_config.json`) and of models with a vector for each token (PyLate, ColBERT), or from
the labels of a classifier's `config.json`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.json_types import JsonMapping

KINDS = {  # key in 1_Pooling/config.json -> weft's name
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
ACTIVATIONS = {
    "Identity": "none",
    "Sigmoid": "sigmoid",
    "Softmax": "softmax",
}  # last part of a torch class name
MAX_LABELS = 65_536
MAX_TOKEN_DIMS = 4_096  # of the vector of a token


class BadPooling(ValueError):
    """The files ask for a pooling that is not implemented, or are invalid; the message says which
    in one sentence."""


@dataclass(frozen=True, kw_only=True)
class PoolingConfig:
    """How the hidden states of a prompt become its vector or scores."""

    task: str = "embed"  # embed: a vector; classify: scores of labels
    # Hidden states that are used: mean of all, that of the first token (cls), that of the last; or
    # a vector for each token (tokens), or a number for each token of the vocabulary (sparse).
    kind: str = "last"
    size: int = 0  # of the vector of a token; 0: the kind decides
    # tokens: the marks of queries and of documents, each a token after the first one; "": none
    markers: tuple[str, str] = ("", "")
    projection: str = ""  # tokens: folder of the linear's file; "": it is among the weights
    normalize: bool = True  # embed: to length 1
    labels: tuple[str, ...] = ()  # classify: names of the labels, in the order of the scores
    activation: str = "none"  # classify: function of the scores: softmax, sigmoid, none

    @property
    def form(self) -> str:
        """vector, or tokens or sparse (`kind`)."""
        return self.kind if self.kind in ("tokens", "sparse") else "vector"


@dataclass(frozen=True, kw_only=True)
class SentenceLayout:
    """The content of the files of sentence-transformers."""

    pooling: PoolingConfig
    max_len: int = 0  # tokens that the model was trained for; 0: unknown


def sentence_layout(folder: Path) -> SentenceLayout | None:
    """The layout of a model folder, or None if there is no `modules.json`. Raises `BadPooling`."""
    if not (folder / "modules.json").is_file():
        return None
    modules = _read(folder / "modules.json", list)
    kinds = [
        str(one.get("type", "")).rpartition(".")[2] if isinstance(one, dict) else ""
        for one in modules
    ]
    if kinds == ["MLMTransformer", "SpladePooling"]:
        return SentenceLayout(
            pooling=_sparse(_config(folder, modules[1])), max_len=_max_len(folder)
        )
    is_by_token = kinds == ["Transformer", "Dense"] and "pylate" in str(modules[1].get("type"))
    if is_by_token:
        return _of_tokens(folder, modules[1])
    unknown = set(kinds) - {"Transformer", "Pooling", "Normalize"}
    if unknown or kinds[:1] != ["Transformer"]:
        found = ", ".join(kinds) or "none"
        raise BadPooling(
            f"modules.json has the modules {found}; "
            "Transformer, Pooling and Normalize are supported"
        )
    kind = "mean"
    if "Pooling" in kinds:
        kind = _kind(_config(folder, modules[kinds.index("Pooling")]))
    return SentenceLayout(
        pooling=PoolingConfig(task="embed", kind=kind, normalize="Normalize" in kinds),
        max_len=_max_len(folder),
    )


def colbert_layout(folder: Path) -> PoolingConfig:
    """The pooling of a checkpoint of ColBERT's own form, whose linear is among its weights.
    Raises `BadPooling`. Source: arXiv:2004.12832."""
    described = folder / "artifact.metadata"
    found = _read(described, dict) if described.is_file() else {}
    markers = (found.get("query_token_id", "[unused0]"), found.get("doc_token_id", "[unused1]"))
    return PoolingConfig(
        kind="tokens",
        size=_vector_size(found.get("dim", 128)),
        markers=(str(markers[0]), str(markers[1])),
    )


def _of_tokens(folder: Path, module: JsonMapping) -> SentenceLayout:
    """The layout of PyLate: a linear after the model, and marks of queries and documents."""
    dense = _config(folder, module)
    function = str(dense.get("activation_function", "Identity")).rpartition(".")[2]
    if dense.get("bias", False) or function != "Identity":
        raise BadPooling(
            "the linear after the model has a bias or a function; neither is supported"
        )
    marks = folder / "config_sentence_transformers.json"
    found = _read(marks, dict) if marks.is_file() else {}
    pooling = PoolingConfig(
        kind="tokens",
        size=_vector_size(dense.get("out_features")),
        markers=(str(found.get("query_prefix") or ""), str(found.get("document_prefix") or "")),
        projection=str(module.get("path", "1_Dense")),
    )
    return SentenceLayout(pooling=pooling, max_len=_max_len(folder))


def _vector_size(found: object) -> int:
    if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found <= MAX_TOKEN_DIMS:
        raise BadPooling(
            f"the vectors of tokens have {str(found)[:64]} numbers; 1 to {MAX_TOKEN_DIMS:,} are "
            "supported"
        )
    return found


def _sparse(config: JsonMapping) -> PoolingConfig:
    for key, supported in (("pooling_strategy", "max"), ("activation_function", "relu")):
        found = config.get(key, supported)
        if found != supported:
            raise BadPooling(f"{key} is {str(found)[:64]!r}; only {supported!r} is supported")
    return PoolingConfig(kind="sparse", normalize=False)


def _config(folder: Path, module: JsonMapping) -> Any:
    """The settings of a module. Raises `BadPooling`."""
    path = str(module.get("path", "1_Pooling"))
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise BadPooling(
            f"modules.json has the path {path[:100]!r}, which is outside of the model's folder"
        )
    return _read(folder / path / "config.json", dict)


def _max_len(folder: Path) -> int:
    """Tokens that the model was trained for; 0: unknown."""
    limits = folder / "sentence_bert_config.json"
    max_len = _read(limits, dict).get("max_seq_length") if limits.is_file() else None
    return max_len if isinstance(max_len, int) and max_len > 0 else 0


def classifier(config: JsonMapping, kind: str) -> PoolingConfig:
    """The pooling of an architecture with a classification head, from its `config.json`.
    Raises `BadPooling`.
    """
    names = config.get("id2label")
    num = len(names) if isinstance(names, dict) else config.get("num_labels", 2)
    if not isinstance(num, int) or isinstance(num, bool) or not 1 <= num <= MAX_LABELS:
        raise BadPooling(f"the model has {num!r} labels; 1 to {MAX_LABELS:,} are supported")
    names = names if isinstance(names, dict) else {}
    labels = tuple(str(names.get(str(i), f"LABEL_{i}")) for i in range(num))
    return PoolingConfig(
        task="classify",
        kind=kind,
        normalize=False,
        labels=labels,
        activation=_activation(config, num),
    )


def _activation(config: JsonMapping, num_labels: int) -> str:
    """The activation that the files name, else the usual one for the number of labels."""
    own = config.get("sentence_transformers")
    said = (
        own.get("activation_fn")
        if isinstance(own, dict)
        else config.get("sbert_ce_default_activation_function")
    )
    if isinstance(said, str):
        name = said.rpartition(".")[2]
        if name not in ACTIVATIONS:
            raise BadPooling(
                f"the activation of the scores is {said[:100]!r}; {', '.join(ACTIVATIONS)} are "
                "supported"
            )
        return ACTIVATIONS[name]
    match config.get("problem_type"):
        case "regression":
            return "none"
        case "multi_label_classification":
            return "sigmoid"
    if num_labels == 1:
        return "sigmoid"
    return "softmax"


def _kind(config: JsonMapping) -> str:
    said = config.get("pooling_mode")
    if isinstance(said, str):
        kinds = [{"lasttoken": "last"}.get(said, said)]
    else:
        kinds = [
            KINDS.get(key, key)
            for key, value in config.items()
            if key.startswith("pooling_mode_") and value is True
        ]
    if len(kinds) != 1 or kinds[0] not in KINDS.values():
        raise BadPooling(
            f"the pooling is {', '.join(kinds) or 'none'}; one of mean, cls and last is supported"
        )
    return kinds[0]


def _read(path: Path, kind: type) -> Any:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise BadPooling(f"{path.name} in {path.parent} cannot be read: {exc}") from exc
    if not isinstance(value, kind):
        raise BadPooling(
            f"{path.name} in {path.parent} is not a JSON {'list' if kind is list else 'object'}"
        )
    return value
