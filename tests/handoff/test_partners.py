"""Two servers whose K and V would not have the same bits: both say why at the connection, in one
line, and the one that wants a prompt computes it."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from tests.handoff.pair import Pair, Proxy
from weft.assemble import handoff
from weft.assemble.handoff import described_facts
from weft.assemble.model_config import choose_model
from weft.config.engine import EngineConfig
from weft.handoff.facts import Facts
from weft.handoff.wire import VERSION
from weft.weights.known import BUNDLED

CONFIG = EngineConfig(model="weft-nano", page_size=16)
MODEL = choose_model(CONFIG, BUNDLED)
WEIGHTS = "digest of the weights"


def facts_of(
    config: EngineConfig = CONFIG, model: object = MODEL, kernels: str = "avx2", weights: str = "a"
) -> Facts:
    assert isinstance(model, type(MODEL))
    return {**described_facts(config, model, kernels), WEIGHTS: weights}


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The reasons of the lines that both sides have written."""
    return [record.fields["why"] for record in caplog.records if record.message == "refused"]


def refused(pair: Pair, caplog: pytest.LogCaptureFixture, port: int = 0) -> tuple[str, set[str]]:
    """What the side that asks is told, and what both write."""
    caplog.set_level(logging.WARNING, logger="weft.handoff")
    pair.lend()
    pair.ask(port=port)
    missed = pair.wait_for("missed")
    assert missed.reason == "refused"
    pair.wait_until(lambda: len(refusals(caplog)) == 2)
    return missed.message, set(refusals(caplog))


@pytest.mark.parametrize(
    ("theirs", "own", "name", "there", "here"),
    [
        (facts_of(), facts_of(weights="b"), WEIGHTS, "a", "b"),
        (facts_of(), facts_of(replace(CONFIG, page_size=32)), "page size", "16", "32"),
        (
            facts_of(),
            facts_of(replace(CONFIG, kv_tokens=4_096, swa_full_tokens_ratio=0.5)),
            "memory of layers with windows",
            "that of all",
            "its own",
        ),
        (
            facts_of(),
            facts_of(model=replace(MODEL, kv_dtype="int8")),
            "type of the KV cache",
            MODEL.dtype,
            "int8",
        ),
        (
            facts_of(),
            facts_of(model=replace(MODEL, dtype="float16")),
            "type of the model",
            MODEL.dtype,
            "float16",
        ),
        (facts_of(), facts_of(kernels="avx512"), "kind of computation", "avx2", "avx512"),
    ],
)
def test_what_is_not_the_same_is_named_on_both_sides(
    theirs: Facts, own: Facts, name: str, there: str, here: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Pair() as pair:
        pair.facts = [theirs, own]
        pair.prefill.renew("")
        pair.decode.renew("")
        pair.wait_until(pair.knows_its_facts)
        message, written = refused(pair, caplog)
    line = f"the {name} is {there} there, and {here} here"
    assert message.endswith(line)
    assert written == {line, f"the {name} is {here} there, and {there} here"}


def test_another_layout_of_k_and_v_is_another_shape() -> None:
    other = replace(MODEL, num_layers=MODEL.num_layers + 1)
    name = "digest of the model's shape"
    assert facts_of(model=other)[name] != facts_of()[name]
    assert facts_of(model=replace(MODEL, name="else")) == facts_of()


def test_another_version_of_weft_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = facts_of()
    monkeypatch.setattr(handoff, "__version__", "0.0.1")
    assert facts_of()["version of weft"] != own["version of weft"]


def test_another_version_of_the_protocol_is_refused_on_both_sides(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Pair() as pair:
        own = b"\xa7version" + bytes([VERSION])
        proxy = Proxy(pair.port, lambda said: said.replace(own, b"\xa7version\x09"))
        message, written = refused(pair, caplog, proxy.port)
        proxy.close()
    line = f"the protocol has version 9 there, and version {VERSION} here"
    assert message.endswith(line)
    assert written == {line}


def test_another_secret_is_refused_on_both_sides(caplog: pytest.LogCaptureFixture) -> None:
    with Pair(secrets=("a", "b")) as pair:
        message, written = refused(pair, caplog)
    line = "it has another secret (--handoff-secret)"
    assert message.endswith(line)
    assert written == {line}
