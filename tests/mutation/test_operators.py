"""Mutants of a small source, all of which can be counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation.equivalents import Key, planted, read_list
from tests.mutation.operators import mutants_of

ROOT = Path(__file__).parents[2]
SOURCE = '''
LIMIT = 3

class Box:
    @property
    def rest(self) -> int:
        """What is left: 5 - 3."""
        assert self.used <= LIMIT
        return max(LIMIT - self.used, 0)

def fill(box: Box, amount: int = 1) -> bool:
    if amount <= box.rest and not box.closed:
        put(box, amount)
        return True
    raise ValueError(f"{amount + 1} do not fit")
'''


def changes(source: str) -> list[tuple[str, str]]:
    return [(mutant.function, mutant.changed(source)[1]) for mutant in mutants_of("box.py", source)]


def test_each_place_that_counts_is_changed_in_every_way_once() -> None:
    assert sorted(changes(SOURCE)) == sorted(
        [
            ("", "LIMIT = 4"),
            ("", "def fill(box: Box, amount: int = 2) -> bool:"),
            ("Box.rest", "return min(LIMIT - self.used, 0)"),
            ("Box.rest", "return max(LIMIT + self.used, 0)"),
            ("Box.rest", "return max(LIMIT - self.used, 1)"),
            ("fill", "if not (amount <= box.rest and not box.closed):"),
            ("fill", "if amount < box.rest and not box.closed:"),
            ("fill", "if amount <= box.rest or not box.closed:"),
            ("fill", "if amount <= box.rest and (box.closed):"),
            ("fill", "pass"),
            ("fill", "put(amount, box)"),
            ("fill", "return False"),
            ("fill", "pass"),
        ]
    )


@pytest.mark.parametrize("path", ["weft/scheduler/admission.py", "weft/memory/allocator.py"])
def test_every_mutant_is_another_program(path: str) -> None:
    source = (ROOT / path).read_text()
    for mutant in mutants_of(path, source):
        changed = mutant.apply(source)
        assert changed != source
        compile(changed, path, "exec")


def test_a_listed_fault_is_found_where_it_is_said_to_stand() -> None:
    (key,) = read_list(
        "weft/box.py fill\n- put(box, amount)\n+ put(box, 2 * amount)\n  twice as much\n"
    )
    assert key == Key("weft/box.py", "fill", "put(box, amount)", "put(box, 2 * amount)")
    mutant = planted(key, SOURCE)
    assert mutant.changed(SOURCE) == ("put(box, amount)", "put(box, 2 * amount)")
    with pytest.raises(AssertionError, match="stands 0 times"):
        planted(key._replace(before="take(box)"), SOURCE)
    with pytest.raises(AssertionError, match="no reason is given"):
        read_list("weft/box.py fill\n- put(box, amount)\n+ pass\n")
