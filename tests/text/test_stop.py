from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.naive_stops import naive
from weft.config.numbers import MAX_STOP_LEN, MAX_STOP_STRINGS
from weft.text.parsers.formats import REASONING_FORMATS
from weft.text.stop.answer import AnswerMatcher
from weft.text.stop.strings import StopStrings, StringMatcher, compile_stops

THOUGHTS = ["<think>", "</think>", "<", "th", "\n", " ", "a", "b", "aö"]
TEXTS = st.text(st.sampled_from("abö"), max_size=30)
STOPS = st.lists(st.text(st.sampled_from("abö"), min_size=1, max_size=5), min_size=1, max_size=5)


@given(pieces=st.lists(TEXTS, max_size=8), stops=STOPS, include=st.booleans())
@settings(max_examples=250, deadline=None)
def test_matches_like_the_naive_twin_however_the_text_is_cut(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    matcher = StringMatcher(compile_stops(tuple(stops)), include=include)
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        if matcher.matched is not None:
            break
    else:
        shown += matcher.flush()
    assert (shown, matcher.matched) == naive("".join(pieces), stops, include)


@given(text=TEXTS, stops=STOPS)
@settings(max_examples=100, deadline=None)
def test_holds_back_only_what_may_be_a_beginning(text: str, stops: list[str]) -> None:
    matcher = StringMatcher(compile_stops(tuple(stops)), include=False)
    shown = ""
    for char in text:
        shown += matcher.push(char)
        if matcher.matched is not None:
            return
    held = matcher.flush()
    assert shown + held == text
    longest = max(
        (k for stop in stops for k in range(len(stop)) if text.endswith(stop[:k])), default=0
    )
    assert len(held) == longest


def test_stop_string_over_three_pieces_is_cut_off() -> None:
    matcher = StringMatcher(compile_stops(("END",)), include=False)
    assert [matcher.push(piece) for piece in ("go E", "N", "Dx")] == ["go ", "", ""]
    assert matcher.matched == "END"


def test_false_beginning_is_shown_later() -> None:
    matcher = StringMatcher(compile_stops(("END",)), include=False)
    assert [matcher.push(piece) for piece in ("E", "EN", "E", ".")] == ["", "E", "EN", "E."]
    assert matcher.matched is None


def test_many_long_stop_strings_cost_no_more_than_one() -> None:
    stops = tuple(f"{number:03d}" + "a" * (MAX_STOP_LEN - 3) for number in range(MAX_STOP_STRINGS))
    began_s = time.thread_time()
    matcher = StringMatcher(StopStrings(stops), include=False)
    built_s = time.thread_time()
    text = "063" + "a" * (MAX_STOP_LEN - 4)
    for char in text * 10:
        matcher.push(char)
    assert matcher.matched is None
    assert built_s - began_s < 20  # seconds of a processor, of which a hundredth is needed
    assert time.thread_time() - built_s < 10


@given(
    pieces=st.lists(st.text(st.sampled_from("ab<\n")) | st.sampled_from(THOUGHTS), max_size=12),
    stops=STOPS,
    is_open=st.booleans(),
    num_silent=st.integers(0, 3),
)
@settings(max_examples=250, deadline=None)
def test_only_the_answer_after_the_reasoning_is_matched_however_the_text_is_cut(
    pieces: list[str], stops: list[str], is_open: bool, num_silent: int
) -> None:
    text = "".join(pieces)
    reasoning, answer = _parts(text, is_open)
    parser = REASONING_FORMATS["qwen3"].parser("<think>" if is_open else "", eager=True)
    inner = StringMatcher(compile_stops(tuple(stops)), include=False)
    matcher = AnswerMatcher(inner, parser)
    silent = "".join(pieces[:num_silent])
    shown = ""
    for number, piece in enumerate(pieces):
        shown += matcher.pass_over(piece) if number < num_silent else matcher.push(piece)
        if matcher.matched is not None:
            break
    else:
        shown += matcher.flush()
    if not num_silent:
        found, matched = naive(answer, stops, False)
        assert shown == reasoning + found
        assert matcher.matched == matched
    elif len(silent) >= len(text):
        assert shown.startswith(reasoning)


def _parts(text: str, is_open: bool) -> tuple[str, str]:
    """The reasoning with its marks and the white space after it, and the answer."""
    begin = text.lstrip()
    if not is_open and not begin.startswith("<think>"):
        return "", text
    _, mark, behind = begin.removeprefix("<think>").partition("</think>")
    if not mark:
        return text, ""
    answer = behind.lstrip()
    return text.removesuffix(answer) if answer else text, answer


def test_a_format_with_marks_around_the_answer_matches_in_the_answer() -> None:
    text = "<|channel|>analysis<|message|>END?<|end|><|start|>assistant<|channel|>final<|message|>Yes END no"
    for size in (1, 5, 1_000):
        parser = REASONING_FORMATS["gpt_oss"].parser("", eager=True)
        matcher = AnswerMatcher(StringMatcher(compile_stops(("END",)), include=False), parser)
        shown = ""
        for start in range(0, len(text), size):
            shown += matcher.push(text[start : start + size])
            if matcher.matched is not None:
                break
        assert shown == text.partition(" END")[0] + " "
        assert matcher.matched == "END"
