"""How much of what could be tried for ever is tried in every run of the tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def seeds(usual: int, of_all: int) -> list[Any]:
    """Seeds of random runs: the first `usual` ones in every run, those up to `of_all` with
    `scripts/test --all`."""
    return [*range(usual), *slow(range(usual, of_all))]


def chosen(usual: Sequence[Any], of_all: Iterable[Any]) -> list[Any]:
    """The `usual` cases in every run, and what else is `of_all` with `scripts/test --all`."""
    return [*usual, *slow(sorted({*of_all}.difference(usual)))]


def every_second(cases: Iterable[Any]) -> list[Any]:
    """The cases, every second of which is for `scripts/test --all` alone."""
    return one_in(2, cases)


def one_in(num: int, cases: Iterable[Any]) -> list[Any]:
    """The cases: the first of each `num` for every run, the others for `scripts/test --all`."""
    return [slow([case])[0] if place % num else case for place, case in enumerate(cases)]


def slow(cases: Iterable[Any]) -> list[Any]:
    """The cases, for `scripts/test --all` alone."""
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]
