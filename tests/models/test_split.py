"""Prefills that are split by layers give the tokens of whole ones, on real models and beside
streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import transformers

from tests.models.many import SHAPE, VOCAB, saved
from tests.models.windowed import Served, make_windowed
from weft.plan.step import ForwardMode, Plan, Step

LENGTH = 1_500
Serve = Callable[..., Served]


@pytest.fixture(scope="module")
def eight_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eight")
    shape = {**SHAPE, "num_hidden_layers": 8, "max_position_embeddings": 2_048}
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape, head_dim=16))
    return saved(model, folder).folder


@pytest.fixture
def serve() -> Iterator[Serve]:
    served: list[Served] = []

    def start(folder: Path, **settings: object) -> Served:
        served.append(Served(folder, **settings))
        return served[-1]

    yield start
    for one in served:
        one.runner.close()


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def beside_a_stream(served: Served, *prompts: list[int]) -> list[Plan]:
    """Run prompts while another request decodes. Returns the plans."""
    plans: list[Plan] = []
    launch = served.runner.launch

    def noted(plan: Plan) -> Step:
        plans.append(replace(plan))
        return launch(plan)

    served.runner.launch = noted  # type: ignore[method-assign]
    served.send(prompt(0, 5), 40)
    served.step()
    served.step()
    for one in prompts:
        served.send(one, 8)
    served.run()
    return plans


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_long_prompt_in_four_pieces_has_the_tokens_of_a_whole_one(
    eight_layers: Path, serve: Serve, kernels: str
) -> None:
    common = {"kernels": kernels, "context_length": 2_048, "chunked_prefill_size": 2_048}
    whole = serve(eight_layers, mixed_chunk=False, max_slowdown=-1.0, **common)
    split = serve(eight_layers, split_prefill_layers=2, **common)
    beside_a_stream(whole, prompt(1, LENGTH))
    plans = beside_a_stream(split, prompt(1, LENGTH))
    begin = next(i for i, plan in enumerate(plans) if plan.layers is not None)
    modes = [plan.mode for plan in plans[begin : begin + 7]]
    piece = ForwardMode.SPLIT_PREFILL
    decode = ForwardMode.DECODE
    assert modes == [piece, decode, piece, decode, piece, decode, piece]
    assert split.outputs == whole.outputs


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
@pytest.mark.parametrize("chunk_len", [48, 400])
def test_layers_with_windows_keep_their_pages_between_pieces(
    family: str, chunk_len: int, serve: Serve, tmp_path: Path
) -> None:
    folder = make_windowed(family, tmp_path).folder
    common = {"chunked_prefill_size": chunk_len, "kv_tokens": 1_536, "swa_full_tokens_ratio": 0.5}
    whole = serve(folder, **common)
    split = serve(folder, split_prefill_layers=1, **common)
    prompts = [prompt(1, 300), prompt(2, 100), [*prompt(1, 200), *prompt(3, 20)]]
    beside_a_stream(whole, *prompts)
    plans = beside_a_stream(split, *prompts)
    assert sum(plan.layers is not None for plan in plans) >= 4
    assert split.outputs == whole.outputs
