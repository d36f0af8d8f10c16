"""Models by the code of transformers, on weft's pages: every family gives what it gives there, or
is refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.executor.driver import Driver, Turn, make_driver
from tests.models import by_library, many
from tests.models.many import VOCAB, Checkpoint
from tests.seeds import every_second, one_in, slow
from weft.executor.kv_pool import KVPool
from weft.models.transformers_backend.describe import described
from weft.models.transformers_backend.library import NotByLibrary, causal_class

TOLERANCE = 2e-4  # of log probabilities, float32
NUM_GREEDY = 4
# The code of transformers keeps states itself, and is refused then.
# It attends in a way of its own: by distances, within chunks, to tokens that follow, or to chosen
# ones.
OWN_ATTENTION = ("bloom", "deepseek-v3.2", "falcon", "gemma4-unified", "glm5", "llama4", "mpt")
# It has the text only as a part of a model that sees.
SEEING = ("mistral4",)
NATIVE = [
    name
    for name in many.FAMILIES
    if name not in many.STATE_FAMILIES and not name.startswith(OWN_ATTENTION + SEEING)
]
# Those that weft has code of its own for are served by it, unless somebody asks for the other.
USUAL = [
    *one_in(40, [f"native-{name}" for name in NATIVE]),
    *one_in(8, by_library.FAMILIES),
]

Drive = Callable[..., Driver]


@pytest.fixture
def drive() -> Iterator[Drive]:
    drivers: list[Driver] = []

    def load(folder: Path, **settings: Any) -> Driver:
        model = described(folder, "tiny")
        drivers.append(make_driver(model, folder, **settings))
        return drivers[-1]

    yield load
    for driver in drivers:
        driver.runner.close()


def make(name: str, folder: Path) -> Checkpoint:
    if name.startswith("native-"):
        return many.make_checkpoint(name.removeprefix("native-"), folder)
    return by_library.make_by_library(name, folder)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


def assert_equal(actual: torch.Tensor, logits: torch.Tensor) -> None:
    torch.testing.assert_close(actual, logits.log_softmax(-1), atol=TOLERANCE, rtol=0)


def assert_same_tokens(driver: Driver, checkpoint: Checkpoint) -> None:
    """Chunks beside another prompt, then the rest of it behind a prefix that two rows share, then
    tokens one by one."""
    first = prompt(1, 53)
    second = prompt(2, 40)
    expected = checkpoint.logits(first)
    begun = driver.run(Turn(0, first[:19]), Turn(1, second))
    assert_equal(begun[0], expected[18])
    assert_equal(begun[1], checkpoint.logits(second)[-1])
    driver.share(0, 2, 16)
    logprobs = driver.run(Turn(2, first[16:]), Turn(0, first[19:20]))
    assert_equal(logprobs[0], expected[-1])
    assert_equal(logprobs[1], expected[19])
    written: list[int] = []
    for _ in range(NUM_GREEDY):
        written.append(int(logprobs[0].argmax()))
        logprobs = driver.run(Turn(2, written[-1:]))
    theirs = checkpoint.logits(first + written)[len(first) - 1 : -1].argmax(-1)
    assert written == theirs.tolist()


@pytest.mark.parametrize("name", USUAL)
def test_greedy_tokens_are_those_of_transformers(drive: Drive, tmp_path: Path, name: str) -> None:
    checkpoint = make(name, tmp_path)
    assert_same_tokens(drive(checkpoint.folder, kernels="auto"), checkpoint)


@pytest.mark.parametrize("name", every_second(["gpt2", "native-gemma2", "deepseek-v3", "mixtral"]))
def test_torch_alone_gives_the_same_tokens(drive: Drive, tmp_path: Path, name: str) -> None:
    checkpoint = make(name, tmp_path)
    assert_same_tokens(drive(checkpoint.folder, kernels="torch"), checkpoint)


@pytest.mark.parametrize("kernels", ["auto", *slow(["torch"])])
@pytest.mark.parametrize(
    "name", every_second(["native-gemma3", "gpt2", "deepseek-v2", "qwen3-moe"])
)
def test_weights_in_eight_bits_choose_nearly_the_same_tokens(
    drive: Drive, tmp_path: Path, name: str, kernels: str
) -> None:
    checkpoint = make(name, tmp_path)
    driver = drive(checkpoint.folder, kernels=kernels, quantize="int8")
    tokens = prompt(3, 90)
    driver.run(Turn(0, tokens[:20]))
    found = [driver.run(Turn(0, [token]))[0].argmax() for token in tokens[20:]]
    expected = checkpoint.logits(tokens)[20:].argmax(-1)
    assert (torch.stack(found) == expected).float().mean() >= 0.9


def test_the_text_part_of_a_model_that_sees_is_computed_alone(drive: Drive, tmp_path: Path) -> None:
    checkpoint = many.make_seeing("gemma4", tmp_path)
    driver = drive(checkpoint.folder, kernels="auto")
    assert_same_tokens(driver, checkpoint)
    model = described(checkpoint.folder, "tiny")
    assert model.architecture == "Gemma4ForCausalLM"


def test_a_slot_has_of_each_layer_what_it_keeps(tmp_path: Path) -> None:
    model = described(make("native-gemma4", tmp_path).folder, "tiny")
    assert [model.kv_shape(layer) for layer in range(4)] == [(2, 16), (1, 32)] * 2
    assert model.kv_bytes_per_token == 4 * 2 * 32 * 4
    pool = KVPool(model, 8, torch.device("cpu"), torch.float32)
    assert [tuple(keys.shape) for keys in pool.k] == [(8, 2, 16), (8, 1, 32)] * 2


def test_keys_and_values_that_later_layers_read_are_kept_once(tmp_path: Path) -> None:
    model = described(make("native-gemma4-small", tmp_path).folder, "tiny")
    assert [model.kv_owner(layer) for layer in range(6)] == [0, 1, 2, 3, 2, 3]
    assert model.kv_bytes_per_token == 2 * 2 * (16 + 32) * 4
    pool = KVPool(model, 8, torch.device("cpu"), torch.float32, num_window_slots=4)
    assert pool.k[4] is pool.k[2]
    assert pool.v[5] is pool.v[3]
    assert sum(tensor.nbytes for tensor in pool.tensors) == (8 * 32 + 4 * 16) * 2 * 2 * 4


@pytest.mark.parametrize("name", by_library.REFUSED)
def test_what_pages_cannot_hold_is_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    kind, changes, reason = by_library.REFUSED[name]
    by_library.config_of(kind, changes).save_pretrained(tmp_path)
    with pytest.raises(NotByLibrary, match=reason):
        described(tmp_path, "tiny")


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("ModernBertForMaskedLM", "an encoder that fills in masked tokens"),
        ("ModernBertModel", "a model without a head for the next token, as encoders are"),
        ("DebertaV2ForSequenceClassification", "a classifier of texts"),
        ("T5ForConditionalGeneration", "a model with an encoder and a decoder"),
    ],
)
def test_models_that_are_not_causal_are_named_as_what_they_are(
    architecture: str, kind: str
) -> None:
    with pytest.raises(NotByLibrary, match=f"it is {kind}, and weft runs .*BertModel") as caught:
        causal_class({"architectures": [architecture]})
    assert "no such class" not in str(caught.value)


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_packed_weights_are_refused_by_the_name_of_their_format(
    tmp_path: Path, method: str
) -> None:
    config = by_library.config_of(*by_library.FAMILIES["apertus"])
    config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    values["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 32}
    path.write_text(json.dumps(values))
    with pytest.raises(NotByLibrary, match=rf"quantised \({method}\)"):
        described(tmp_path, "tiny")
