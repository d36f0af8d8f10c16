"""Options for Ray in words of a command line: read, or refused in one line. Needs no Ray."""

from __future__ import annotations

import pytest

from weft.config.options import SettingsError
from weft.launch.ray_options import integer_of, is_on, number_of


def test_numbers_and_switches_are_read() -> None:
    args = {"num_cpus": "0.5", "num_replicas": "3", "session_affinity": "True"}
    assert number_of(args, "num_cpus", 2) == 0.5
    assert number_of(args, "num_gpus", 0) == 0
    assert integer_of(args, "num_replicas", 1) == 3
    assert integer_of(args, "max_replicas", 4) == 4
    assert integer_of({"min_replicas": "0"}, "min_replicas", 1, least=0) == 0
    assert is_on(args, "session_affinity")
    assert not is_on({}, "session_affinity")


@pytest.mark.parametrize("text", ["1.5", "0", "0.9"])
def test_a_part_of_a_replica_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=f"^n is {text}; it is a whole number, 1 or more$"):
        integer_of({"n": text}, "n", 1)


@pytest.mark.parametrize("text", ["-1", "nan", "inf"])
def test_a_number_that_counts_nothing_is_refused(text: str) -> None:
    for read in (number_of, integer_of):
        with pytest.raises(SettingsError, match=f"^n is {text}; it is 0 or more$"):
            read({"n": text}, "n", 1)


def test_other_words_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"^n is 'two'; it is a number$"):
        integer_of({"n": "two"}, "n", 1)
    with pytest.raises(SettingsError, match=r"^n is 'yes'; it is true or false$"):
        is_on({"n": "yes"}, "n")
