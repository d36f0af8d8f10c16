"""The shape of the code does not rot: names are unique, and the way of a request stays short.

`docs/understand/shape.md` explains the figures and how each is measured.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.shape.measure import (
    class_names_used_twice,
    density_of_folder,
    density_of_source,
    density_without_magic_commas,
    files_at_the_top,
    state,
    subclasses,
)
from tests.shape.request_path import completion, entered

ROOT = Path(__file__).parents[2]
MAX_FILES = 64
MAX_FUNCTIONS = 347
MAX_STATE = 15
MAX_FILES_AT_THE_TOP = 28


def test_a_plain_request_enters_few_files_and_functions() -> None:
    # Before the others, whose trees its engine's collection would look at.
    found = entered(*completion())
    assert len(found) <= MAX_FILES, sorted(found)
    assert sum(map(len, found.values())) <= MAX_FUNCTIONS
    features = [file for file in found if file.startswith("scheduler/features/")]
    assert not features, "a plain request uses no feature"


def test_no_two_classes_share_a_name() -> None:
    assert class_names_used_twice() == {}


def test_core_packages_have_few_files_at_their_top() -> None:
    assert files_at_the_top("scheduler", "memory", "executor") <= MAX_FILES_AT_THE_TOP


@pytest.mark.parametrize("name", ["Engine", "Scheduler", "Request", "Completion"])
def test_central_classes_keep_little_state(name: str) -> None:
    kept = state(name)
    assert kept, f"there is no class {name}"
    assert len(kept) <= MAX_STATE, kept


@pytest.mark.parametrize("name", ["KvMemory", "PrefillAdder", "PrefillScheduler", "Transfers"])
def test_memory_and_passes_have_no_subclasses(name: str) -> None:
    """A new kind of memory is an element of a list (`scheduler/groups/`)."""
    assert subclasses(name) == []


@pytest.mark.parametrize("name", ["PlainOps", "CppOps", "TritonOps", "Decoder"])
def test_one_class_computes_whatever_a_process_holds(name: str) -> None:
    """A new way to share a model is a `Placement`. Encoders of whole texts have a function more."""
    assert [each for each in subclasses(name) if "EncoderOps" not in each] == []


def test_lines_say_one_thing() -> None:
    density = density_of_folder(ROOT / "weft")
    assert density.long_lines == 0
    assert density.tokens_per_line <= 7.82
    assert density.per_thousand("ternaries") <= 14
    assert density.per_thousand("comprehensions") <= 15
    assert density.per_thousand("multi_assignments") <= 2


def test_commas_keep_no_lines_empty() -> None:
    assert density_without_magic_commas().tokens_per_line <= 8.12


def test_density_counts_what_it_says() -> None:
    source = '''"""A docstring is no code."""
# A comment is no code.
a = b = 1
c, d = a, b
e = [x for x in (c if a else d, b)]
f = rf"""one # token,
not two""" + f"it's one" \\
    "two"  # no line of its own
'''
    found = density_of_source(source)
    assert (found.lines, found.comment_lines, found.long_lines) == (6, 1, 0)
    assert found.tokens == 5 + 7 + 17 + 6
    assert (found.ternaries, found.comprehensions, found.multi_assignments) == (1, 1, 2)
