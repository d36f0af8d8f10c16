"""Pictures over HTTP and in `LLM`, before a tiny LLaVA with all the files of a checkpoint: the
tokens are those that transformers computes with its own processor."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from tests.models.many import Checkpoint
from tests.models.pictures import IMAGE_TOKEN, SIDE, TEXT, make_with_pictures
from tests.server.real_engine import RealServer, serving
from tests.text.media_fakes import saved
from tests.text.tokens import EOS, byte_backend
from weft.config.options import SettingsError
from weft.llm import LLM
from weft.messages.sampling import InvalidParam, SamplingParams

NUM_NEW = 8
NUM_TOKENS = 16  # of a picture
TEMPLATE = (
    "{% for m in messages %}{{ m.role.upper() + ': ' }}"
    "{% for part in m.content | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}"
    "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text + ' ' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


class Llava(NamedTuple):
    checkpoint: Checkpoint
    processor: Any

    def answer(self, text: str, images: list[Image.Image]) -> list[int]:
        """Greedily, by transformers, of a text with marks."""
        ids = encode(text.replace("<image>", "<image>" * NUM_TOKENS))
        pixels = self.processor(images=images, return_tensors="pt")["pixel_values"]
        new: list[int] = []
        for _ in range(NUM_NEW):
            with torch.inference_mode():
                every = torch.tensor([ids + new])
                logits = self.checkpoint.model(input_ids=every, pixel_values=pixels).logits
            new.append(int(logits[0, -1].argmax()))
        return new


def backend() -> Any:
    from tokenizers import AddedToken

    found = byte_backend()
    fillers = [f"<filler {number}>" for number in range(found.get_vocab_size(), IMAGE_TOKEN)]
    added = [AddedToken(name, special=True) for name in [*fillers, "<image>"]]
    found.add_special_tokens(added)
    return found


def encode(text: str) -> list[int]:
    return list(backend().encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Llava:
    folder = tmp_path_factory.mktemp("llava")
    checkpoint = make_with_pictures("llava", folder, eos_token_id=EOS)
    backend().save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    size = {"height": SIDE, "width": SIDE}
    processor = transformers.CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=size)
    processor.save_pretrained(folder)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    settings["image_processor_type"] = "CLIPImageProcessor"
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return Llava(checkpoint, processor)


@pytest.fixture(scope="module")
def server(llava: Llava) -> Iterator[RealServer]:
    with serving(llava.checkpoint.folder, kv_tokens=2_000, dtype="float32") as found:
        yield found


def noise(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def part(image: Image.Image) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(saved(image)).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def ask(server: RealServer, *content: Any, **fields: Any) -> dict[str, Any]:
    answer = server.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": list(content)}],
        max_tokens=NUM_NEW,
        temperature=0,
        ignore_eos=True,
        return_token_ids=True,
        **fields,
    )
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def test_answers_about_pictures_are_those_of_transformers(server: RealServer, llava: Llava) -> None:
    one = noise(1)
    two = noise(2, 90, 31)
    answer = ask(server, part(one), text("What?"))
    expected = llava.answer("USER: <image>\nWhat? ASSISTANT:", [one])
    assert answer["choices"][0]["token_ids"] == expected
    assert answer["usage"]["prompt_tokens_details"]["image_tokens"] == NUM_TOKENS
    answer = ask(server, text("First"), part(two), part(one), text("last?"))
    expected = llava.answer("USER: <image>\n<image>\nFirst last? ASSISTANT:", [two, one])
    assert answer["choices"][0]["token_ids"] == expected
    assert ask(server, text("What?"))["usage"]["prompt_tokens"] == len("USER: What? ASSISTANT:")


def test_an_encoder_of_twelve_bits_gives_the_same_tokens(llava: Llava) -> None:
    with serving(
        llava.checkpoint.folder, kv_tokens=2_000, dtype="float32", quantize_encoder="int12"
    ) as server:
        answer = ask(server, part(noise(1)), text("What?"))
    expected = llava.answer("USER: <image>\nWhat? ASSISTANT:", [noise(1)])
    assert answer["choices"][0]["token_ids"] == expected


def test_the_same_picture_is_found_and_another_is_not(server: RealServer) -> None:
    words = text("Tell me what there is to be seen in this picture, please.")
    first = ask(server, part(noise(3)), words)
    runs = server.engine.services.stats().total_encoder_runs
    again = ask(server, part(noise(3)), words)
    assert again["choices"] == first["choices"]
    assert server.engine.services.stats().total_encoder_runs == runs
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > again["usage"]["prompt_tokens"] - 16  # all whole pages
    other = ask(server, part(noise(4)), words)
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] <= len("USER: ")
    assert server.engine.services.stats().total_encoder_runs == runs + 1


def test_the_load_says_what_is_kept_encoded_and_how_long_it_took(server: RealServer) -> None:
    def numbers() -> dict[str, float]:
        stats = server.engine.services.stats()
        return {name: getattr(stats, name) for name in stats.__struct_fields__}

    words = text("And this one?")
    before = numbers()
    ask(server, part(noise(30)), words)
    once = numbers()
    ask(server, part(noise(30)), words, cache_salt="another")
    twice = numbers()
    assert once["encoder_items"] == before["encoder_items"] + 1
    assert once["encoder_bytes"] == once["encoder_tokens"] * 4 * TEXT["hidden_size"] > 0
    assert once["total_encoder_misses"] == before["total_encoder_misses"] + 1
    assert once["total_encoder_s"] > before["total_encoder_s"]
    assert twice["total_encoder_hits"] == once["total_encoder_hits"] + 1
    for name in ("encoder_items", "encoder_bytes", "total_encoder_misses", "total_encoder_s"):
        assert twice[name] == once[name]
    [load] = server.get("/v1/loads").json()["loads"]
    assert set(load["stats"]) == set(twice)
    page = server.get("/metrics").text
    for name in ("encoder_cache_bytes", "encoder_cache_misses_total", "encoder_seconds_total"):
        assert f"\nweft:{name}{{" in page


def test_completions_of_a_prompt_share_one_run_of_the_encoder(server: RealServer) -> None:
    runs = server.engine.services.stats().total_encoder_runs
    answer = ask(server, part(noise(5)), text("n"), n=3)
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) == 1
    assert server.engine.services.stats().total_encoder_runs == runs + 1


def test_a_program_gives_pictures_in_several_forms(llava: Llava, tmp_path: Path) -> None:
    llm = LLM(llava.checkpoint.folder, device="cpu", threads=1, kv_tokens=1_000, dtype="float32")
    params = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
    image = noise(6)
    expected = llava.answer("USER: <image>\nWhat? ASSISTANT:", [image])
    data = saved(image)
    path = tmp_path / "a b.png"
    path.write_bytes(data)
    for one in (image, data, path, base64.b64encode(data).decode(), path.as_uri()):
        content = [{"type": "image", "image": one}, text("What?")]
        [output] = llm.chat([{"role": "user", "content": content}], params)
        assert output.token_ids == expected
        prompt = {"prompt": "USER: <image>\nWhat? ASSISTANT:", "images": [one]}
        assert llm.generate(prompt, params)[0].token_ids == expected
    [output] = llm.chat([{"role": "user", "content": [part(image), text("What?")]}], params)
    assert output.token_ids == expected
    ids = encode("USER: " + "<image>" * NUM_TOKENS + "\nWhat? ASSISTANT:")
    outputs = llm.generate([{"prompt": ids, "images": [image]}, ids[:5]], params)
    assert outputs[0].token_ids == expected
    for wrong, words in [
        ({"prompt": "none", "images": [image]}, "mark '<image>' 0 times for 1 image"),
        ({"prompt": "<image>", "images": ["http://x.example/"]}, "--allowed-media-domains"),
        ({"prompt": "<image>", "images": [tmp_path / "none"]}, "its file cannot be read"),
        ({"prompt": "<image>", "images": [5]}, r"images\[0\] is 5; an address"),
        ({"prompt": "<image>", "images": str(path)}, "a list, also for one, is expected"),
        ({"prompt": "<image>", "images": data}, r"images is b.*; a list, also for one, is"),
        ({"prompt": "<image>", "images": image}, "images is <.*; a list, also for one, is"),
        ({"prompt": "<image>", "audios": [b"RIFF"]}, "takes no sounds"),
        ({"text": "x"}, "a prompt has 'text'"),
    ]:
        with pytest.raises(InvalidParam, match=words):
            llm.generate(wrong, params)
    with pytest.raises(InvalidParam, match=r"messages\[0\]\.content\[0\] has no image_url"):
        llm.chat([{"role": "user", "content": [{"type": "image_url"}]}], params)
    with pytest.raises(InvalidParam, match=r"messages is .What.*; a list of messages"):
        llm.chat("What?", params)  # type: ignore[arg-type]


def test_a_folder_without_the_settings_of_pictures_is_refused(llava: Llava, tmp_path: Path) -> None:
    for file in llava.checkpoint.folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "Other"}')
    with pytest.raises((SettingsError, ValueError), match="Other"):
        LLM(tmp_path, device="cpu", threads=1, kv_tokens=100)


def test_a_program_with_a_model_of_texts_gives_no_pictures() -> None:
    llm = LLM(device="cpu", threads=1, kv_tokens=100)
    file = io.BytesIO()
    noise(7).save(file, "PNG")
    with pytest.raises(InvalidParam, match=r"images\[0\]: .* takes no images"):
        llm.generate({"prompt": "a", "images": [file.getvalue()]})
