"""The architectures of GGUF files: class, own keys, and names of tensors of each, in the terms of a
`config.json`. `config/gguf.py` reads the keys that all architectures share.

A file has the rows of queries and keys in the order in which llama.cpp rotates them. If that order
is adjacent pairs, but transformers' order is halves, weft reorders them into halves (`has_pairs`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.config import gguf_readers as read
from weft.config.gguf_readers import Reader

RMS_EPS = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")  # keys of GGUF, of config.json


@dataclass(frozen=True, kw_only=True)
class StateLayers:
    """The layers that keep a state in place of K and V: they are the layers with this tensor."""

    tensor: str
    kind: str  # in "layer_types"
    attention_has_gate: bool = False  # in the other layers, a gate follows each query head


@dataclass(frozen=True, kw_only=True)
class Architecture:
    name: str  # class in a `config.json`
    more: Reader = read.nothing
    reads: tuple[str, ...] = ()  # keys that change the computation, and that `more` reads
    norm_eps: tuple[str, str] = RMS_EPS
    has_pairs: bool = False
    has_gate: bool = True
    is_partial: bool = False  # only a part of each head may rotate
    has_gate_in_up: bool = False  # one tensor has gates before ups
    splits_qkv: bool = False  # weft splits one tensor of queries, keys and values into three
    has_qk_norm: bool = False  # "use_qk_norm" says whether the file has the weights of this norm
    # Tensors of a layer whose names differ from Llama's → weft's names; a key with ".weight" or
    # ".bias" is a whole name.
    parts: Mapping[str, str] = field(default_factory=dict)
    outside: Mapping[str, str] = field(default_factory=dict)  # the same for tensors outside layers
    layers: str = "model.layers"
    rows: tuple[str, ...] = ()  # vectors that weft reads as matrices of one row
    flat: tuple[str, ...] = ()  # matrices that weft reads as vectors
    convs: tuple[str, ...] = ()  # matrices [n, m] that weft reads as [n, 1, m]
    states: StateLayers | None = None
    by_layer: tuple[str, ...] = ()  # keys with a number for each layer, which `more` reads


_FACTORS = ("embedding_scale", "residual_scale", "attention.scale", "logit_scale")
_NORMS_BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_NORMS = {**_NORMS_BEHIND, "ffn_norm": "pre_feedforward_layernorm"}
_GEMMA4_NAMES = {
    **_GEMMA_NORMS,
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    # Experts
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_gate_exps": "experts.gate_proj",
    "ffn_up_exps": "experts.up_proj",
    "ffn_down_exps": "experts.down_proj",
}
# The name says "after attention"; the norm is before the feed-forward part.
_MLP_NORM = {"post_attention_norm": "post_attention_layernorm"}
_EXPERTS = ("expert_count", "expert_group_count", "expert_weights_scale")
_LAYER_EPS = ("attention.layer_norm_epsilon", "layer_norm_eps")
_MIXTRAL_NAMES = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.w1",
    "ffn_up_exps": "block_sparse_moe.experts.w3",
    "ffn_down_exps": "block_sparse_moe.experts.w2",
}
_QWEN_SHARED = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_QWEN_ROWS = ("ffn_gate_inp_shexp.weight",)
_DELTA_NAMES = {
    **_MLP_NORM,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_STATE_CONVS = ("ssm_conv1d.weight",)
_DELTA = StateLayers(tensor="ssm_conv1d.weight", kind="linear_attention", attention_has_gate=True)
_MAMBA = StateLayers(tensor="ssm_conv1d.weight", kind="linear_attention")
_LFM2_EPS = ("attention.layer_norm_rms_epsilon", "norm_eps")
_LFM2_NAMES = {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
_LFM2_OUTSIDE = {"token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"}
_LFM2_CONVS = ("shortconv.conv.weight",)
_SHORT_CONV = StateLayers(tensor="shortconv.conv.weight", kind="conv")
ARCHITECTURES = {
    # "llama" is also Mistral, SmolLM, and every other model that computes like Llama.
    "llama": Architecture(
        name="LlamaForCausalLM",
        more=read.llama,
        reads=_EXPERTS,
        has_pairs=True,
        parts=_MIXTRAL_NAMES,
    ),
    "qwen2": Architecture(name="Qwen2ForCausalLM"),
    "qwen3": Architecture(name="Qwen3ForCausalLM"),
    "mistral3": Architecture(
        name="MistralForCausalLM",
        more=read.mistral3,
        reads=_EXPERTS,
        has_pairs=True,
        parts=_MIXTRAL_NAMES,
    ),
    # Files have the base of the rotation after "alpha" is applied.
    "hunyuan-dense": Architecture(
        name="HunYuanDenseV1ForCausalLM",
        parts={
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
        },
    ),
    "internlm2": Architecture(name="LlamaForCausalLM", has_pairs=True),
    "exaone": Architecture(name="LlamaForCausalLM"),
    "gemma": Architecture(name="GemmaForCausalLM", more=read.gemma),
    "gemma2": Architecture(
        name="Gemma2ForCausalLM",
        more=read.gemma2,
        reads=("attn_logit_softcapping", "final_logit_softcapping"),
        parts=_GEMMA_NORMS,
    ),
    "gemma3": Architecture(
        name="Gemma3ForCausalLM",
        more=read.gemma3,
        reads=("final_logit_softcapping",),
        parts=_GEMMA_NORMS,
    ),
    "gemma4": Architecture(
        name="Gemma4ForCausalLM",
        more=read.gemma4,
        reads=("final_logit_softcapping", *_EXPERTS),
        parts=_GEMMA4_NAMES,
        outside={
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
        by_layer=("attention.head_count_kv", "feed_forward_length"),
    ),
    "granite": Architecture(
        name="GraniteForCausalLM",
        more=read.granite,
        reads=_FACTORS,
        has_pairs=True,
    ),
    # The file has the factors that follow from the sizes, as factors of Granite.
    "minicpm": Architecture(
        name="GraniteForCausalLM",
        more=read.granite,
        reads=_FACTORS,
        has_pairs=True,
    ),
    "smollm3": Architecture(name="SmolLM3ForCausalLM", has_pairs=True),
    "arcee": Architecture(name="ArceeForCausalLM", has_pairs=True, has_gate=False),
    "olmo2": Architecture(name="Olmo2ForCausalLM", more=read.olmo2, parts=_NORMS_BEHIND),
    "seed_oss": Architecture(name="SeedOssForCausalLM", parts=_MLP_NORM),
    "ernie4_5": Architecture(name="Ernie4_5ForCausalLM", more=read.biases),
    "command-r": Architecture(
        name="CohereForCausalLM",
        more=read.cohere,
        reads=("logit_scale",),
        norm_eps=_LAYER_EPS,
    ),
    "cohere2": Architecture(
        name="Cohere2ForCausalLM",
        more=read.cohere2,
        reads=("logit_scale",),
        norm_eps=_LAYER_EPS,
    ),
    "starcoder2": Architecture(
        name="Starcoder2ForCausalLM",
        more=read.starcoder2,
        norm_eps=("attention.layer_norm_epsilon", "norm_epsilon"),
        has_gate=False,
        parts={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    ),
    "stablelm": Architecture(
        name="StableLmForCausalLM",
        more=read.stablelm,
        reads=("use_parallel_residual",),
        norm_eps=_LAYER_EPS,
        is_partial=True,
    ),
    "exaone4": Architecture(name="Exaone4ForCausalLM", more=read.exaone4, parts=_NORMS_BEHIND),
    "olmo": Architecture(
        name="OlmoForCausalLM",
        norm_eps=("attention.layer_norm_epsilon", "rms_norm_eps"),
        has_pairs=True,
    ),
    "nemotron": Architecture(
        name="NemotronForCausalLM",
        more=read.nemotron,
        norm_eps=("attention.layer_norm_epsilon", "norm_eps"),
        has_gate=False,
        is_partial=True,
    ),
    "phi2": Architecture(
        name="PhiForCausalLM",
        norm_eps=_LAYER_EPS,
        has_gate=False,
        is_partial=True,
        splits_qkv=True,
        parts={"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        outside={"output_norm": "model.final_layernorm"},
    ),
    "phi3": Architecture(
        name="Phi3ForCausalLM",
        more=read.phi3,
        is_partial=True,
        has_gate_in_up=True,
        parts={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
    "gptneox": Architecture(
        name="GPTNeoXForCausalLM",
        more=read.gpt_neox,
        reads=("use_parallel_residual",),
        norm_eps=_LAYER_EPS,
        has_gate=False,
        is_partial=True,
        splits_qkv=True,
        parts={
            "attn_q": "attention.query",
            "attn_k": "attention.key",
            "attn_v": "attention.value",
            "attn_output": "attention.dense",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        outside={
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
        },
        layers="gpt_neox.layers",
    ),
    "chatglm": Architecture(
        name="GlmForCausalLM",
        is_partial=True,
        has_gate_in_up=True,
        splits_qkv=True,
        parts={"ffn_up": "mlp.gate_up_proj"},
    ),
    "glm4": Architecture(
        name="Glm4ForCausalLM",
        is_partial=True,
        has_gate_in_up=True,
        splits_qkv=True,
        parts={
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    # Experts
    "qwen2moe": Architecture(
        name="Qwen2MoeForCausalLM",
        more=read.qwen2_moe,
        reads=_EXPERTS,
        parts=_QWEN_SHARED,
        rows=_QWEN_ROWS,
    ),
    "qwen3moe": Architecture(name="Qwen3MoeForCausalLM", more=read.qwen3_moe, reads=_EXPERTS),
    "olmoe": Architecture(name="OlmoeForCausalLM", more=read.olmoe, reads=_EXPERTS),
    "gpt-oss": Architecture(
        name="GptOssForCausalLM",
        more=read.gpt_oss,
        reads=_EXPERTS,
        parts={
            **_MLP_NORM,
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
    ),
    "granitemoe": Architecture(
        name="GraniteMoeForCausalLM",
        more=read.granite_moe,
        reads=(*_FACTORS, *_EXPERTS),
        has_pairs=True,
    ),
    "glm4moe": Architecture(
        name="Glm4MoeForCausalLM",
        more=read.sigmoid_experts,
        reads=_EXPERTS,
        is_partial=True,
        has_qk_norm=True,
        parts=_MLP_NORM,
    ),
    "dots1": Architecture(
        name="Dots1ForCausalLM",
        more=read.sigmoid_experts,
        reads=_EXPERTS,
    ),
    "minimax-m2": Architecture(
        name="MiniMaxM2ForCausalLM",
        more=read.minimax_m2,
        reads=_EXPERTS,
        is_partial=True,
        parts={
            **_MIXTRAL_NAMES,
            "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
        },
    ),
    # Layers that keep a state
    "granitehybrid": Architecture(
        name="GraniteMoeHybridForCausalLM",
        more=read.granite_hybrid,
        reads=(*_FACTORS, *_EXPERTS),
        has_pairs=True,
        parts={
            "ssm_in": "mamba.in_proj",
            "ssm_conv1d": "mamba.conv1d",
            "ssm_dt.bias": "mamba.dt_bias",
            "ssm_a": "mamba.A_log",
            "ssm_d": "mamba.D",
            "ssm_norm": "mamba.norm",
            "ssm_out": "mamba.out_proj",
        },
        flat=("ssm_a", "ssm_d", "ssm_norm.weight"),
        convs=_STATE_CONVS,
        states=_MAMBA,
    ),
    "lfm2": Architecture(
        name="Lfm2ForCausalLM",
        more=read.lfm2,
        norm_eps=_LFM2_EPS,
        parts=_LFM2_NAMES,
        outside=_LFM2_OUTSIDE,
        convs=_LFM2_CONVS,
        states=_SHORT_CONV,
    ),
    "lfm2moe": Architecture(
        name="Lfm2MoeForCausalLM",
        more=read.lfm2_moe,
        reads=_EXPERTS,
        norm_eps=_LFM2_EPS,
        parts={
            **_LFM2_NAMES,
            "ffn_gate_inp": "feed_forward.gate",
            "ffn_gate_exps": "feed_forward.experts.w1",
            "ffn_up_exps": "feed_forward.experts.w3",
            "ffn_down_exps": "feed_forward.experts.w2",
            "exp_probs_b.bias": "feed_forward.expert_bias",
        },
        outside=_LFM2_OUTSIDE,
        convs=_LFM2_CONVS,
        states=_SHORT_CONV,
    ),
    "qwen3next": Architecture(
        name="Qwen3NextForCausalLM",
        more=read.qwen3_next,
        reads=_EXPERTS,
        is_partial=True,
        parts={**_DELTA_NAMES, **_QWEN_SHARED},
        rows=_QWEN_ROWS,
        convs=_STATE_CONVS,
        states=_DELTA,
    ),
    "qwen35": Architecture(
        name="Qwen3_5ForCausalLM",
        more=read.qwen3_5,
        is_partial=True,
        parts=_DELTA_NAMES,
        convs=_STATE_CONVS,
        states=_DELTA,
    ),
    "qwen35moe": Architecture(
        name="Qwen3_5MoeForCausalLM",
        more=read.qwen3_5_moe,
        reads=_EXPERTS,
        is_partial=True,
        parts={**_DELTA_NAMES, **_QWEN_SHARED},
        rows=_QWEN_ROWS,
        convs=_STATE_CONVS,
        states=_DELTA,
    ),
    "ernie4_5-moe": Architecture(
        name="Ernie4_5_MoeForCausalLM",
        more=read.ernie_moe,
        reads=_EXPERTS,
        parts={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
        rows=("exp_probs_b.bias",),
    ),
}
