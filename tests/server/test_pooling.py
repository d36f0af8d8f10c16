"""The APIs that answer with vectors and scores, with real engines and tiny models behind them."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator

import numpy as np
import openai
import pytest

from tests.models.pooled import TOKEN_SIZE, VOCAB, PooledReference, make_pooled
from tests.server.real_engine import RealServer, serving
from weft.messages.requests import BatchGenerate

TEXTS = ["one", "a much longer text of many letters", "two", "x"]


def fixture_of(name: str, **settings: object):  # type: ignore[no-untyped-def]
    @pytest.fixture(scope="module")
    def pair(
        tmp_path_factory: pytest.TempPathFactory,
    ) -> Iterator[tuple[RealServer, PooledReference]]:
        reference = make_pooled(name, tmp_path_factory.mktemp(name))
        with serving(reference.folder, **settings) as server:
            yield server, reference

    return pair


bert = fixture_of("bert-mean")
unscaled = fixture_of("bert-cls")  # its vectors have any length
ranker = fixture_of("bert-pair")
labels = fixture_of("bert-labels")
qwen = fixture_of("qwen3-last", chunked_prefill_size=16, page_size=4, kv_tokens=256)
tokens = fixture_of("colbert-bert")
sparse = fixture_of("splade-bert")
mean = fixture_of("qwen3-mean", chunked_prefill_size=16, page_size=4, kv_tokens=256)


@pytest.fixture(scope="module")
def writer(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[RealServer, PooledReference]]:
    """A model that generates."""
    reference = make_pooled("qwen3-last", tmp_path_factory.mktemp("writer"))
    for name in ("modules.json", "1_Pooling/config.json"):
        (reference.folder / name).unlink()
    with serving(reference.folder) as server:
        yield server, reference


def vectors(answer: dict) -> np.ndarray:
    assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
    return np.array([one["embedding"] for one in answer["data"]])


def refused(response, status: int, *parts: str) -> None:
    assert response.status_code == status, response.text
    for part in parts:
        assert part in response.json()["error"]["message"]


def encoded(server: RealServer, *texts: str) -> list[tuple[list[int], list[int]]]:
    pair = texts if len(texts) == 2 else texts[0]
    return [tuple(one) for one in server.wait(server.tokenizer.encode_inputs([pair]))]


def test_vectors_are_those_of_transformers_in_the_order_of_the_inputs(bert):
    server, reference = bert
    answer = server.post("/v1/embeddings", input=TEXTS, model="tiny").json()
    ids = [server.tokenizer.encode(text) for text in TEXTS]
    expected = np.stack([reference.vector(one, [0] * len(one)) for one in ids])
    assert np.abs(vectors(answer) - expected).max() < 2e-5
    assert answer["usage"] == {
        "prompt_tokens": sum(map(len, ids)),
        "total_tokens": sum(map(len, ids)),
    }
    assert isinstance(server.seen[-1], BatchGenerate), "several inputs are one message"
    by_ids = server.post("/v1/embeddings", input=ids).json()
    assert np.abs(vectors(by_ids) - expected).max() < 2e-5
    alone = server.post("/v1/embeddings", input=TEXTS[1]).json()
    assert np.abs(vectors(alone)[0] - expected[1]).max() < 2e-5


def test_the_sdk_gets_the_same_as_base64(bert):
    server, _ = bert
    sdk = openai.AsyncOpenAI(
        base_url="http://127.0.0.1/v1", api_key="none", http_client=server.http
    )
    found = server.wait(sdk.embeddings.create(model="tiny", input=TEXTS))
    plain = vectors(server.post("/v1/embeddings", input=TEXTS).json())
    assert np.array_equal(
        np.array([one.embedding for one in found.data], np.float32), plain.astype(np.float32)
    )
    raw = server.post("/v1/embeddings", input="one", encoding_format="base64").json()["data"][0][
        "embedding"
    ]
    assert np.array_equal(np.frombuffer(base64.b64decode(raw), "<f4"), plain[0].astype(np.float32))


def test_dimensions_cut_before_normalising(bert):
    server, _ = bert
    whole = vectors(server.post("/v1/embeddings", input="one").json())[0]
    cut = vectors(server.post("/v1/embeddings", input=["one"], dimensions=8).json())[0]
    assert np.allclose(cut, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-6)
    refused(
        server.post("/v1/embeddings", input="one", dimensions=49), 400, "dimensions is 49; 1 to 48"
    )


@pytest.mark.parametrize("kind", ["qwen", "mean"])
def test_a_decoder_embeds_in_chunks_and_from_the_cache(kind, request):
    server, reference = request.getfixturevalue(kind)
    text = "abcdefgh " * 7
    ids = server.tokenizer.encode(text)
    assert len(ids) > 3 * 16
    for _ in range(2):
        found = vectors(server.post("/v1/embeddings", input=[text, "one"]).json())
        assert np.abs(found[0] - reference.vector(ids)).max() < 2e-5
    scheduler = server.engine.scheduler
    num_cached = scheduler.counters.num_cached_tokens
    assert (num_cached > 0) is (kind == "qwen"), "a mean needs every token"
    server.post("/v1/embeddings", input=[text], cache_salt="another")
    assert scheduler.counters.num_cached_tokens == num_cached
    assert scheduler.counters.num_generated_tokens == 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": []}, "input is empty; 1 text or more is needed"),
        ({"input": ""}, "input is an empty text; 1 character or more is needed"),
        ({"input": ["a", ""]}, "input[1] is an empty text; 1 character or more is needed"),
        ({"input": ["a", [5]], "model": "other"}, "does not exist"),
        ({"input": [1, "a"]}, "mixes token ids"),
        ({"input": ["a", "b" * 200]}, "input[1] has 102 tokens"),
        ({"input": [[4, 5], []]}, "input[1] has no token"),
        ({"input": [[4], [VOCAB]]}, f"token id {VOCAB}"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype is not supported"),
        ({"input": "a", "data_parallel_rank": 1}, "data_parallel_rank is 1; only 0 is allowed"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0"),
        ({}, "input"),
    ],
)
def test_invalid_inputs_are_named(bert, body, message):
    server, _ = bert
    if "b" * 200 in body.get("input", ()):
        body = {"input": ["a", "b " * 100]}
    response = server.post("/v1/embeddings", **body)
    refused(response, 404 if "exist" in message else 400, message)


def test_an_input_that_is_too_long_is_cut_if_asked(bert):
    server, _ = bert
    found = vectors(
        server.post("/v1/embeddings", input="b " * 100, truncate_prompt_tokens=-1).json()
    )[0]
    expected = vectors(server.post("/v1/embeddings", input="b " * 62).json())[
        0
    ]  # with [CLS] and [SEP]: 64
    assert np.array_equal(found, expected)
    left = server.post(
        "/encode", text="a b c d", truncate_prompt_tokens=4, truncation_side="left"
    ).json()
    assert left["embedding"] == server.post("/encode", text="c d").json()["embedding"]
    assert (
        server.post("/api/embed", input="b " * 100, model="tiny").json()["prompt_eval_count"] == 64
    )
    response = server.post("/api/embed", input="b " * 100, truncate=False)
    assert response.status_code == 400
    assert "102 tokens" in response.json()["error"]


def test_a_model_that_makes_vectors_generates_nothing_and_says_what_it_is_for(bert):
    server, _ = bert
    chat = {"messages": [{"role": "user", "content": "a"}]}
    asked = (
        ("/v1/completions", {"prompt": "a"}),
        ("/generate", {"text": "a"}),
        ("/v1/chat/completions", chat),
    )
    for path, body in asked:
        refused(server.post(path, **body), 400, "generates no tokens", "/v1/embeddings")
    refused(server.post("/classify", text="a"), 400, "made to embed")
    assert server.get("/model_info").json()["task"] == "embed"
    assert server.get("/model_info").json()["is_generation"] is False
    assert server.get("/v1/models").json()["data"][0]["task"] == "embed"
    assert server.get("/health_generate").status_code == 200


def test_a_model_that_generates_embeds_only_if_started_for_it(writer):
    server, reference = writer
    for path, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ):
        refused(server.post(path, **body), 400, "generates tokens")
    with serving(reference.folder, task="embed") as started:
        found = vectors(started.post("/v1/embeddings", input="one").json())[0]
    assert np.abs(found - reference.vector(server.tokenizer.encode("one"))).max() < 2e-5


def test_documents_are_ordered_by_their_score_with_the_query(ranker):
    server, reference = ranker
    documents = ["apple", "banana split", {"text": "c"}, "quite another text"]
    texts = [one if isinstance(one, str) else one["text"] for one in documents]
    scores = [float(reference.vector(*encoded(server, "query", text)[0])[0]) for text in texts]
    answer = server.post(
        "/v1/rerank", query="query", documents=documents, return_documents=True
    ).json()
    order = sorted(range(4), key=lambda i: -scores[i])
    assert [one["index"] for one in answer["results"]] == order
    assert [one["document"]["text"] for one in answer["results"]] == [texts[i] for i in order]
    assert np.allclose(
        [one["relevance_score"] for one in answer["results"]], [scores[i] for i in order], atol=2e-5
    )
    top = server.post("/v2/rerank", query="query", documents=documents, top_n=2).json()["results"]
    assert [one["index"] for one in top] == order[:2]
    assert "document" not in top[0]
    pairs = server.post("/v1/score", text_1="query", text_2=texts).json()["data"]
    assert np.allclose([one["score"] for one in pairs], scores, atol=2e-5)
    refused(server.post("/v1/rerank", query="q", documents=[]), 400, "documents is empty")
    refused(server.post("/v1/rerank", query="", documents=["a"]), 400, "query is an empty text")
    refused(server.post("/v1/score", text_1=["a", ""], text_2=["a", "b"]), 400, "text_1[1] is an")
    # One empty document among others does not fail the rest.
    assert server.post("/v1/rerank", query="q", documents=["a", ""]).status_code == 200
    refused(
        server.post("/rerank", query="q", documents=["a"] * 1_025),
        400,
        "documents has 1,025 prompts",
    )
    refused(
        server.post("/v1/rerank", query="q", documents=["a", "b " * 90]), 400, "documents[1] has"
    )
    refused(
        server.post("/score", text_1=["a", "b"], text_2=["c", "d", "e"]),
        400,
        "2 texts cannot be paired with 3",
    )


def test_vectors_score_by_their_cosine(bert):
    server, _ = bert
    texts = ["one", "two", "three and more"]
    found = vectors(server.post("/v1/embeddings", input=texts).json())
    answer = server.post("/score", queries="one", documents=texts).json()
    assert np.allclose([one["score"] for one in answer["data"]], found @ found[0], atol=1e-6)


def test_vectors_of_any_length_score_by_their_cosine(unscaled):
    server, _ = unscaled
    texts = ["one", "two", "three and more"]
    found = vectors(server.post("/v1/embeddings", input=texts).json())
    lengths = np.linalg.norm(found, axis=1)
    assert not np.allclose(lengths, 1, atol=0.1)
    cosines = found @ found[0] / lengths / lengths[0]
    answer = server.post("/score", queries="one", documents=texts).json()
    assert np.allclose([one["score"] for one in answer["data"]], cosines, atol=1e-6)
    ranked = server.post("/rerank", query="one", documents=texts).json()["results"]
    assert np.allclose([one["relevance_score"] for one in ranked], sorted(-cosines) * np.array(-1))


def test_an_input_that_is_too_long_is_named_as_the_client_wrote_it(bert):
    server, _ = bert
    long = "b " * 90

    def told(path: str, **body: object) -> tuple[str, str]:
        answer = server.post(path, **body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        return error["param"], error["message"].partition(": ")[2].partition(" has")[0]

    assert told("/v1/rerank", query="q", documents=["a", long]) == ("documents", "documents[1]")
    assert told("/v1/rerank", query="q", documents=[long]) == ("documents", "documents")
    assert told("/v1/rerank", query=long, documents=["a", "b"]) == ("query", "query")
    assert told("/v1/score", queries=["a", long, "a"], documents=["a", "b", "c"]) == (
        "queries",
        "queries[1]",
    )
    assert told("/v1/score", text_1="a", text_2=["a", "b", long]) == ("text_2", "text_2[2]")


def test_labels_have_the_probabilities_of_transformers(labels):
    server, reference = labels
    ids = [server.tokenizer.encode(text) for text in TEXTS]
    expected = np.stack([reference.vector(one, [0] * len(one)) for one in ids])
    answer = server.post("/v1/classify", input=TEXTS).json()
    assert np.allclose([one["probs"] for one in answer["data"]], expected, atol=2e-5)
    assert [one["label"] for one in answer["data"]] == [f"LABEL_{row.argmax()}" for row in expected]
    native = server.post("/classify", text=TEXTS[0]).json()
    assert np.allclose(native["embedding"], expected[0], atol=2e-5)
    raw = server.post("/classify", input=TEXTS[0], use_activation=False).json()["data"][0]["probs"]
    assert np.allclose(np.exp(raw) / np.exp(raw).sum(), expected[0], atol=2e-5)
    refused(server.post("/rerank", query="a", documents=["b"]), 400, "3 labels")


def test_sglangs_and_ollamas_routes_give_the_same_vectors(bert):
    server, reference = bert
    plain = vectors(server.post("/v1/embeddings", input=["one", "two"]).json())
    native = server.post("/encode", text=["one", "two"]).json()
    assert np.allclose([one["embedding"] for one in native], plain)
    ids = server.tokenizer.encode("one")
    single = server.post("/encode", input_ids=ids, token_type_ids=[1] * len(ids)).json()
    assert np.abs(single["embedding"] - reference.vector(ids, [1] * len(ids))).max() < 2e-5
    refused(
        server.post("/encode", input_ids=ids, token_type_ids=[2] * len(ids)),
        400,
        "has 2; 0 to 1 are allowed",
    )
    refused(
        server.post("/encode", input_ids=ids, token_type_ids=[1]),
        400,
        "has the length 1; 5 is expected, an entry for each token",
    )
    ollama = server.post("/api/embed", model="tiny:latest", input=["one", "two"]).json()
    assert np.allclose(ollama["embeddings"], plain)
    assert np.allclose(server.post("/api/embeddings", prompt="one").json()["embedding"], plain[0])
    assert np.allclose(vectors(server.post("/invocations", input=["one", "two"]).json()), plain)


def test_label_tokens_get_their_probabilities_behind_the_prompt(writer):
    server, reference = writer
    body = {"query": "one ", "items": ["two", "three"], "label_token_ids": [5, 9, 60]}
    import torch

    ids = [server.tokenizer.encode(f"one {item}") for item in body["items"]]
    with torch.inference_mode():
        probabilities = [
            reference.model(torch.tensor([one])).logits[0, -1].softmax(-1)[[5, 9, 60]]
            for one in ids
        ]
    expected = np.stack([one.numpy() for one in probabilities])
    answer = server.post("/v1/score", **body).json()
    assert np.allclose(answer["scores"], expected, atol=2e-5)
    own = server.post("/v1/score", **body, apply_softmax=True).json()["scores"]
    assert np.allclose(own, expected / expected.sum(1, keepdims=True), atol=2e-5)
    turned = server.post("/v1/score", **{**body, "query": [5, 6], "items": [[7]]}, item_first=True)
    assert len(turned.json()["scores"][0]) == 3
    refused(
        server.post("/v1/score", **{**body, "label_token_ids": [VOCAB]}), 400, f"token id {VOCAB}"
    )
    refused(server.post("/v1/score", **{**body, "items": [[1]]}), 400, "all texts or all token ids")


def test_an_abort_ends_a_request_and_the_engine_goes_on(bert):
    server, _ = bert
    server.hold = True

    async def abort() -> int:
        posting = asyncio.create_task(
            server.http.post("/v1/embeddings", json={"input": TEXTS, "rid": "mine"})
        )
        while not server.client.num_open:
            await asyncio.sleep(0.005)
        assert server.client.deliveries.abort("mine") == len(TEXTS)
        server.hold = False
        return (await posting).status_code

    assert server.wait(abort()) == 503
    assert server.post("/v1/embeddings", input="one").status_code == 200


def test_a_vector_that_is_not_finite_fails_alone(bert, monkeypatch):
    server, _ = bert
    model = server.engine.surroundings.runner.steps._model
    forward = model.forward

    def spoiled(tokens, *others):
        hidden = forward(tokens, *others)
        hidden[tokens == 63] = float("nan")
        return hidden

    monkeypatch.setattr(model, "forward", spoiled)
    ids = [[2, 5, 3], [2, 63, 3], [2, 6, 3]]
    refused(
        server.post("/v1/embeddings", input=ids), 500, "input[1]: the model's output was not finite"
    )
    assert server.post("/v1/embeddings", input=[ids[0], ids[2]]).status_code == 200


def test_a_model_with_a_vector_for_each_token_marks_queries_and_documents(tokens):
    server, reference = tokens
    mark = {
        side: server.tokenizer.token_id(name) for side, name in (("query", "q"), ("document", "d"))
    }
    ids = server.tokenizer.encode("one")
    expected = {}
    for side, id in mark.items():
        marked = [ids[0], id, *ids[1:]]
        expected[side] = reference.vector(marked, [0] * len(marked)).reshape(-1, TOKEN_SIZE)
        answer = server.post("/v1/embeddings", input="one", input_type=side).json()
        assert np.abs(vectors(answer)[0] - expected[side]).max() < 2e-5
        assert answer["usage"]["prompt_tokens"] == len(ids) + 1
    [unnamed] = vectors(server.post("/v1/embeddings", input=["one"]).json())
    assert np.abs(unnamed - expected["document"]).max() < 2e-5
    # Ids have the marks that the client gave them.
    [of_ids] = vectors(server.post("/v1/embeddings", input=[ids]).json())
    plain = reference.vector(ids, [0] * len(ids)).reshape(-1, TOKEN_SIZE)
    assert np.abs(of_ids - plain).max() < 2e-5
    products = expected["query"] @ expected["document"].T
    found = server.post("/v1/rerank", query="one", documents=["one", "a b c"]).json()["results"]
    scores = {one["index"]: one["relevance_score"] for one in found}
    assert abs(scores[0] - products.max(1).sum()) < 1e-4
    refused(server.post("/v1/embeddings", input="one", dimensions=4), 400, "cannot be cut")
    by_ollama = server.post("/api/embed", input="one")
    assert by_ollama.status_code == 400
    assert "/v1/embeddings has the form" in by_ollama.json()["error"]


def test_a_text_of_the_largest_length_keeps_its_mark_and_its_end(tokens):
    server, reference = tokens
    text = "a " * 100
    answer = server.post("/v1/embeddings", input=text, truncate_prompt_tokens=-1).json()
    longest = answer["usage"]["prompt_tokens"]
    ids = server.tokenizer.encode(text)
    kept = [ids[0], server.tokenizer.token_id("d"), *ids[1 : longest - 2], ids[-1]]
    expected = reference.vector(kept, [0] * longest).reshape(-1, TOKEN_SIZE)
    assert np.abs(vectors(answer)[0] - expected).max() < 2e-5


def test_sparse_vectors_are_indices_and_values(sparse):
    server, reference = sparse
    ids = server.tokenizer.encode("one two")
    expected = reference.vector(ids, [0] * len(ids))
    for encoding in ("float", "base64"):
        answer = server.post("/v1/embeddings", input="one two", encoding_format=encoding).json()
        found = answer["data"][0]["embedding"]
        assert found["indices"] == np.flatnonzero(expected).tolist()
        assert np.abs(np.array(found["values"]) - expected[found["indices"]]).max() < 2e-5
    scored = server.post("/v1/score", text_1="one two", text_2=["one two", "x"]).json()["data"]
    assert abs(scored[0]["score"] - expected @ expected) < 1e-3


def test_only_models_with_marks_know_kinds_of_inputs(bert):
    server, _ = bert
    refused(
        server.post("/v1/embeddings", input="one", input_type="query"), 400, "input_type is set"
    )
