"""Every kind of model that makes vectors or scores gives what transformers gives, alone, in batches
and in chunks."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.executor.driver import CONTEXT, KV_TOKENS, MAX_ROWS, Driver, Turn
from tests.models.pooled import (
    CASES,
    ENCODERS,
    TOKEN_SIZE,
    VOCAB,
    PooledReference,
    make_pooled,
    run,
)
from tests.seeds import every_second
from weft.config.engine import EngineConfig
from weft.config.model import ModelConfig
from weft.executor.build import load_runner
from weft.ops.cpp.library import Unavailable, load

TOLERANCE = 2e-5


CUT = ("mean", "cls", "last")
DECODERS = [name for name in CASES if name not in ENCODERS]


def with_kernels(names: Sequence[str]) -> pytest.MarkDecorator:
    """Each of these cases by the best CPU kernels here, and every second by torch."""
    pairs = [(name, kernels) for kernels in ("torch", "auto") for name in names]
    num = len(names)
    return pytest.mark.parametrize(
        "loaded",
        [*every_second(pairs[:num]), *pairs[num:]],
        indirect=True,
        ids=[f"{name}-{kernels}" for name, kernels in pairs],
    )


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], PooledReference]:
    """Cases by name, each made once."""
    return functools.cache(lambda name: make_pooled(name, tmp_path_factory.mktemp(name)))


@pytest.fixture
def loaded(
    request: pytest.FixtureRequest, references: Callable[[str], PooledReference]
) -> Iterator[tuple[PooledReference, Driver]]:
    name, kernels = request.param
    reference = references(name)
    driver = make_driver(reference.folder, kernels=kernels)
    yield reference, driver
    driver.runner.close()


def make_driver(folder: Path, **settings: Any) -> Driver:
    config = ModelConfig.from_folder(folder)
    runner = load_runner(
        EngineConfig(device="cpu", threads=1, **settings),
        config,
        folder=folder,
        kv_tokens=KV_TOKENS,
        page_size=1,
        max_rows=MAX_ROWS,
        context_length=CONTEXT,
    )
    return Driver(runner, config.vocab_size, list(range(KV_TOKENS)))  # type: ignore[arg-type]


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(4, VOCAB, length).tolist()


def difference(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


@with_kernels(list(CASES))
def test_several_prompts_in_one_step(loaded):
    reference, driver = loaded
    prompts = [prompt(0, 37), prompt(1, 2), prompt(2, 30), prompt(3, 1), prompt(4, 36)]
    actual = run(driver, *[Turn(row, tokens) for row, tokens in enumerate(prompts)])
    for found, tokens in zip(actual, prompts, strict=True):
        expected = reference.vector(tokens)
        assert difference(found[: len(expected)], expected) < TOLERANCE
        assert not found[len(expected) :].any()


@with_kernels(DECODERS)
@pytest.mark.parametrize("chunk", [7, 16])
def test_a_decoder_takes_its_prompt_in_chunks_beside_others(loaded, chunk):
    reference, driver = loaded
    tokens = prompt(4, 53)
    other = prompt(5, 40)
    for i in range(0, len(tokens), chunk):
        last = i + chunk >= len(tokens)
        found = run(
            driver,
            Turn(3, other[i : i + 5] or [9], samples=False),
            Turn(2, tokens[i : i + chunk], last),
        )
    assert difference(found[0], reference.vector(tokens)) < TOLERANCE
    again = run(driver, Turn(6, prompt(6, 9)))  # what another row has left does not count
    assert difference(again[0], reference.vector(prompt(6, 9))) < TOLERANCE


@with_kernels([name for name in ENCODERS if name.startswith("bert")])
def test_kinds_of_segments_reach_the_model(loaded):
    reference, driver = loaded
    tokens = prompt(7, 12)
    types = [0] * 5 + [1] * 7
    actual = run(driver, Turn(0, prompt(8, 3)), Turn(1, tokens), types=[0, 0, 0, *types])
    assert difference(actual[1], reference.vector(tokens, types)) < TOLERANCE
    assert difference(actual[1], reference.vector(tokens)) > 1e-3


@with_kernels([name for name, case in CASES.items() if case.pooling in CUT and case.normalize])
def test_a_vector_is_cut_before_it_is_normalised(loaded):
    _, driver = loaded
    tokens = prompt(9, 11)
    whole, cut = run(
        driver, Turn(0, tokens), Turn(1, tokens), dimensions=np.array([0, 8], np.int32)
    )
    assert np.allclose(cut[:8], whole[:8] / np.linalg.norm(whole[:8]), atol=1e-6)
    assert not cut[8:].any()
    assert np.isclose(np.linalg.norm(whole), 1.0, atol=1e-6)


@pytest.mark.parametrize("name", list(CASES))
def test_what_the_files_say_is_read(references, name):
    reference = references(name)
    config = ModelConfig.from_folder(reference.folder)
    assert config.pooling is not None
    assert config.is_encoder is (name in ENCODERS)
    assert config.pooling.task == ("embed" if reference.case.pooling else "classify")
    if reference.case.pooling == "tokens":
        assert (config.pooling.size, config.pooling.markers) == (TOKEN_SIZE, ("q", "d"))
    if reference.case.pooling:
        assert config.pooling.kind == reference.case.pooling
        assert config.pooling.normalize == reference.case.normalize
    else:
        assert len(config.pooling.labels) == reference.case.changes["num_labels"]
    assert (config.kv_bytes_per_token == 0) is (name in ENCODERS)


@pytest.fixture
def kernels() -> None:
    """Skips where there are none."""
    try:
        load()
    except Unavailable as problem:
        pytest.skip(str(problem))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["bert-mean", "roberta"])
def test_kernels_give_the_same_bits_whatever_else_is_in_the_step(references, name):
    driver = make_driver(references(name).folder)
    tokens = prompt(10, 33)
    [alone] = run(driver, Turn(0, tokens))
    others = [Turn(row, prompt(10 + row, 5 * row)) for row in range(1, 7)]
    together = run(driver, *others[:3], Turn(7, tokens), *others[3:])
    driver.runner.close()
    assert np.array_equal(together[3], alone)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("settings", "error"), [({"quantize": "int8"}, 0.05), ({"dtype": "bfloat16"}, 0.05)]
)
def test_encoders_with_fewer_bits_are_near_and_not_the_same(references, settings, error):
    reference = references("bert-mean")
    driver = make_driver(reference.folder, **settings)
    tokens = prompt(11, 40)
    [found] = run(driver, Turn(0, tokens))
    driver.runner.close()
    assert 1e-4 < difference(found, reference.vector(tokens)) < error


def test_a_checkpoint_of_colberts_own_form_gives_the_same(references, tmp_path):
    reference = references("colbert-bert")
    weights = load_file(reference.folder / "model.safetensors")
    own = {f"bert.{name}": weight for name, weight in weights.items()}
    own |= load_file(reference.folder / "1_Dense" / "model.safetensors")
    save_file(own, tmp_path / "model.safetensors")
    config = json.loads((reference.folder / "config.json").read_text())
    config["architectures"] = ["HF_ColBERT"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "artifact.metadata").write_text(json.dumps({"dim": TOKEN_SIZE}))
    pooling = ModelConfig.from_folder(tmp_path).pooling
    assert pooling is not None
    assert pooling.markers == ("[unused0]", "[unused1]")
    driver = make_driver(tmp_path)
    tokens = prompt(12, 20)
    [found] = run(driver, Turn(0, tokens))
    driver.runner.close()
    assert difference(found, reference.vector(tokens)) < TOLERANCE
