"""For which settings and models engines can have experts between them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.executor.driver import MODEL
from weft.config.decoder import DecoderSpec, LayerSpec, MoeSpec, RouterSpec
from weft.config.draft_model import no_head
from weft.config.engine import EngineConfig
from weft.config.lockstep import elsewhere_bytes, with_engines
from weft.config.options import SettingsError
from weft.config.parallel import check_parallel

EXPERTS = MoeSpec(router=RouterSpec(num_experts=4, num_chosen=2), size=12)
MIXED = replace(
    MODEL, name="mixed", decoder=DecoderSpec(layers=(LayerSpec(), LayerSpec(mlp=EXPERTS)))
)


def settings(**changes: Any) -> EngineConfig:
    return EngineConfig(enable_dp_attention=True, device="cpu", **changes)


def refusal(model: Any, num_engines: int, **changes: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        check_parallel(with_engines(settings(**changes), num_engines), model)
    return str(caught.value)


@pytest.mark.parametrize(
    "given", [{}, {"tp_size": 2}, {"ep_size": 2}, {"tp_size": 2, "ep_size": 2}]
)
def test_engines_may_be_counted_as_others_count_them(given: dict[str, int]) -> None:
    config = with_engines(settings(**given), 2)
    assert config.tp_size == 1
    assert config.ep_size == 2
    check_parallel(config, MIXED)


def test_other_numbers_are_refused() -> None:
    assert refusal(MIXED, 2, tp_size=4) == (
        "--tp-size is 4; with --enable-dp-attention it is that of --dp-size, 2, or 1"
    )
    assert refusal(MIXED, 1) == "--enable-dp-attention is for several engines, and --dp-size is 1"
    with pytest.raises(SettingsError, match="--ep-size is 2, which needs --enable-dp-attention"):
        with_engines(EngineConfig(ep_size=2), 2)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"pp_size": 2}, "--pp-size is 2"),
        ({"max_loaded_loras": 1}, "adapters"),
        ({"draft_model": "small"}, "draft model"),
        ({"split_prefill_layers": 1}, "all layers of a step"),
    ],
)
def test_what_engines_cannot_do_together_is_refused(changes: dict[str, Any], why: str) -> None:
    assert why in refusal(MIXED, 2, **changes)


def test_a_model_needs_experts_for_all_engines() -> None:
    assert "MODEL has no experts".lower() in refusal(replace(MODEL, name="model"), 2).lower()
    assert refusal(MIXED, 5).endswith("mixed has 4 experts for 5 engines")


def test_one_engine_alone_has_nobody_to_share_experts_with() -> None:
    with pytest.raises(SettingsError, match="only one engine"):
        check_parallel(settings(), MIXED)


def test_experts_that_others_have_take_no_memory() -> None:
    config = with_engines(settings(), 4)
    per_number = MIXED.weights_bytes / MIXED.num_parameters
    numbers = 4 * 3 * 12 * MIXED.hidden_size * 3 / 4
    assert elsewhere_bytes(config, MIXED) == pytest.approx(numbers * per_number, rel=0.01)
    assert elsewhere_bytes(EngineConfig(), MIXED) == 0


def test_a_head_is_left_out_where_engines_divide_experts() -> None:
    config = with_engines(settings(), 2)
    assert "run together" in no_head(config, MIXED)
    assert not no_head(replace(config, enable_dp_attention=False), MIXED)
