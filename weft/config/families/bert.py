"""The GGUF files of BERT, which `encoders.py` describes."""

from __future__ import annotations

from weft.config.families import gguf
from weft.config.families.gguf import ArchitectureKeys, Found
from weft.config.model_errors import UnsupportedModel
from weft.json_types import JsonObject

# By `pooling_type`; the key is only in weft's own config.json, for `assemble/model_folder.py`.
POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken"}


def _gguf_bert(keys: ArchitectureKeys, found: Found) -> JsonObject:
    kind = keys.number("pooling_type", int, 1)
    if kind not in POOLINGS:
        raise UnsupportedModel(
            f"{keys.full('pooling_type')} is {kind}; {', '.join(map(str, POOLINGS))} are supported"
        )
    return {
        "pooling": POOLINGS[kind],
        "type_vocab_size": keys.num_rows("token_types.weight"),
        "tie_word_embeddings": True,
    }


GGUF = gguf.Architecture(
    more=_gguf_bert,
    norm_eps=gguf.LAYER_NORM_EPS,
    has_gate=False,
    outside={
        "token_embd": "bert.embeddings.word_embeddings",
        "token_types": "bert.embeddings.token_type_embeddings",
        "position_embd": "bert.embeddings.position_embeddings",
        "token_embd_norm": "bert.embeddings.LayerNorm",
    },
    layers="bert.encoder.layer",
    parts={
        "attn_q": "attention.self.query",
        "attn_k": "attention.self.key",
        "attn_v": "attention.self.value",
        "attn_output": "attention.output.dense",
        "attn_output_norm": "attention.output.LayerNorm",
        "ffn_up": "intermediate.dense",
        "ffn_down": "output.dense",
        "layer_output_norm": "output.LayerNorm",
    },
)
