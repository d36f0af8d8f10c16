"""Which models can be divided between ranks, and what each rank has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.executor.driver import MODEL
from weft.assemble.prepare import prepare
from weft.config.decoder import (
    AttentionSpec,
    DecoderSpec,
    LayerInputSpec,
    LayerSpec,
    MlpSpec,
    MoeSpec,
    QkNorm,
    RouterSpec,
)
from weft.config.encoder_spec import EncoderSpec
from weft.config.engine import EngineConfig
from weft.config.options import SettingsError
from weft.config.parallel import check_parallel, fitting_sizes, kept_together, of_rank

SIX = replace(MODEL, name="six", num_heads=6, num_kv_heads=2, intermediate_size=96)
SHARING = LayerSpec(attention=AttentionSpec(kv_of=0))
BESIDE = MoeSpec(router=RouterSpec(num_experts=4, num_chosen=2), size=32, dense_size=64)


def refusal(model: Any, size: int, **settings: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        check_parallel(EngineConfig(tp_size=size, device="cpu", **settings), model)
    return str(caught.value)


def test_a_refusal_says_which_numbers_of_ranks_would_do() -> None:
    assert refusal(SIX, 4) == (
        "--tp-size is 4, which does not divide the 6 heads of six; 1, 2 or 6 would "
        "(heads of keys and values are repeated)"
    )


def test_inner_sizes_of_all_layers_count() -> None:
    layers = (LayerSpec(), LayerSpec(mlp=MlpSpec(size=9)))
    model = replace(SIX, decoder=DecoderSpec(layers=layers))
    assert "the 3 inner numbers of a feed-forward part" in refusal(model, 2)
    assert fitting_sizes(model) == [1]


def test_inner_sizes_of_experts_and_of_what_all_tokens_share_count() -> None:
    experts = MoeSpec(router=RouterSpec(num_experts=4, num_chosen=2), size=12, shared_size=30)
    model = replace(SIX, decoder=DecoderSpec(layers=(LayerSpec(mlp=experts),)))
    assert fitting_sizes(model) == [1, 2, 6]
    assert "the 6 inner numbers of an expert" in refusal(replace(model, num_heads=12), 4)


def test_heads_of_keys_are_divided_or_repeated_evenly() -> None:
    model = replace(SIX, num_heads=12, num_kv_heads=4, intermediate_size=96)
    assert fitting_sizes(model) == [1, 2, 4, 12]
    assert "has 4 heads of keys and values" in refusal(model, 6)


@pytest.mark.parametrize(
    ("changes", "settings", "why"),
    [
        ({"encoder": EncoderSpec()}, {}, "is an encoder"),
        (
            {},
            {"cache_dir": "here", "nnodes": 2, "dist_init_addr": "127.0.0.1:1"},
            "--nnodes is 2: KV of other nodes is not stored (--cache-dir)",
        ),
        (
            {
                "decoder": DecoderSpec(
                    layers=(LayerSpec(attention=AttentionSpec(qk_norm=QkNorm.ALL_HEADS)),)
                )
            },
            {},
            "norms over all heads together",
        ),
        (
            {"decoder": DecoderSpec(layer_inputs=LayerInputSpec(size=8))},
            {},
            "six has inputs for each layer, which are not divided",
        ),
        (
            {"decoder": DecoderSpec(layers=(LayerSpec(), SHARING))},
            {},
            "six has layers that read the K and V of others",
        ),
        (
            {"decoder": DecoderSpec(layers=(LayerSpec(mlp=BESIDE),))},
            {},
            "six has experts beside a dense part",
        ),
    ],
)
def test_what_is_not_divided_is_refused(
    changes: dict[str, Any], settings: dict[str, Any], why: str
) -> None:
    assert why in refusal(replace(SIX, **changes), 2, **settings)


@pytest.mark.parametrize(
    ("changes", "settings", "why"),
    [
        ({}, {}, "six has 2 layers"),
        ({}, {"tp_size": 2}, "--tp-size is 2"),
        ({}, {"nnodes": 2, "dist_init_addr": "127.0.0.1:1"}, "--nnodes is"),
        ({}, {"cache_dir": "here"}, "--cache-dir"),
        ({}, {"split_prefill_layers": 1}, "--split-prefill-layers"),
        ({"encoder": EncoderSpec()}, {}, "is an encoder"),
        (
            {"decoder": DecoderSpec(layer_inputs=LayerInputSpec(size=8))},
            {},
            "six has inputs for each layer, which only the first stage could make",
        ),
        (
            {"decoder": DecoderSpec(layers=(LayerSpec(), SHARING))},
            {},
            "six has layers that read K and V of others, which may be in another stage",
        ),
    ],
)
def test_layers_that_cannot_be_divided_are_refused(
    changes: dict[str, Any], settings: dict[str, Any], why: str
) -> None:
    config = EngineConfig(pp_size=3, device="cpu", **settings)
    with pytest.raises(SettingsError) as caught:
        check_parallel(config, replace(SIX, **changes))
    assert str(caught.value).startswith("--pp-size is 3, but ")
    assert why in str(caught.value)


def test_one_rank_divides_nothing() -> None:
    check_parallel(EngineConfig(), replace(SIX, encoder=EncoderSpec()))
    assert of_rank(SIX, 1) is SIX


def test_repeated_heads_of_keys_take_memory_for_each_rank() -> None:
    assert of_rank(SIX, 6).num_heads == 1
    assert of_rank(SIX, 6).num_kv_heads == 1
    assert kept_together(SIX, 6).kv_bytes_per_token == 3 * SIX.kv_bytes_per_token
    assert kept_together(SIX, 2).kv_bytes_per_token == SIX.kv_bytes_per_token


def test_stages_work_at_once_unless_a_draft_model_has_to_know_all_tokens() -> None:
    def overlaps(**settings: Any) -> bool | None:
        config = EngineConfig(model="weft-nano", device="cpu", threads=1, **settings)
        return prepare(config).config.overlap

    assert not overlaps()
    assert overlaps(pp_size=2)
    assert not overlaps(pp_size=2, overlap=False)
    assert not overlaps(pp_size=2, draft_model="weft-nano-draft", speculative="draft")


@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize("option", ["tp_size", "pp_size"])
def test_kv_that_is_in_several_processes_is_not_handed_over(mode: str, option: str) -> None:
    config = EngineConfig(
        model="weft-nano", device="cpu", threads=1, disaggregation_mode=mode, **{option: 2}
    )
    with pytest.raises(
        SettingsError, match=f"divided between processes.*--{option.replace('_', '-')}"
    ):
        prepare(config)


@pytest.mark.parametrize("option", ["tp_size", "pp_size"])
def test_kv_that_is_in_several_processes_is_not_stored_in_host_memory(option: str) -> None:
    config = EngineConfig(
        model="weft-nano",
        device="cpu",
        threads=1,
        kernels="torch",
        cache_host_gb=0.1,
        **{option: 2},
    )
    with pytest.raises(SettingsError, match=f"--cache-host-gb.*--{option.replace('_', '-')} 1"):
        prepare(config)
