"""Mutants of a small source, all of which can be counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation.areas import AREAS, CORE, Area, part_of
from tests.mutation.equivalents import EQUIVALENT, PLANTED, Key, key_of, planted, read_list
from tests.mutation.operators import functions_of, mutants_of
from tests.seeds import slow

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


def test_what_stands_in_a_coroutine_is_of_its_function() -> None:
    source = """
class Visit:
    async def run(self, times: "int | None" = 3) -> "int | None":
        def next() -> int:
            return self.last + 1
        async for _ in self.beats:
            await self.send(next())
"""
    assert functions_of(source) == {"Visit.run": (3, 2, 7)}
    assert changes(source) == [
        ("", 'async def run(self, times: "int | None" = 4) -> "int | None":'),
        ("Visit.run", "return self.last - 1"),
        ("Visit.run", "return self.last + 2"),
    ]


@pytest.mark.parametrize(
    "path", ["weft/memory/allocator.py", *slow(["weft/scheduler/admission.py"])]
)
def test_every_mutant_is_another_program(path: str) -> None:
    source = (ROOT / path).read_text()
    for mutant in mutants_of(path, source):
        changed = mutant.apply(source)
        assert changed != source
        compile(changed, path, "exec")


@pytest.mark.parametrize("area", AREAS.values(), ids=list(AREAS))
def test_an_area_has_mutants_and_tests_of_its_own(area: Area) -> None:
    for pattern in (*area.paths, *area.tests, *area.traced):
        assert list(ROOT.glob(pattern)), pattern
    sources = [path for pattern in area.paths for path in ROOT.glob(pattern)]
    files = [path for one in sources for path in ([one] if one.suffix else one.rglob("*.py"))]
    assert sum(len(mutants_of(str(path), path.read_text())) for path in files) > 20


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


def test_every_planted_fault_stands_at_one_place_and_is_another_program() -> None:
    """Also after its file was moved or rewritten."""
    wrong: list[str] = []
    for key in read_list(PLANTED.read_text()):
        try:
            source = (ROOT / key.path).read_text()
            mutant = planted(key, source)
            compile(mutant.apply(source), key.path, "exec")
        except (OSError, AssertionError, KeyError, SyntaxError) as exc:
            wrong.append(f"{key}: {type(exc).__name__}: {exc}")
            continue
        if mutant.apply(source) == source:
            wrong.append(f"{key}: it changes nothing")
    assert not wrong, "\n".join(wrong)


def test_every_equivalent_mutant_is_one_that_is_tried() -> None:
    sources = {key.path: "" for key in read_list(EQUIVALENT.read_text())}
    there: set[Key] = set()
    for path in sources:
        source = (ROOT / path).read_text()
        there |= {key_of(mutant, source) for mutant in mutants_of(path, source)}
    gone = [key for key in read_list(EQUIVALENT.read_text()) if key not in there]
    assert not gone, "\n".join(map(str, gone))


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["weft/handoff/decode.py"], {"handoff"}),
        (["weft/handoff", "weft/route"], {"handoff", "route"}),
        (["weft/scheduler/admission.py"], {"core"}),
        (["weft/memory/states"], {"states"}),
        (["weft/scheduler/features/handoff.py"], {"handoff", "features"}),
    ],
)
def test_files_meet_the_tests_of_their_areas(paths: list[str], names: set[str]) -> None:
    name, part = part_of(paths)
    assert set(name.split("+")) == names
    assert set(part.tests) == {test for one in names for test in AREAS[one].tests}
    assert part.paths == tuple(paths)


def test_files_of_no_area_need_to_be_told_their_tests() -> None:
    with pytest.raises(LookupError, match=r"weft/version\.py is in no area"):
        part_of(["weft/version.py"])
    assert part_of(["weft/version.py"], CORE.tests)[1].tests == CORE.tests
