"""The GGUF files of BERT, which `encoders.py` describes."""

from __future__ import annotations

from weft.config.encoder_spec import EncoderNames
from weft.config.families import gguf
from weft.config.families.gguf import ArchitectureKeys, Found
from weft.config.model_errors import UnsupportedModel
from weft.json_types import JsonObject

NAMES = EncoderNames()  # those of BERT
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
        "token_embd": f"bert.{NAMES.words}",
        "token_types": f"bert.{NAMES.types}",
        "position_embd": f"bert.{NAMES.positions}",
        "token_embd_norm": f"bert.{NAMES.embedded_norm}",
    },
    layers=f"bert.{NAMES.layers}",
    parts={
        **dict(zip(("attn_q", "attn_k", "attn_v"), NAMES.qkv, strict=True)),
        "attn_output": NAMES.out,
        "attn_output_norm": NAMES.attention_norm,
        "ffn_up": NAMES.up[0],
        "ffn_down": NAMES.down,
        "layer_output_norm": NAMES.mlp_norm,
    },
)
