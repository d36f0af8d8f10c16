from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.tokens import (
    EOS,
    byte_tokenizer,
    metaspace_backend,
    plain_space_backend,
    sentencepiece_backend,
    word_end_backend,
    wordpiece_backend,
)
from weft.text.detokenizer import (
    MAX_PENDING_TOKENS,
    ByteDetokenizer,
    Detokenizer,
    WindowDetokenizer,
)
from weft.text.tokenizer import Tokenizer

# tokens that are parts of characters, whole words, and a character and a half
MERGES = [
    (b"h", b"e"),
    (b"\xc3", b"\xb6"),
    (b"\xf0", b"\x9f"),
    (b" ", b"\xe4"),
    (b"\xb8", b"\xad"),
    (b"he", b" \xe4"),
]
BYTES = byte_tokenizer(MERGES)
VOCAB = BYTES.vocab_size

PIECES = ["▁", "▁Hello", "▁wor", "ld", "!", "ö", "▁▁", "a", "中"]
SENTENCEPIECE = Tokenizer(sentencepiece_backend(PIECES))

KINDS = {
    "byte level": BYTES,
    "sentencepiece": SENTENCEPIECE,
    "metaspace": Tokenizer(metaspace_backend(PIECES)),
    "plain space": Tokenizer(plain_space_backend(PIECES)),
    "wordpiece": Tokenizer(wordpiece_backend(["Hello", "wor", "##ld", "##!", "ö", "中"])),
    "word end": Tokenizer(word_end_backend(["hello</w>", "wor", "ld</w>", "!", "ö</w>"])),
}


def deltas(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.push(id) for id in ids), detokenizer.flush()]


@given(ids=st.lists(st.integers(0, VOCAB + 5), max_size=60), skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_deltas_of_any_ids_make_the_full_text(ids: list[int], skip: bool) -> None:
    found = deltas(BYTES.detokenizer(skip_special_tokens=skip), ids)
    assert "".join(found) == BYTES.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=60), data=st.data())
@settings(max_examples=100, deadline=None)
def test_deltas_of_text_cut_anywhere_hold_no_half_character(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    borders = sorted(data.draw(st.sets(st.integers(0, len(raw)))) | {0, len(raw)})
    pieces = {number: raw[a:b] for number, (a, b) in enumerate(pairwise(borders))}
    found = deltas(ByteDetokenizer(pieces), list(pieces))
    assert "".join(found) == text
    assert found[-1] == ""
    assert all(("\ufffd" in delta) <= ("\ufffd" in text) for delta in found)


def test_character_is_shown_with_its_last_byte() -> None:
    assert deltas(BYTES.detokenizer(), [*"ö".encode(), ord("a")]) == ["", "ö", "a", ""]


def test_incomplete_character_is_flushed_as_replacement() -> None:
    assert deltas(BYTES.detokenizer(), [ord("a"), 0xF0, 0x9F]) == ["a", "", "", "\ufffd"]


def test_special_tokens_are_skipped_only_if_asked() -> None:
    assert "".join(deltas(BYTES.detokenizer(), [ord("a"), EOS])) == "a"
    assert (
        "".join(deltas(BYTES.detokenizer(skip_special_tokens=False), [ord("a"), EOS])) == "a<eos>"
    )


_BYTE = st.sampled_from([*"ö".encode(), *"中".encode(), *"🎉".encode(), 0x80, 0x41])


@given(ids=st.lists(st.integers(256, SENTENCEPIECE.vocab_size - 1) | _BYTE, max_size=40))
@settings(max_examples=150, deadline=None)
def test_window_makes_the_full_text_of_valid_runs(ids: list[int]) -> None:
    full = SENTENCEPIECE.decode(ids)
    if "\ufffd" not in full:
        assert "".join(deltas(SENTENCEPIECE.detokenizer(), ids)) == full


@given(text=st.text(st.sampled_from("ab ö中🎉▁"), max_size=30))
@settings(max_examples=100, deadline=None)
def test_window_makes_the_full_text_of_byte_fallback(text: str) -> None:
    ids = list(text.encode())
    found = deltas(SENTENCEPIECE.detokenizer(), ids)
    assert "".join(found) == SENTENCEPIECE.decode(ids)
    assert not any("\ufffd" in delta for delta in found)


def test_window_keeps_the_space_after_a_skipped_token() -> None:
    hello = 256 + 2
    bos = 256
    assert SENTENCEPIECE.decode([hello, bos, hello]) == "Hello Hello"
    assert deltas(SENTENCEPIECE.detokenizer(), [hello, bos, hello]) == ["Hello", "", " Hello", ""]


def test_window_of_invalid_bytes_does_not_grow() -> None:
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return SENTENCEPIECE.decode(ids)

    detokenizer = WindowDetokenizer(decode, {0x80: b"\x80"})
    text = "".join(deltas(detokenizer, [0x80] * 1_000))
    assert set(text) == {"\ufffd"}
    assert longest <= 2 * MAX_PENDING_TOKENS


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=75, deadline=None)
def test_a_completion_goes_on_from_its_prompt_wherever_the_ids_are_cut(
    kind: str, data: st.DataObject
) -> None:
    """Also in the middle of a character, behind special tokens, and behind ids without a token."""
    tokenizer = KINDS[kind]
    skip = data.draw(st.booleans())
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=24))
    full = tokenizer.decode(ids, skip_special_tokens=skip)
    if tokenizer is not BYTES and "\ufffd" in full:
        return  # a run of bytes that is no text: what was valid in it stays
    cut = data.draw(st.integers(0, len(ids)))
    prompt = tokenizer.detokenizer(skip_special_tokens=skip)
    before = "".join(prompt.push(id) for id in ids[:cut])
    rest = deltas(tokenizer.detokenizer(skip_special_tokens=skip, prompt=ids[:cut]), ids[cut:])
    assert before + "".join(rest) == full
    if skip and ids[:cut]:
        assert asyncio.run(tokenizer.decode_prompt(ids[:cut])) == before


@pytest.mark.parametrize("kind", ["sentencepiece", "metaspace"])
def test_the_first_word_of_a_completion_keeps_its_space(kind: str) -> None:
    tokenizer = KINDS[kind]
    prompt = 256 + 2
    space = 256 + 1
    word = 256 + 3
    assert deltas(tokenizer.detokenizer(prompt=[256, prompt]), [word, space]) == [" wor", " ", ""]
    assert deltas(tokenizer.detokenizer(prompt=[256]), [word]) == ["wor", ""]  # it begins the text


def test_a_prompt_that_ends_in_many_special_tokens_is_looked_through() -> None:
    word = 256 + 3
    bos = 256
    assert deltas(SENTENCEPIECE.detokenizer(prompt=[word] + [bos] * 500), [word]) == [" wor", ""]


@pytest.mark.parametrize("text", ["中文字" * 20, "ö", "a" + "🎉" * 9])
def test_a_long_run_of_bytes_goes_on_in_the_completion(text: str) -> None:
    ids = list(text.encode())
    for cut in range(len(ids)):
        prompt = SENTENCEPIECE.detokenizer()
        before = "".join(prompt.push(id) for id in ids[:cut])
        assert (
            before + "".join(deltas(SENTENCEPIECE.detokenizer(prompt=ids[:cut]), ids[cut:])) == text
        )


@pytest.mark.parametrize("tokenizer", [BYTES, SENTENCEPIECE])
def test_unknown_ids_have_no_text(tokenizer: Tokenizer) -> None:
    a = ord("a")
    assert "".join(deltas(tokenizer.detokenizer(), [a, 10**6, a])) == "aa"
