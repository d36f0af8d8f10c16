"""Stop patterns: found as a naive twin finds them however the text is cut, held back within bounds,
and never slow."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.config.automaton import BadPattern
from weft.messages.sampling import InvalidParam, SamplingParams
from weft.text.stop.regex import WINDOW, RegexMatcher, compile_patterns
from weft.text.stop.stopping import StopMatcher, Stops

ATOMS = [
    "a",
    "b",
    ".",
    "[ab]",
    "[^a]",
    r"\d",
    r"\W",
    "(?:ab|b)",
    "(a|)",
    "(?i:B)",
    r"\B",
    "^",
    "(?m:^)",
]
TEXTS = st.text(st.sampled_from("abB1\n "), max_size=12)


@st.composite
def patterns(draw: st.DrawFn) -> str:
    repeats = st.sampled_from(["", "", "*", "+", "?", "{2}", "{1,3}", "*?"])
    parts = draw(st.lists(st.tuples(st.sampled_from(ATOMS), repeats), min_size=1, max_size=4))
    return "".join(
        atom + ("" if "^" in atom[:4] or atom == r"\B" else repeat) for atom, repeat in parts
    ) + draw(st.sampled_from(["", "", "|b1", "|(?:a.)+b"]))


def naive(text: str, pattern: str, include: bool) -> tuple[str, str | None]:
    """The specification: the match that ends first, and of these the one that begins first."""
    compiled = re.compile(pattern)
    for end in range(1, len(text) + 1):
        for start in range(end):
            if compiled.fullmatch(text, start, end):
                return text[: end if include else start], pattern
    return text, None


def run(matcher: StopMatcher, pieces: list[str]) -> tuple[str, str | None]:
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        if matcher.matched is not None:
            return shown, matcher.matched
    shown += matcher.flush()
    return shown, matcher.matched


def matcher_of(*patterns: str, include: bool = False) -> RegexMatcher:
    return RegexMatcher(compile_patterns(patterns), include=include)


@given(pattern=patterns(), pieces=st.lists(TEXTS, max_size=6), include=st.booleans())
@settings(max_examples=150, deadline=None)
def test_matches_like_the_naive_twin_however_the_text_is_cut(
    pattern: str, pieces: list[str], include: bool
) -> None:
    try:
        matcher = matcher_of(pattern, include=include)
    except BadPattern:
        assert re.compile(pattern).fullmatch("") or "^" in pattern or "B" in pattern
        return
    text = "".join(pieces)
    if (
        r"\B" in pattern
    ):  # a twin that knows what comes behind the end of a match is not written in one line
        whole = run(matcher_of(pattern, include=include), list(text))
        assert run(matcher, pieces) == whole
    else:
        assert run(matcher, pieces) == naive(text, pattern, include)


@pytest.mark.parametrize(
    ("pattern", "text", "shown"),
    [
        (r"\n\n+", "one\n\n\ntwo", "one"),
        (r"(?i)\bstop\b", "stopped, Stop!", "stopped, "),
        (r"\bstop\b", "do stop", "do "),  # its end is known when the text ends
        (r"[.!?]\s", "Yes. No.", "Yes"),
        (r"<(\w+)>.*</", "x <b>bold</b>", "x "),
        (r"^\d+\.", "12. first", ""),
        (r"(?m)^Q:", "A: Q:\nQ: and", "A: Q:\n"),
        (r"(?x) a   b  # apart", "-ab", "-"),
        ("é|ß", "straße", "stra"),
        (r"\n$", "one\ntwo", "one"),  # the text so far ends there
        (r"end\Z", "the end of it", "the "),
    ],
)
def test_patterns_that_people_write(pattern: str, text: str, shown: str) -> None:
    for size in (1, 2, 3, 99):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert run(matcher_of(pattern), pieces) == (shown, pattern)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(", "is not a regular expression"),
        ("a*", "matches the empty text"),
        (r"\b", "matches the empty text"),
        (r"(a)\1", "a reference to a group"),
        ("(?=a)b", "look-around"),
        ("(?>a+)b", "what forbids back-tracking"),
        ("(((a{1,100}){1,100}){1,100})", "too large"),
        ("a{4000000000}", "too large"),
        ("(){4000000000}a", "too large"),
        ("(" * 500 + "a" + ")" * 500, "nested too deeply"),
    ],
)
def test_unusable_values_are_refused_at_once(pattern: str, why: str) -> None:
    with pytest.raises(InvalidParam, match=why):
        Stops(SamplingParams(stop_regex=(pattern,)))


@pytest.mark.parametrize(
    "pattern", ["(a+)+b", "((a|a)*)*b", "(a|aa)+b", "(.*)(.*)(.*)(.*)b", "(a?){25}b", ".{1,160}b"]
)
def test_no_pattern_makes_a_text_cost_more_than_in_proportion(pattern: str) -> None:
    matcher = matcher_of(pattern)
    began_s = time.thread_time()
    for _ in range(500):
        matcher.push("aaaa")
    assert matcher.matched is None
    assert (
        time.thread_time() - began_s < 60
    )  # of a processor; in proportion it is a second, else it is for ever


def test_no_more_is_held_back_than_the_window() -> None:
    matcher = matcher_of("<.*>")
    inside = "abcd" * WINDOW
    assert matcher.push("go <") == "go "
    assert matcher.push(inside) == ("<" + inside)[: 1 + len(inside) - WINDOW]
    rest = ("<" + inside + ">")[1 + len(inside) - WINDOW : -WINDOW]
    assert matcher.push("> and") == rest
    assert matcher.matched == "<.*>"


def test_strings_and_patterns_go_together() -> None:
    stops = Stops(SamplingParams(stop=("END",), stop_regex=(r"\d\d",)))
    cases = [
        ("go ENDx", ("go ", "END")),
        ("go 12 END", ("go ", r"\d\d")),
        ("E 1 EN", ("E 1 EN", None)),
    ]
    for text, expected in cases:
        for size in (1, 2, 99):
            matcher = stops.matcher()
            assert matcher is not None
            assert (
                run(matcher, [text[at : at + size] for at in range(0, len(text), size)]) == expected
            )
