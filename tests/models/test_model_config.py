from __future__ import annotations

import json
import math

import pytest

from weft.config.decoder import AttentionSpec, DecoderSpec, QkNorm, RopeConfig
from weft.config.model import FAMILIES, ModelConfig, ModelNotFound, UnsupportedModel

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}


def read(generation=None, **changes) -> ModelConfig:
    return ModelConfig.from_hf({**LLAMA, **changes}, "test", generation)


def family(name: str, **changes) -> ModelConfig:
    return read(architectures=[f"{name}ForCausalLM"], **changes)


def attention(config: ModelConfig) -> AttentionSpec:
    """That of the first layer."""
    return config.decoder.layer(0).attention


def test_what_is_missing_follows_from_what_is_there():
    config = read()
    assert config.head_dim == 16
    assert config.num_kv_heads == 4
    assert config.decoder == DecoderSpec()
    assert not config.tie_embeddings
    assert config.bos_token_id is None
    assert config.eos_token_ids == ()
    assert config.kv_bytes_per_token == 2 * 2 * 4 * 16 * 2


def test_null_is_as_good_as_missing():
    assert (
        read(head_dim=None, num_key_value_heads=None, rope_scaling=None, sliding_window=None)
        == read()
    )


def test_families_know_their_biases_and_norms():
    llama = family("Llama", attention_bias=True, mlp_bias=True).decoder.layer(0)
    assert (llama.attention.qkv_bias, llama.attention.out_bias, llama.mlp.bias) == (True,) * 3
    mistral = attention(family("Mistral", attention_bias=True))
    assert (mistral.qkv_bias, mistral.out_bias) == (False, False)
    qwen2 = attention(family("Qwen2"))
    assert (qwen2.qkv_bias, qwen2.out_bias, qwen2.qk_norm) == (True, False, QkNorm.NONE)
    qwen3 = attention(family("Qwen3"))
    assert (qwen3.qkv_bias, qwen3.out_bias, qwen3.qk_norm) == (False, False, QkNorm.HEAD)
    assert family("Qwen3").head_dim == 128


def test_sliding_window_counts_only_where_it_is_used():
    assert family("Llama", sliding_window=64).window(0) == 0
    assert family("Mistral", sliding_window=64).window(0) == 64
    assert family("Qwen2", sliding_window=64).window(0) == 0
    switched = family("Qwen2", sliding_window=64, use_sliding_window=True, max_window_layers=1)
    assert [switched.window(layer) for layer in range(2)] == [0, 64]
    listed = {"layer_types": ["sliding_attention", "full_attention"]}
    listed_config = family("Qwen3", sliding_window=64, use_sliding_window=True, **listed)
    assert [listed_config.window(layer) for layer in range(2)] == [64, 0]


def test_old_and_new_spelling_of_rope_are_the_same():
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    old = read(rope_theta=5e5, rope_scaling={"type": "llama3", **scaling})
    new = read(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    assert old == new
    assert attention(new).rope == RopeConfig(
        theta=5e5, scaling="llama3", factor=8.0, original_max_position=512
    )


def test_yarn_lengthens_the_context_and_tempers_attention():
    config = read(
        rope_scaling={"type": "yarn", "factor": 4, "original_max_position_embeddings": 2048}
    )
    assert config.max_position == 8192
    assert attention(config).rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    given = read(rope_scaling={"type": "yarn", "factor": 4, "attention_factor": 1.5})
    assert attention(given).rope.attention_factor == 1.5


def test_dynamic_rope_is_plain_up_to_the_length_trained_for():
    assert read(rope_scaling={"type": "dynamic", "factor": 2.0}) == read()


def test_dtype_has_two_spellings():
    assert read(torch_dtype=None, dtype="float16").dtype == "float16"
    assert read(torch_dtype=None).dtype == "float32"


def test_end_tokens_of_both_files_are_merged():
    assert read({"eos_token_id": [7, 9]}, eos_token_id=9).eos_token_ids == (9, 7)
    assert read({"eos_token_id": 5}).eos_token_ids == (5,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, f"supported are {', '.join(FAMILIES)}"),
        (
            {"architectures": ["NewModel"], "auto_map": {"AutoModel": "x.Y"}},
            "auto_map.* is never run",
        ),
        ({"architectures": None}, "no 'architectures'"),
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"hidden_size": "64"}, "hidden_size is '64'; .* as int"),
        ({"vocab_size": 0}, "vocab_size is 0; .* at least 1"),
        ({"num_key_value_heads": 3}, "multiple of the KV heads"),
        ({"rms_norm_eps": None}, "no 'rms_norm_eps'"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            r"not supported: gptq of None bits\. Supported are gptq and awq",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        (
            {"rope_scaling": {"type": "longrope"}},
            "rope type 'longrope' is not supported; supported are default",
        ),
        ({"rope_scaling": {"type": "linear"}}, "no 'factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
    ],
)
def test_what_is_not_supported_is_named(changes, message):
    with pytest.raises(UnsupportedModel, match=message):
        read(**changes)


def test_folder_is_read_with_its_generation_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3]}))
    config = ModelConfig.from_folder(tmp_path)
    assert config.name == tmp_path.name
    assert config.eos_token_ids == (3,)
    assert ModelConfig.from_folder(tmp_path, "org/model").name == "org/model"


@pytest.mark.parametrize(
    ("content", "message"), [(None, "no config.json"), ("{", "cannot be read"), ("[]", "object")]
)
def test_folder_without_readable_config_is_no_model(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelNotFound, match=message):
        ModelConfig.from_folder(tmp_path)
