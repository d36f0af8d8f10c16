"""A Qwen3 model folder as GGUF, without a vocabulary. convert_gguf.py SOURCE TARGET [KIND]

KIND is q4_0, q4_k_m or q8_0: llama.cpp itself packs the file, as it does for files that are published. Without it the
file has the tensors in bfloat16, and `llama-cpp-python` is not needed; `quantise_whole.py` packs it with ik_llama.cpp.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import gguf
import numpy as np
from safetensors import safe_open

KINDS = {"q4_0": 2, "q8_0": 7, "q4_k_m": 15}  # LLAMA_FTYPE_MOSTLY_*

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def name_of(name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def main() -> None:
    source, target, *kind = sys.argv[1:]
    if not kind:
        write(Path(source), target)
        return
    whole = f"{target}.bf16"
    write(Path(source), whole)
    pack(whole, target, KINDS[kind[0]])
    Path(whole).unlink()


def write(source: Path, target: str) -> None:
    """The folder's tensors as bfloat16."""
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(target, "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    stored = gguf.GGMLQuantizationType.BF16
    with safe_open(f"{source}/model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (it is not a dict)
            values = file.get_tensor(name).float().numpy()
            if values.ndim == 1:
                writer.add_tensor(name_of(name), values)
            else:
                packed = gguf.quants.quantize(values.astype(np.float32), stored)
                writer.add_tensor(name_of(name), packed, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def pack(source: str, target: str, kind: int) -> None:
    import llama_cpp as ll

    params = ll.llama_model_quantize_default_params()
    params.ftype = kind
    if ll.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)):
        sys.exit(f"llama.cpp could not pack {source}")


if __name__ == "__main__":
    main()
