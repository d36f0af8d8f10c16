from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.tokens import EOS, byte_tokenizer, sentencepiece_backend
from weft.text.detokenizer import MAX_HELD_TOKENS, ByteDetokenizer, Detokenizer, WindowDetokenizer
from weft.text.tokenizer import Tokenizer

# tokens that are parts of characters, whole words, and a character and a half
MERGES = [(b"h", b"e"), (b"\xc3", b"\xb6"), (b"\xf0", b"\x9f"), (b" ", b"\xe4"), (b"\xb8", b"\xad"), (b"he", b" \xe4")]
BYTES = byte_tokenizer(MERGES)
VOCAB = BYTES.vocab_size

PIECES = ["▁", "▁Hello", "▁wor", "ld", "!", "ö", "▁▁", "a", "中"]
SENTENCEPIECE = Tokenizer(sentencepiece_backend(PIECES))


def deltas(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.push(id) for id in ids), detokenizer.flush()]


@given(ids=st.lists(st.integers(0, VOCAB + 5), max_size=60), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_deltas_of_any_ids_make_the_full_text(ids: list[int], skip: bool) -> None:
    found = deltas(BYTES.detokenizer(skip_special_tokens=skip), ids)
    assert "".join(found) == BYTES.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=60), data=st.data())
@settings(max_examples=200, deadline=None)
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
    assert "".join(deltas(BYTES.detokenizer(skip_special_tokens=False), [ord("a"), EOS])) == "a<eos>"


_BYTE = st.sampled_from([*"ö".encode(), *"中".encode(), *"🎉".encode(), 0x80, 0x41])


@given(ids=st.lists(st.integers(256, SENTENCEPIECE.vocab_size - 1) | _BYTE, max_size=40))
@settings(max_examples=300, deadline=None)
def test_window_makes_the_full_text_of_valid_runs(ids: list[int]) -> None:
    full = SENTENCEPIECE.decode(ids)
    if "\ufffd" not in full:
        assert "".join(deltas(SENTENCEPIECE.detokenizer(), ids)) == full


@given(text=st.text(st.sampled_from("ab ö中🎉▁"), max_size=30))
@settings(max_examples=200, deadline=None)
def test_window_makes_the_full_text_of_byte_fallback(text: str) -> None:
    ids = list(text.encode())
    found = deltas(SENTENCEPIECE.detokenizer(), ids)
    assert "".join(found) == SENTENCEPIECE.decode(ids)
    assert not any("\ufffd" in delta for delta in found)


def test_window_keeps_the_space_after_a_skipped_token() -> None:
    hello, bos = 256 + 2, 256
    assert SENTENCEPIECE.decode([hello, bos, hello]) == "Hello Hello"
    assert deltas(SENTENCEPIECE.detokenizer(), [hello, bos, hello]) == ["Hello", "", " Hello", ""]


def test_window_of_invalid_bytes_does_not_grow() -> None:
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return SENTENCEPIECE.decode(ids)

    detokenizer = WindowDetokenizer(decode, frozenset())
    text = "".join(deltas(detokenizer, [0x80] * 1_000))
    assert set(text) == {"\ufffd"}
    assert longest <= 2 * MAX_HELD_TOKENS


@pytest.mark.parametrize("tokenizer", [BYTES, SENTENCEPIECE])
def test_unknown_ids_have_no_text(tokenizer: Tokenizer) -> None:
    a = ord("a")
    assert "".join(deltas(tokenizer.detokenizer(), [a, 10**6, a])) == "aa"
