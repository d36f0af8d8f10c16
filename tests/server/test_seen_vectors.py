"""Vectors of pictures and sounds over HTTP and in `LLM`: the hidden state of the last token, as
transformers has it."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from tests.e2e.media_models import MODELS, MediaModel
from tests.nano_adapters import NANO
from tests.server.real_engine import RealServer, serving
from weft.config.limits import Limits
from weft.config.options import SettingsError
from weft.llm import LLM
from weft.messages.sampling import InvalidParam

NAMES = ["smolvlm", "qwen2.5-vl", "gemma3"]
MARKS = {
    "smolvlm": "<image>",
    "qwen2.5-vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "<start_of_image>",
}


class Seeing(NamedTuple):
    name: str
    server: RealServer
    model: MediaModel

    def expected(
        self, text: str, images: Sequence[Image.Image], **kwargs: Any
    ) -> NDArray[np.float32]:
        """By transformers, of a text with marks."""
        processor = self.model.processor
        inputs = processor(text=[text], images=list(images), return_tensors="pt", **kwargs)
        with torch.inference_mode():
            states = self.model.model.model(**inputs).last_hidden_state
        vector = states[0, -1].numpy()
        found: NDArray[np.float32] = vector / np.linalg.norm(vector)
        return found

    @property
    def mark(self) -> str:
        return MARKS[self.name]


@pytest.fixture(scope="module", params=NAMES)
def seeing(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Seeing]:
    model = MODELS[request.param](tmp_path_factory.mktemp(request.param))
    limits = Limits(max_completions=4)
    with serving(model.folder, limits, kv_tokens=2_000, dtype="float32", task="embed") as server:
        yield Seeing(request.param, server, model)


def picture(seed: int, width: int = 60, height: int = 40) -> Image.Image:
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (5, 5, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def coded(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def part(image: Image.Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{coded(image)}"}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*content: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


def vectors_of(answer: Any) -> NDArray[np.float64]:
    assert answer.status_code == 200, answer.text
    return np.array([one["embedding"] for one in answer.json()["data"]])


def refused(answer: Any, status: int, words: str) -> None:
    assert answer.status_code == status, answer.text
    assert words in answer.json()["error"]["message"]


def test_a_conversation_with_pictures_has_the_vector_of_transformers(seeing: Seeing) -> None:
    one = picture(1)
    two = picture(2, 50, 90)
    server = seeing.server
    mark = seeing.mark
    begin = "<|im_start|>user\n"
    end = "<|im_end|>\n"
    for content, marked, images in [
        ([part(one), text("What?")], f"{mark}What?", [one]),
        ([text("First "), part(two), text(", "), part(one)], f"First {mark}, {mark}", [two, one]),
    ]:
        answer = server.post("/v1/embeddings", messages=user(*content))
        expected = seeing.expected(begin + marked + end, images)
        assert np.abs(vectors_of(answer)[0] - expected).max() < 1e-5
        usage = answer.json()["usage"]
        assert 0 < usage["prompt_tokens_details"]["image_tokens"] < usage["prompt_tokens"]
    # As the model would answer it.
    answer = server.post("/v1/embeddings", messages=user(part(one)), add_generation_prompt=True)
    expected = seeing.expected(f"{begin}{mark}{end}<|im_start|>assistant\n", [one])
    assert np.abs(vectors_of(answer)[0] - expected).max() < 1e-5


def test_inputs_may_be_texts_with_pictures_each(seeing: Seeing) -> None:
    one = picture(3)
    two = picture(4, 90, 31)
    answer = seeing.server.post(
        "/v1/embeddings",
        input=[{"text": "a", "image": coded(one)}, {"image": coded(two)}, {"text": "b"}],
        dimensions=8,
    )
    found = vectors_of(answer)
    mark = seeing.mark
    for vector, marked, images in zip(
        found, [f"{mark}a", mark, "b"], [[one], [two], []], strict=True
    ):
        turn = f"<|im_start|>user\n{marked}<|im_end|>\n"
        if images:
            whole = seeing.expected(turn, images)
        else:
            whole = vectors_of(seeing.server.post("/v1/embeddings", input=turn))[0]
        cut = whole[:8] / np.linalg.norm(whole[:8])
        assert np.abs(vector - cut).max() < 1e-5


def test_the_native_route_takes_pictures_where_its_text_has_marks(seeing: Seeing) -> None:
    one = picture(5)
    marked = f"Look: {seeing.mark}!"
    expected = seeing.expected(marked, [one])
    for body in (
        {"text": marked, "image_data": coded(one)},
        {"text": marked, "image_data": [coded(one)]},
    ):
        answer = seeing.server.post("/encode", **body)
        assert answer.status_code == 200, answer.text
        assert np.abs(np.array(answer.json()["embedding"]) - expected).max() < 1e-5
    answer = seeing.server.post("/encode", text=["x", marked], image_data=[None, coded(one)])
    assert np.abs(np.array(answer.json()[1]["embedding"]) - expected).max() < 1e-5
    runs = seeing.server.engine.services.stats().total_encoder_runs
    seeing.server.post("/encode", text=[marked, "x"], image_data=[coded(one), None])
    assert seeing.server.engine.services.stats().total_encoder_runs == runs


def test_invalid_parts_are_refused(seeing: Seeing) -> None:
    post = seeing.server.post
    image = coded(picture(6))
    ask = "/v1/embeddings"
    refused(post(ask), 400, "give either input or messages")
    refused(post(ask, input="a", messages=user(text("a"))), 400, "give either input or messages")
    refused(post(ask, input=["a", {"image": image}]), 400, "input mixes texts with pictures")
    refused(post(ask, input=[{}]), 400, "input[0] is empty; text, image, video, audio")
    refused(post(ask, input=[{"image": "!!"}]), 400, "input[0].image: it is not base64")
    refused(post(ask, input=[{"audio": image}]), 400, "input[0].audio: this model takes no sounds")
    refused(post(ask, messages=[]), 400, "messages is empty; at least one message is needed")
    refused(post(ask, input=[{"text": "a"}] * 5), 400, "input has 5 inputs; 4 are allowed")
    content = user(part(picture(6)))
    refused(post(ask, messages=content, truncate_prompt_tokens=3), 400, "exclude each other")
    refused(post("/encode", text="a", image_data=image), 400, "0 times for 1 image")
    long = post(ask, messages=user(text("long " * 400)))
    refused(long, 400, "more than the context of 1,024")


def test_requests_change_the_sizes_of_pictures(seeing: Seeing) -> None:
    post = seeing.server.post
    one = picture(9)
    given = {
        "smolvlm": {"do_image_splitting": False},
        "qwen2.5-vl": {"min_pixels": 28 * 28 * 12},
        "gemma3": {"do_pan_and_scan": False},
    }[seeing.name]
    body: dict[str, Any] = {"messages": user(part(one)), "mm_processor_kwargs": given}
    usual = post("/v1/embeddings", messages=user(part(one)))
    answer = post("/v1/embeddings", **body)
    turn = f"<|im_start|>user\n{seeing.mark}<|im_end|>\n"
    if seeing.name != "qwen2.5-vl":  # its processor takes them otherwise
        assert np.abs(vectors_of(answer)[0] - seeing.expected(turn, [one], **given)).max() < 1e-5
    counts = [one.json()["usage"]["prompt_tokens"] for one in (usual, answer)]
    assert (counts[0] == counts[1]) is (seeing.name == "gemma3")
    assert post("/tokenize", **body, add_generation_prompt=False).json()["count"] == counts[1]
    # What was made ready for the one is not taken for the other.
    assert vectors_of(post("/v1/embeddings", messages=user(part(one)))).tolist() == (
        vectors_of(usual).tolist()
    )
    wrong = {
        "smolvlm": ({"longest_edge": 65}, "longest_edge is 65; at most 64 is allowed"),
        "qwen2.5-vl": ({"max_pixels": 10**9}, "at most 18816 is allowed"),
        "gemma3": ({"do_pan_and_scan": True}, "this server has it off"),
    }
    for values, words in (wrong[seeing.name], ({"sizes": 1}, "has 'sizes'")):
        body["mm_processor_kwargs"] = values
        refused(post("/v1/embeddings", **body), 400, words)


def test_messages_of_texts_are_cut_if_asked(seeing: Seeing) -> None:
    whole = vectors_of(seeing.server.post("/v1/embeddings", input="<|im_start|>use"))
    answer = seeing.server.post(
        "/v1/embeddings", messages=user(text("a long one")), truncate_prompt_tokens=4
    )
    assert np.abs(vectors_of(answer) - whole).max() < 1e-6
    assert answer.json()["usage"]["prompt_tokens"] == 4


def test_a_program_gets_vectors_of_pictures(seeing: Seeing) -> None:
    if seeing.name != "smolvlm":
        return
    llm = LLM(seeing.model.folder, device="cpu", threads=1, kv_tokens=1_000, task="embed")
    one = picture(7)
    expected = seeing.expected(f"a {seeing.mark}", [one])
    prompt = {"prompt": f"a {seeing.mark}", "images": [one]}
    vectors = llm.embed([prompt, "text"])
    assert np.abs(vectors[0] - expected).max() < 1e-4
    with pytest.raises(InvalidParam, match="cannot be cut"):
        llm.embed(prompt, truncate=True)
    kwargs = {"mm_processor_kwargs": '{"do_image_splitting": false}'}
    settings = {"device": "cpu", "threads": 1, "kv_tokens": 1_000, "task": "embed"}
    whole = LLM(seeing.model.folder, **settings, **kwargs)
    expected = seeing.expected(f"a {seeing.mark}", [one], do_image_splitting=False)
    assert np.abs(whole.embed(prompt)[0] - expected).max() < 1e-4
    for wrong, words in (
        ("[]", "is not an object"),
        ('{"a": 1}', "has 'a'; longest_edge, do_image"),
    ):
        with pytest.raises(SettingsError, match=words):
            LLM(seeing.model.folder, **settings, mm_processor_kwargs=wrong)


def test_a_model_of_texts_refuses_pictures() -> None:
    with pytest.raises(SettingsError, match="takes only text"):
        LLM(NANO, device="cpu", threads=1, kv_tokens=100, mm_processor_kwargs='{"max_pixels": 1}')
    with serving(NANO, kv_tokens=500, task="embed") as server:
        image = coded(picture(8))
        answer = server.post("/v1/embeddings", input=[{"image": image}])
        refused(answer, 400, "input[0].image: this model takes no images")
        answer = server.post("/v1/embeddings", messages=user(part(picture(8))))
        refused(answer, 400, "messages[0].content[0]: this model takes no images")
        answer = server.post("/encode", text="a", image_data=image)
        refused(answer, 400, "image_data: this model takes no images")
        assert vectors_of(server.post("/v1/embeddings", messages=user(text("hello")))).shape[0] == 1
