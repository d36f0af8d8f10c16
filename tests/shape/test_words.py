"""Words that have meant too many things become rarer, and phrases that are hard to read do not come
back."""

from __future__ import annotations

from tests.shape.words import MOST, counts, phrases


def test_words_with_many_meanings_do_not_become_more() -> None:
    found = {word: names.total() for word, names in counts().items()}
    more = {word: found[word] for word, most in MOST.items() if found.get(word, 0) > most}
    assert not more, "say what it is: docs/contribute/style.md, tests/shape/words.py"


def test_no_phrase_is_hard_to_read() -> None:
    assert phrases() == []
