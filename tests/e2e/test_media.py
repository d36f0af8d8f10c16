"""Pictures and sounds in requests to a real server, with tiny random models: what transformers
computes, with what is found again not computed again, beside streams, and replayed from a
journal."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch

from tests.e2e.media_models import MODELS, MediaModel
from tests.e2e.media_parts import Item, picture, sound
from tests.e2e.server import Server, run_weft
from tests.seeds import slow

COUNT = 12  # tokens of an answer
PAGE = 8  # tokens of a page of the KV cache


class Served(NamedTuple):
    model: MediaModel
    server: Server
    journal: Path

    def items(self) -> tuple[Item, Item, Item]:
        """Three that differ, of two sizes."""
        if self.model.kind == "image":
            return picture(1, 60, 40), picture(2, 50, 90), picture(3, 60, 40)
        return sound(1, 9_000), sound(2, 15_000), sound(3, 9_000)

    def ask(self, *content: str | Item, **params: Any) -> dict[str, Any]:
        """The reply to one message of texts and items."""
        parts = [
            {"type": "text", "text": one} if isinstance(one, str) else one.part for one in content
        ]
        found = self.server.post(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": parts}],
            max_tokens=COUNT,
            temperature=0,
            min_tokens=COUNT,
            return_token_ids=True,
            **params,
        )
        return dict(found)

    def expected(self, *content: str | Item) -> list[int]:
        """What transformers answers."""
        parts: list[dict[str, Any]] = []
        items: list[Any] = []
        for one in content:
            if isinstance(one, str):
                parts.append({"type": "text", "text": one})
            else:
                parts.append({"type": self.model.kind})
                items.append(one.value)
        return self.model.answer([{"role": "user", "content": parts}], items, COUNT)

    def metric(self, name: str) -> float:
        """A metric, as of now."""
        self.server.load()
        lines = httpx.get(f"{self.server.url}/metrics").text.splitlines()
        (line,) = [line for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        return float(line.rpartition(" ")[2])


# Tests of the models hold the others, without a server.
USUAL = ["smolvlm", "qwen2-audio"]


@pytest.fixture(scope="module", params=[*USUAL, *slow(sorted(MODELS.keys() - USUAL))])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp(request.param)
    torch.set_num_threads(1)
    model = MODELS[request.param](folder / "model")
    journal = folder / "journal"
    server = Server("--model", str(model.folder), "--journal", str(journal))
    yield Served(model, server, journal)
    assert server.stop() == 0
    # Its decisions follow from what the journal has, which has no pictures.
    returncode, errors = run_weft("replay", str(journal), "--check")
    assert returncode == 0, errors


def tokens_of(reply: dict[str, Any]) -> list[int]:
    return list(reply["choices"][0]["token_ids"])


def cached_of(reply: dict[str, Any]) -> int:
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_answers_are_those_of_transformers(served: Served) -> None:
    first, second, third = served.items()
    for content in (
        ("What is this?",),
        (first, "What is this?"),
        ("Look at ", first, " and then at ", second, ". Well?"),
        (third, "What is this?"),
        (second, second, third),
    ):
        assert tokens_of(served.ask(*content)) == served.expected(*content)


def test_what_was_encoded_is_not_encoded_again(served: Served) -> None:
    first, _, other = served.items()
    question = ("Tell of ", first, " in a few words")
    before = served.ask(*question)
    num_runs = served.metric("weft:encoder_runs_total")
    again = served.ask(*question)
    assert tokens_of(again) == tokens_of(before)
    # All but the last token, whose answer is computed anew; no part of a page is copied where
    # pictures are computed whole, or layers have windows.
    least = again["usage"]["prompt_tokens"] - 1
    if served.model.model.config.model_type in ("gemma3", "gemma3n", "gemma4"):
        least -= least % PAGE
    assert cached_of(again) == least
    assert served.metric("weft:encoder_runs_total") == num_runs
    # One that differs is another one, of which no token is found.
    different = served.ask("Tell of ", other, " in a few words")
    assert tokens_of(different) == served.expected("Tell of ", other, " in a few words")
    assert cached_of(different) < cached_of(again)
    kind = "image_tokens" if served.model.kind == "image" else "audio_tokens"
    assert different["usage"]["prompt_tokens_details"][kind] > 0


def test_streams_go_on_beside_them(served: Served) -> None:
    first, second, third = served.items()
    texts = ["Once upon a time", "There was a man", "It rained"]
    alone = [tokens_of(served.ask(text)) for text in texts]
    asked = [*texts, (first, "One"), (second, "Two"), (third, "Three"), (second, first)]
    contents = [(one,) if isinstance(one, str) else one for one in asked]
    found: dict[int, list[int]] = {}

    def ask(place: int) -> None:
        found[place] = tokens_of(served.ask(*contents[place]))

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(len(contents))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[place] for place in range(len(texts))] == alone
    for place in range(len(texts), len(contents)):
        assert found[place] == served.expected(*contents[place])


def test_sounds_come_in_several_forms(served: Served) -> None:
    if served.model.kind != "audio":
        pytest.skip("the model takes no sounds")
    first, _, _ = served.items()
    expected = served.expected(first, "What is this?")
    data = first.part["input_audio"]["data"]
    for url in (f"data:audio/wav;base64,{data}", f"data:audio/x-wav;base64,{data}"):
        by_url = Item(first.value, {"type": "audio_url", "audio_url": {"url": url}})
        assert tokens_of(served.ask(by_url, "What is this?")) == expected
    parts = [{"type": "audio"}, {"type": "text", "text": "What is this?"}]
    native = served.server.post(
        "/generate",
        text=served.model.text([{"role": "user", "content": parts}]),
        audio_data=data,
        sampling_params={"temperature": 0, "max_new_tokens": COUNT, "min_new_tokens": COUNT},
    )
    assert native["output_ids"] == expected


def test_what_a_model_does_not_take_is_refused_by_name(served: Served) -> None:
    kind = served.model.kind
    other = sound(1, 9_000) if kind == "image" else picture(1, 60, 40)
    name = "sounds" if kind == "image" else "images"
    body = {"messages": [{"role": "user", "content": [other.part]}]}
    reply = httpx.post(f"{served.server.url}/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert f"takes no {name}" in reply.json()["error"]["message"]
