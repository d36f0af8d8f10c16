"""Encoders: BERT and the families that came after it."""

from __future__ import annotations

from dataclasses import replace

from weft.config.config_json import get, number, require, rope_theta, section, size
from weft.config.encoder_spec import (
    ClassifierSpec,
    DisentangledSpec,
    DistanceBuckets,
    EncoderLayerSpec,
    EncoderNames,
    EncoderSpec,
    VocabularySpec,
)
from weft.config.families.bert import GGUF
from weft.config.families.family import FULL, SLIDING, Config, Family, activation, flag, layer_types
from weft.config.families.rope import rope_of
from weft.config.model_errors import UnsupportedModel

ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
GATES = ("gelu", "silu", "gelu_pytorch_tanh")
# In BERT's checkpoints, the first projection of the classifier is the pooler of the base model.
_BERT_HEAD = ClassifierSpec(dense="bert.pooler.dense", out="classifier")
_ROBERTA_HEAD = ClassifierSpec(dense="classifier.dense", out="classifier.out_proj")
_ROBERTA_VOCABULARY = VocabularySpec(
    dense="lm_head.dense",
    norm="lm_head.layer_norm",
    out="lm_head.decoder",
    bias="lm_head.bias",
)


def _bert(config: Config) -> EncoderSpec:
    require(config, "position_embedding_type", "absolute")
    acts = activation(config, ACTIVATIONS)
    return EncoderSpec(
        activation=acts,
        num_positions=size(config, "max_position_embeddings"),
        num_token_types=size(config, "type_vocab_size"),
        classifier=_BERT_HEAD,
        vocabulary=VocabularySpec(
            dense="cls.predictions.transform.dense",
            norm="cls.predictions.transform.LayerNorm",
            out="cls.predictions.decoder",
            bias="cls.predictions.bias",
            activation=acts,
        ),
    )


def _roberta(config: Config) -> EncoderSpec:
    return replace(
        _bert(config),
        base="roberta",
        first_position=1 + get(config, "pad_token_id", int, 1),
        classifier=_ROBERTA_HEAD,
        vocabulary=_ROBERTA_VOCABULARY,
    )


def _roberta_xl(config: Config) -> EncoderSpec:
    names = EncoderNames(
        embedded_norm="",
        attention_norm="attention.self_attn_layer_norm",
        mlp_norm="LayerNorm",
        final_norm="encoder.LayerNorm",
    )
    return replace(_roberta(config), names=names, norms_first=True)


def _distilbert(config: Config) -> EncoderSpec:
    acts = activation(config, ("gelu", "relu"), "activation")
    return EncoderSpec(
        names=EncoderNames(
            layers="transformer.layer",
            qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
            out="attention.out_lin",
            attention_norm="sa_layer_norm",
            up=("ffn.lin1",),
            down="ffn.lin2",
            mlp_norm="output_layer_norm",
        ),
        base="distilbert",
        activation=acts,
        num_positions=size(config, "max_position_embeddings"),
        classifier=ClassifierSpec(dense="pre_classifier", out="classifier", activation="relu"),
        vocabulary=VocabularySpec(
            dense="vocab_transform",
            norm="vocab_layer_norm",
            out="vocab_projector",
            bias="vocab_projector.bias",
            activation=acts,
        ),
    )


def _electra(config: Config) -> EncoderSpec:
    embedding_size = size(config, "embedding_size", size(config, "hidden_size"))
    is_projected = embedding_size != size(config, "hidden_size")
    return replace(
        _bert(config),
        names=EncoderNames(projected="embeddings_project" if is_projected else ""),
        base="electra",
        embedding_size=embedding_size,
        classifier=replace(_ROBERTA_HEAD, activation="gelu"),
        vocabulary=None,
    )


def _mpnet(config: Config) -> EncoderSpec:
    return EncoderSpec(
        names=EncoderNames(
            qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
            out="attention.attn.o",
            attention_norm="attention.LayerNorm",
        ),
        base="mpnet",
        activation=activation(config, ACTIVATIONS),
        num_positions=size(config, "max_position_embeddings"),
        first_position=2,  # whatever the padding token is
        buckets=DistanceBuckets(
            name="encoder.relative_attention_bias",
            num_buckets=size(config, "relative_attention_num_buckets", 32),
            max_distance=128,
        ),
        classifier=_ROBERTA_HEAD,
        vocabulary=_ROBERTA_VOCABULARY,
    )


def _modernbert(config: Config) -> EncoderSpec:
    period = size(config, "global_attn_every_n_layers", 3)
    kinds = layer_types(config, lambda layer: SLIDING if layer % period else FULL)
    # A token sees half of the window on either side, besides itself.
    window = size(config, "local_attention", 128) // 2 + 1
    parameters = section(config, "rope_parameters")
    thetas = {
        FULL: rope_theta(config, 160_000.0, key="global_rope_theta"),
        SLIDING: rope_theta(config, key="local_rope_theta"),
    }
    layers = []
    for kind in kinds:
        values = section(parameters, kind)
        rope = rope_of(config, values, theta=thetas[kind])
        layers.append(EncoderLayerSpec(window=0 if kind == FULL else window, rope=rope))
    head_bias = flag(config, "classifier_bias")
    acts = activation(config, ACTIVATIONS, "classifier_activation")
    kind = get(config, "classifier_pooling", str, "cls")
    if kind not in ("cls", "mean"):
        raise UnsupportedModel(f"classifier_pooling is {kind[:64]!r}; it must be 'cls' or 'mean'")
    return EncoderSpec(
        names=EncoderNames(
            words="embeddings.tok_embeddings",
            embedded_norm="embeddings.norm",
            layers="layers",
            qkv=("attn.Wqkv",),
            out="attn.Wo",
            attention_norm="attn_norm",
            up=("mlp.Wi",),
            down="mlp.Wo",
            mlp_norm="mlp_norm",
            final_norm="final_norm",
        ),
        base="model",
        layers=tuple(layers),
        activation=activation(config, GATES, "hidden_activation"),
        is_gated=True,
        norms_first=True,
        skips_first_norm=True,
        qkv_bias=flag(config, "attention_bias"),
        out_bias=flag(config, "attention_bias"),
        mlp_bias=flag(config, "mlp_bias"),
        norm_bias=flag(config, "norm_bias"),
        classifier=ClassifierSpec(
            dense="head.dense",
            dense_bias=head_bias,
            norm="head.norm",
            out="classifier",
            activation=acts,
            kind=kind,
        ),
        vocabulary=VocabularySpec(
            dense="head.dense",
            dense_bias=head_bias,
            norm="head.norm",
            out="decoder",
            bias="decoder.bias" if flag(config, "decoder_bias", True) else "",
            activation=acts,
        ),
    )


def _nomic(config: Config) -> EncoderSpec:
    """Keys are the publisher's, or those of transformers; tensors have the publisher's names."""
    for key in ("prenorm", "parallel_block", "use_rms_norm", "rotary_emb_interleaved"):
        require(config, key, False)
    require(config, "rotary_emb_fraction", 1.0)
    require(config, "rotary_emb_scale_base", None)
    require(config, "rotary_scaling_factor", None)
    require(config, "num_experts", 0)
    has_bias = flag(config, "mlp_fc1_bias")
    require(config, "mlp_fc2_bias", has_bias)
    gates = {"swiglu": "silu", "geglu": "gelu", "silu": "silu", "gelu": "gelu"}
    theta = number(config, "rotary_emb_base", 1_000.0, above=1.0)
    rope = rope_of(config, section(config, "rope_parameters"), theta=theta)
    return EncoderSpec(
        names=EncoderNames(
            embedded_norm="emb_ln",
            layers="encoder.layers",
            qkv=("attn.Wqkv",),
            out="attn.out_proj",
            attention_norm="norm1",
            up=("mlp.fc12", "mlp.fc11"),
            down="mlp.fc2",
            mlp_norm="norm2",
        ),
        base="nomic_bert",
        layers=(EncoderLayerSpec(rope=rope),),
        activation=gates[activation(config, tuple(gates))],
        is_gated=True,
        qkv_bias=flag(config, "qkv_proj_bias"),
        out_bias=flag(config, "qkv_proj_bias"),
        mlp_bias=has_bias,
        num_token_types=size(config, "type_vocab_size"),
        classifier=replace(_BERT_HEAD, dense="nomic_bert.pooler.dense"),
    )


def _deberta(config: Config) -> EncoderSpec:
    require(config, "conv_kernel_size", 0)
    hidden = size(config, "hidden_size")
    embedding_size = size(config, "embedding_size", hidden)
    max_position = size(config, "max_position_embeddings")
    num_types = get(config, "type_vocab_size", int, 0)
    has_positions = flag(config, "position_biased_input", True)
    projected = "embeddings.embed_proj" if embedding_size != hidden else ""
    return EncoderSpec(
        names=EncoderNames(
            projected=projected,
            qkv=(
                "attention.self.query_proj",
                "attention.self.key_proj",
                "attention.self.value_proj",
            ),
        ),
        base="deberta",
        activation=activation(config, ACTIVATIONS),
        embedding_size=embedding_size,
        projection_bias=False,
        projection_norms=True,
        num_positions=max_position if has_positions else 0,
        num_token_types=max(num_types, 0),
        disentangled=_disentangled(config, max_position),
        classifier=ClassifierSpec(
            dense="pooler.dense",
            out="classifier",
            activation=activation(config, ("gelu", "tanh", "relu"), "pooler_hidden_act"),
        ),
    )


def _disentangled(config: Config, max_position: int) -> DisentangledSpec | None:
    if not flag(config, "relative_attention"):
        return None
    asked = config.get("pos_att_type") or []
    kinds = asked.split("|") if isinstance(asked, str) else asked
    unknown = [str(kind)[:64] for kind in kinds if kind not in ("c2p", "p2c")]
    if unknown:
        raise UnsupportedModel(f"pos_att_type has {unknown[0]!r}; c2p and p2c are supported")
    norms = get(config, "norm_rel_ebd", str, "none").lower().split("|")
    farthest = get(config, "max_relative_positions", int, -1)
    shares = flag(config, "share_att_key")
    attention = "attention.self."
    own = (f"{attention}pos_key_proj", f"{attention}pos_query_proj")
    return DisentangledSpec(
        name="encoder.rel_embeddings",
        norm="encoder.LayerNorm" if "layer_norm" in map(str.strip, norms) else "",
        by_key="c2p" in kinds,
        by_query="p2c" in kinds,
        projections=("", "") if shares else own,
        max_distance=farthest if farthest > 0 else max_position,
        num_buckets=max(get(config, "position_buckets", int, -1), 0),
    )


_DISTIL_KEYS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
}
_PUBLISHED_KEYS = {
    "hidden_act": "activation_function",
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
}
_NOMIC_KEYS = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 2048,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}


_ROBERTA = Family(encoder=_roberta, norm_eps_key="layer_norm_eps")
ARCHITECTURES = {
    "HF_ColBERT": Family(encoder=_bert, norm_eps_key="layer_norm_eps", task="tokens"),
}
ENCODERS = {
    "Bert": Family(encoder=_bert, norm_eps_key="layer_norm_eps", gguf={"bert": GGUF}),
    "Roberta": _ROBERTA,
    "XLMRoberta": _ROBERTA,
    "Camembert": _ROBERTA,
    "XLMRobertaXL": Family(encoder=_roberta_xl, norm_eps_key="layer_norm_eps"),
    "DistilBert": Family(
        encoder=_distilbert,
        norm_eps_key="layer_norm_eps",
        aliases=_DISTIL_KEYS,
        defaults={"layer_norm_eps": 1e-12},
    ),
    "Electra": Family(encoder=_electra, norm_eps_key="layer_norm_eps"),
    "MPNet": Family(encoder=_mpnet, norm_eps_key="layer_norm_eps"),
    "ModernBert": Family(encoder=_modernbert, norm_eps_key="norm_eps", defaults={"norm_eps": 1e-5}),
    "NomicBert": Family(
        encoder=_nomic,
        norm_eps_key="layer_norm_eps",
        aliases=_PUBLISHED_KEYS,
        defaults=_NOMIC_KEYS,
    ),
    "DebertaV2": Family(
        encoder=_deberta, norm_eps_key="layer_norm_eps", defaults={"layer_norm_eps": 1e-7}
    ),
}
