"""A sample of the random requests of `draft_proof`: with drafts of each source every bit is as
without."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.draft_proof import SOURCES, prove
from tests.seeds import slow
from weft.messages.status import Stats


def num_right(stats: Stats) -> int:
    return stats.total_accepted_tree + stats.total_accepted_ngram


@pytest.mark.parametrize("seed", [1, *slow([2])])
def test_random_requests_have_the_same_answers_with_drafts_of_each_source(seed: int) -> None:
    plain, tree, _, knowing, wrong = prove(seed, 7, SOURCES)
    assert num_right(tree) > 20
    assert num_right(knowing) > 30
    assert tree.total_steps < plain.total_steps
    assert wrong.total_drafts_ngram > 30
    assert num_right(wrong) < wrong.total_drafts_ngram / 10


@pytest.mark.slow
def test_random_requests_have_the_same_tokens_where_torch_computes() -> None:
    settings: dict[str, Any] = {"kernels": "torch", "dtype": "float32"}
    _, tree, knowing = prove(3, 4, ("tree", "knowing"), **settings)
    assert num_right(tree) > 10
    assert num_right(knowing) > 10
