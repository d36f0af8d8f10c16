"""What adapters add, beside the model with the same in its weights."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.driver import Turn, make_driver
from tests.executor.lora.adapters import (
    ALL,
    ENDS,
    FAMILIES,
    FUSED,
    GEMMA4_FAMILIES,
    QV,
    TABLE,
    load,
    logprobs_with,
    make_adapter,
    merged_logprobs,
)
from tests.seeds import every_second

TOKENS = [(7 * number + 3) % 120 + 5 for number in range(23)]
KINDS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "rank 4": (ALL, {"rank": 4}),
    "rank 8": (ALL, {"rank": 8, "dtype": torch.float16}),
    "rank 64": (ALL, {"rank": 64}),
    "rank 80": (ALL, {"rank": 80, "use_rslora": True}),
    "rslora": (ALL, {"rank": 8, "use_rslora": True, "lora_alpha": 4}),
    "patterns": (
        ALL,
        {
            "rank": 8,
            "ranks": {"q_proj": 3, "down_proj": 20},
            "alphas": {"q_proj": 5.5, "up_proj": 1},
        },
    ),
    "q and v": (QV, {"rank": 8, "target_modules": ["q_proj", "v_proj"]}),
    "gates": (("mlp.gate_proj",), {"rank": 8}),
    "embedding": ((TABLE,), {"rank": 20, "use_rslora": True}),
    "head": (("lm_head",), {"rank": 8}),
    "ends": (ENDS, {"rank": 8, "ranks": {"lm_head": 70}, "dtype": torch.float16}),
}


CASES = [*product(FAMILIES, KINDS), *product(GEMMA4_FAMILIES, ("rank 8", "ends"))]


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize(
    "case", every_second(CASES), ids=[f"{family}, {kind}" for family, kind in CASES]
)
def test_logits_are_those_of_merged_weights(
    base_of, drive, tmp_path: Path, kernels: str, case: tuple[str, str]
) -> None:
    family, kind = case
    endings, settings = KINDS[kind]
    if family == "phi3":
        if endings is ALL and kind != "patterns":
            endings = FUSED
        elif not set(endings) <= set(ENDS):
            pytest.skip("these projections are one in this family")
    base = base_of(family)
    modules = list(endings) if set(endings) <= set(ENDS) else base.modules(endings)
    made = make_adapter(base, tmp_path / "adapter", modules, **settings)
    driver = drive(base, max_rank=80, kernels=kernels)
    assert load(driver, base, 0, made.folder).ok
    merged = merged_logprobs(base, made, TOKENS)
    plain = merged_logprobs(base, made._replace(deltas={}), TOKENS)
    assert (merged - plain).abs().max() > 0.05
    # A chunk, another one, then token by token.
    for begin, end in ((0, 9), (9, 20), (20, 21), (21, 22), (22, 23)):
        found = logprobs_with(driver, [0], Turn(0, TOKENS[begin:end]))
        torch.testing.assert_close(found[0], merged[end - 1], atol=2e-4, rtol=0)
    found = logprobs_with(driver, [-1], Turn(1, TOKENS))
    torch.testing.assert_close(found[0], plain[-1], atol=2e-4, rtol=0)


def test_layers_that_an_adapter_leaves_alone_stay_as_they_are(base, drive, tmp_path: Path) -> None:
    modules = base.modules(ALL, layers=[1])
    made = make_adapter(base, tmp_path / "one", modules, layers_to_transform=[1])
    driver = drive(base, kernels="auto")
    assert load(driver, base, 0, made.folder).ok
    found = logprobs_with(driver, [0], Turn(0, TOKENS))
    merged = merged_logprobs(base, made, TOKENS)
    torch.testing.assert_close(found[0], merged[-1], atol=2e-4, rtol=0)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_adapters_of_quantised_weights_come_close(
    base, drive, tmp_path: Path, quantize: str
) -> None:
    made = make_adapter(base, tmp_path / "adapter", base.modules(ALL), rank=8)
    exact = drive(base, kernels="torch", quantize=quantize)
    kernels = drive(base, kernels="auto", quantize=quantize)
    found = []
    for driver in (exact, kernels):
        assert load(driver, base, 0, made.folder).ok
        found.append(logprobs_with(driver, [0], Turn(0, TOKENS))[0])
        # What the adapter adds is far more than what separates the two.
        plain = logprobs_with(driver, [-1], Turn(1, TOKENS))[0]
        assert (found[-1] - plain).abs().mean() > 0.1
    assert (found[0] - found[1]).abs().mean() < 0.05


def test_an_engine_without_adapters_says_so(base, tmp_path: Path) -> None:
    made = make_adapter(base, tmp_path / "adapter", base.modules(QV))
    driver = make_driver(base.config, base.folder)
    try:
        reply = load(driver, base, 0, made.folder)
    finally:
        driver.runner.close()
    assert not reply.ok
    assert "started without them" in reply.message
