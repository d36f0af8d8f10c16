from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from weft.config.numbers import MAX_STOP_LEN, MAX_STOP_STRINGS
from weft.text.stop.strings import StopStrings, StringMatcher, compile_stops

TEXTS = st.text(st.sampled_from("abö"), max_size=30)
STOPS = st.lists(st.text(st.sampled_from("abö"), min_size=1, max_size=5), min_size=1, max_size=5)


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The specification: the stop string that ends first, of those the longest."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(pieces=st.lists(TEXTS, max_size=8), stops=STOPS, include=st.booleans())
@settings(max_examples=500, deadline=None)
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
@settings(max_examples=200, deadline=None)
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
