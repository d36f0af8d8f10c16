"""A GGUF file of the shape of Qwen3-30B-A3B, or of Qwen3.5-0.8B, with random weights, without a vocabulary.

random_gguf.py TARGET [q8_0|q4_0|q4_k_m] [--layers 4] [--shape experts|states]

Weights are blocks of random codes, with scales that keep their mean at 0 and their deviation at 0.02: nothing of this size
has to be made in floats first. The types are those that llama.cpp gives such a file: in a Q4_K_M, half of the layers
have Q6_K in their values and in their experts' last products.
"""

from __future__ import annotations

import argparse

import gguf
import numpy as np
from numpy.typing import NDArray

ARCHITECTURES = {"experts": "qwen3moe", "states": "qwen35"}
HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 2_048, 32, 4, 128
EXPERTS, CHOSEN, INNER = 128, 8, 768
VOCAB = 32_768  # a part of the original's, which would outweigh the few layers
# Of Qwen3.5-0.8B
STATE_HIDDEN, STATE_INNER, STATE_HEADS, STATE_KV_HEADS, STATE_HEAD_DIM = 1_024, 3_584, 8, 2, 256
LINEAR_HEADS, LINEAR_DIM, TAPS, INTERVAL = 16, 128, 4, 4
STATE_VOCAB = 248_320
DEVIATION = 0.02
Kind = gguf.GGMLQuantizationType
KINDS = {  # of most weights, and of those that are kept finer
    "q8_0": (Kind.Q8_0, Kind.Q8_0),
    "q4_0": (Kind.Q4_0, Kind.Q4_0),
    "q4_k_m": (Kind.Q4_K, Kind.Q6_K),
}
HALF, BYTE = np.float16, np.uint8
RNG = np.random.default_rng(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("kind", nargs="?", choices=KINDS, default="q4_0")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--shape", choices=ARCHITECTURES, default="experts")
    options = parser.parse_args()
    writer = gguf.GGUFWriter(options.target, ARCHITECTURES[options.shape])
    usual, finer = KINDS[options.kind]
    if options.shape == "experts":
        add_model_of_experts(writer, options.layers, usual, finer)
    else:
        add_model_with_states(writer, options.layers, usual)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_model_of_experts(
    writer: gguf.GGUFWriter, num_layers: int, usual: Kind, finer: Kind
) -> None:
    add_keys(writer, num_layers)
    add(writer, "token_embd", usual, (VOCAB, HIDDEN))
    add(writer, "output", Kind.Q6_K, (VOCAB, HIDDEN))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for layer in range(num_layers):
        add_layer(writer, layer, usual, finer if layer % 2 == 0 else usual)


def add_model_with_states(writer: gguf.GGUFWriter, num_layers: int, kind: Kind) -> None:
    """Of four layers three keep a state by the gated delta rule; the embedding is the head, too."""
    add_state_keys(writer, num_layers)
    add(writer, "token_embd", kind, (STATE_VOCAB, STATE_HIDDEN))
    writer.add_tensor("output_norm.weight", np.ones(STATE_HIDDEN, np.float32))
    for layer in range(num_layers):
        block = f"blk.{layer}"
        for name in ("attn_norm", "post_attention_norm"):
            writer.add_tensor(f"{block}.{name}.weight", np.ones(STATE_HIDDEN, np.float32))
        add(writer, f"{block}.ffn_gate", kind, (STATE_INNER, STATE_HIDDEN))
        add(writer, f"{block}.ffn_up", kind, (STATE_INNER, STATE_HIDDEN))
        add(writer, f"{block}.ffn_down", kind, (STATE_HIDDEN, STATE_INNER))
        if (layer + 1) % INTERVAL:
            add_delta(writer, block, kind)
        else:
            add_gated_attention(writer, block, kind)


def add_delta(writer: gguf.GGUFWriter, block: str, kind: Kind) -> None:
    size = LINEAR_HEADS * LINEAR_DIM
    add(writer, f"{block}.attn_qkv", kind, (3 * size, STATE_HIDDEN))
    add(writer, f"{block}.attn_gate", kind, (size, STATE_HIDDEN))
    add(writer, f"{block}.ssm_alpha", kind, (LINEAR_HEADS, STATE_HIDDEN))
    add(writer, f"{block}.ssm_beta", kind, (LINEAR_HEADS, STATE_HIDDEN))
    add(writer, f"{block}.ssm_out", kind, (STATE_HIDDEN, size))
    taps = RNG.standard_normal((3 * size, TAPS), np.float32) / 2
    writer.add_tensor(f"{block}.ssm_conv1d.weight", taps)
    writer.add_tensor(f"{block}.ssm_dt.bias", np.zeros(LINEAR_HEADS, np.float32))
    writer.add_tensor(f"{block}.ssm_a", np.full(LINEAR_HEADS, -0.1, np.float32))
    writer.add_tensor(f"{block}.ssm_norm.weight", np.ones(LINEAR_DIM, np.float32))


def add_gated_attention(writer: gguf.GGUFWriter, block: str, kind: Kind) -> None:
    size, kv_size = STATE_HEADS * STATE_HEAD_DIM, STATE_KV_HEADS * STATE_HEAD_DIM
    add(writer, f"{block}.attn_q", kind, (2 * size, STATE_HIDDEN))
    add(writer, f"{block}.attn_k", kind, (kv_size, STATE_HIDDEN))
    add(writer, f"{block}.attn_v", kind, (kv_size, STATE_HIDDEN))
    add(writer, f"{block}.attn_output", kind, (STATE_HIDDEN, size))
    for name in ("attn_q_norm", "attn_k_norm"):
        writer.add_tensor(f"{block}.{name}.weight", np.ones(STATE_HEAD_DIM, np.float32))


def add_state_keys(writer: gguf.GGUFWriter, num_layers: int) -> None:
    writer.add_context_length(4_096)
    writer.add_embedding_length(STATE_HIDDEN)
    writer.add_block_count(num_layers)
    writer.add_feed_forward_length(STATE_INNER)
    writer.add_head_count(STATE_HEADS)
    writer.add_head_count_kv(STATE_KV_HEADS)
    writer.add_key_length(STATE_HEAD_DIM)
    writer.add_value_length(STATE_HEAD_DIM)
    writer.add_rope_freq_base(1e7)
    writer.add_rope_dimension_count(STATE_HEAD_DIM // 4)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_ssm_conv_kernel(TAPS)
    writer.add_ssm_inner_size(LINEAR_HEADS * LINEAR_DIM)
    writer.add_ssm_state_size(LINEAR_DIM)
    writer.add_ssm_time_step_rank(LINEAR_HEADS)
    writer.add_ssm_group_count(LINEAR_HEADS)
    writer.add_uint32(f"{ARCHITECTURES['states']}.full_attention_interval", INTERVAL)
    writer.add_vocab_size(STATE_VOCAB)
    writer.add_tokenizer_model("none")


def add_keys(writer: gguf.GGUFWriter, num_layers: int) -> None:
    writer.add_context_length(40_960)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(num_layers)
    writer.add_feed_forward_length(6_144)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(CHOSEN)
    writer.add_expert_feed_forward_length(INNER)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("none")


def add_layer(writer: gguf.GGUFWriter, layer: int, usual: Kind, finer: Kind) -> None:
    block = f"blk.{layer}"
    for name, size in (("attn_norm", HIDDEN), ("ffn_norm", HIDDEN)):
        writer.add_tensor(f"{block}.{name}.weight", np.ones(size, np.float32))
    for name in ("attn_q_norm", "attn_k_norm"):
        writer.add_tensor(f"{block}.{name}.weight", np.ones(HEAD_DIM, np.float32))
    router = RNG.standard_normal((EXPERTS, HIDDEN), np.float32) * np.float32(DEVIATION)
    writer.add_tensor(f"{block}.ffn_gate_inp.weight", router)
    add(writer, f"{block}.attn_q", usual, (HEADS * HEAD_DIM, HIDDEN))
    add(writer, f"{block}.attn_k", usual, (KV_HEADS * HEAD_DIM, HIDDEN))
    add(writer, f"{block}.attn_v", finer, (KV_HEADS * HEAD_DIM, HIDDEN))
    add(writer, f"{block}.attn_output", usual, (HIDDEN, HEADS * HEAD_DIM))
    add(writer, f"{block}.ffn_gate_exps", usual, (EXPERTS, INNER, HIDDEN))
    add(writer, f"{block}.ffn_up_exps", usual, (EXPERTS, INNER, HIDDEN))
    add(writer, f"{block}.ffn_down_exps", finer, (EXPERTS, HIDDEN, INNER))


def add(writer: gguf.GGUFWriter, name: str, kind: Kind, shape: tuple[int, ...]) -> None:
    *rows, size = shape
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    num_blocks = int(np.prod(rows)) * size // block_size
    blocks = RNG.integers(0, 256, (num_blocks, block_bytes), BYTE)
    set_scales(kind, blocks)
    data = blocks.reshape(*rows, size // block_size * block_bytes)
    writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)


def set_scales(kind: Kind, blocks: NDArray[np.uint8]) -> None:
    """Codes of 4 bits have a deviation of 4.6, those of 6 bits one of 18.5, those of 8 one of 74."""
    if kind is Kind.Q8_0:
        blocks[:, :2] = half(DEVIATION / 74)
    elif kind is Kind.Q4_0:
        blocks[:, :2] = half(DEVIATION / 4.6)
    elif kind is Kind.Q4_K:
        # All of the 8 fine scales and minimums are 32, of which the first bytes have the upper bits
        # of the last four; each minimum is the mean of its codes.
        blocks[:, :2] = half(DEVIATION / 4.6 / 32)
        blocks[:, 2:4] = half(DEVIATION / 4.6 / 32 * 7.5)
        blocks[:, 4:12] = 32 | 32 >> 4 << 6
        blocks[:, 12:16] = 0
    else:
        blocks[:, 192:208] = 32
        blocks[:, 208:] = half(DEVIATION / 18.5 / 32)


def half(value: float) -> NDArray[np.uint8]:
    return np.array([value], HALF).view(BYTE)


if __name__ == "__main__":
    main()
