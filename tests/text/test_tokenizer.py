from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.text.tokens import BOS, EOS, byte_backend, byte_tokenizer, sentencepiece_backend
from weft.messages.sampling import InvalidParam
from weft.text.tokenizer import ContextExceeded, Tokenizer, TokenizerError


def write(folder: Path, **files: object) -> Path:
    byte_backend().save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_loads_what_a_model_folder_holds(tmp_path: Path) -> None:
    config = {
        "bos_token": "<bos>",
        "eos_token": {"content": "<eos>", "lstrip": False},
        "chat_template": "hello",
    }
    tokenizer = Tokenizer.load(write(tmp_path, tokenizer_config__json=config))
    assert tokenizer.bos_token_id == BOS
    assert tokenizer.eos_token_id == EOS
    assert tokenizer.vocab_size == 260
    assert tokenizer.special_ids == {256, 257, 258, 259}
    assert tokenizer.chat_templates == {"default": "hello"}
    assert tokenizer.encode("hé") == [ord("h"), 0xC3, 0xA9]
    assert tokenizer.decode([ord("h"), EOS]) == "h"


def test_template_file_wins_over_the_configuration(tmp_path: Path) -> None:
    config = {
        "chat_template": [
            {"name": "default", "template": "a"},
            {"name": "tool_use", "template": "b"},
        ]
    }
    folder = write(tmp_path, tokenizer_config__json=config)
    assert Tokenizer.load(folder).chat_templates == {"default": "a", "tool_use": "b"}
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "c"}))
    assert Tokenizer.load(folder).chat_templates == {"default": "c"}
    (folder / "chat_template.jinja").write_text("d")
    assert Tokenizer.load(folder).chat_templates == {"default": "d"}


def test_further_templates_stand_in_a_folder_of_their_own(tmp_path: Path) -> None:
    folder = write(tmp_path, tokenizer_config__json={"chat_template": "a"})
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("b")
    assert Tokenizer.load(folder).chat_templates == {"default": "a", "tool_use": "b"}
    (folder / "chat_template.jinja").write_text("c")
    assert Tokenizer.load(folder).chat_templates == {"default": "c", "tool_use": "b"}


def test_model_without_configuration_has_no_special_names(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path))
    assert tokenizer.eos_token_id is None
    assert tokenizer.chat_templates == {}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", '{"model": 1}'),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer_config.json", "["),
        ("tokenizer_config.json", '{"bos_token": 5}'),
        ("tokenizer_config.json", '{"chat_template": [1]}'),
        ("chat_template.json", "nonsense"),
    ],
)
def test_broken_file_is_named(tmp_path: Path, name: str, content: str) -> None:
    write(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(TokenizerError, match=name):
        Tokenizer.load(tmp_path)


def test_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json does not exist"):
        Tokenizer.load(tmp_path)


def test_lone_surrogates_are_the_users_fault() -> None:
    with pytest.raises(InvalidParam, match="Unicode"):
        byte_tokenizer().encode("\ud800")


def test_special_tokens_in_text_become_special_tokens() -> None:
    assert byte_tokenizer().encode("a<eos>") == [ord("a"), EOS]


def test_long_text_does_not_block_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer()
    text = "wörld " * 50_000
    may_go_on = threading.Event()

    def slow(how: Callable[..., Any]) -> Callable[..., Any]:
        def work(*args: Any, **kwargs: Any) -> Any:
            assert may_go_on.wait(240), "the event loop stands still"
            return how(*args, **kwargs)

        return work

    backend = SimpleNamespace(decode_batch=slow(tokenizer._backend.decode_batch))
    monkeypatch.setattr(tokenizer, "encode_all", slow(tokenizer.encode_all))

    async def beside(job: Coroutine[Any, Any, Any]) -> Any:
        may_go_on.clear()
        task = asyncio.create_task(job)
        await asyncio.sleep(0.01)
        may_go_on.set()
        return await task

    async def main() -> None:
        [ids] = await beside(tokenizer.encode_async([text]))
        assert ids == list(text.encode())
        monkeypatch.setattr(tokenizer, "_backend", backend)
        assert await beside(tokenizer.decode_async(ids)) == text

    asyncio.run(main())


def test_many_texts_are_encoded_in_turns_and_the_first_that_is_too_long_ends_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = byte_tokenizer()
    turns: list[int] = []
    encode_all = tokenizer.encode_all

    def counted(texts: Sequence[str], **options: Any) -> list[list[int]]:
        turns.append(sum(map(len, texts)))
        return encode_all(texts, **options)

    monkeypatch.setattr(tokenizer, "encode_all", counted)
    monkeypatch.setattr("weft.text.tokenizer.SLICE_LEN", 10_000)
    texts = [letter * 3_000 for letter in "abcdefgh"] + ["i" * 20_000, "j"]

    async def main() -> None:
        found = await tokenizer.encode_async(texts)
        assert found == encode_all(texts)
        assert turns == [9_000, 9_000, 6_000, 20_000, 1]
        turns.clear()
        with pytest.raises(ContextExceeded):
            await tokenizer.encode_async(["a" * 3_000, *(["b" * 3_001] * 100)], context_len=3_000)
        assert len(turns) == 1
        pairs: list[str | tuple[str, str]] = [("ab", "c" * 6_000), *["d" * 6_000] * 5]
        assert await tokenizer.encode_inputs(pairs, max_len=50) == tokenizer.encode_each(pairs, 50)

    asyncio.run(main())


def test_text_that_no_context_holds_is_refused_without_a_turn() -> None:
    tokenizer = byte_tokenizer()

    async def main() -> None:
        with pytest.raises(ContextExceeded, match="no context of 10 tokens holds it"):
            await tokenizer.encode_async(["a", "a" * 1_000_000], context_len=10)

    asyncio.run(main())


def test_bytes_of_tokens_show_parts_of_characters() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.token_bytes(0xC3) == b"\xc3"
    assert tokenizer.token_text(0xC3) == "\ufffd"
    assert tokenizer.token_text(EOS) == "<eos>"
    assert tokenizer.token_bytes(10**6) == b""


def test_bytes_of_sentencepiece_tokens() -> None:
    tokenizer = Tokenizer(sentencepiece_backend(["▁Hello"]))
    assert tokenizer.token_bytes(0xC3) == b"\xc3"
    assert tokenizer.token_bytes(257) == b" Hello"


def test_text_beyond_the_context_is_refused_before_the_work() -> None:
    tokenizer = byte_tokenizer()
    longest = len("<|im_start|>")
    assert tokenizer.encode_all(["a" * 10], context_len=10) == [[97] * 10]
    with pytest.raises(ContextExceeded, match="11 tokens, more than the context of 10"):
        tokenizer.encode_all(["a", "a" * 11], context_len=10)
    with pytest.raises(ContextExceeded, match="characters"):
        tokenizer.encode_all(["a" * (10 * longest + 1)], context_len=10)
