"""The numbers of a row: nothing of its former owner is left in them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.scheduler.scenes import settings
from tests.scheduler.world import World
from weft.memory.allocator import slots_of
from weft.memory.radix.tree import pages_of
from weft.scheduler.request import NO_ROW, Columns


def numbers_of(columns: Columns, row: int) -> dict[str, Any]:
    """All that stands in a row, but for how often it was given up."""
    arrays = {**vars(columns), **columns.sampling._asdict()}
    found = {name: column[row] for name, column in arrays.items() if isinstance(column, np.ndarray)}
    del found["epoch"]
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in found.items()
    }


def test_a_row_that_is_given_up_is_as_it_was_at_the_beginning() -> None:
    world = World(settings())
    columns = world.scheduler.kv.columns
    before = numbers_of(columns, 0)
    id = world.send(
        [5, 6, 7],
        **{
            "max_new_tokens": 9,
            "temperature": 0.7,
            "top_p": 0.5,
            "top_k": 4,
            "min_p": 0.1,
            "seed": 11,
        },
        **{"stop_token_ids": (250,), "priority": 3, "ignore_eos": False, "background": True},
    )
    world.step()
    world.step()
    row = world.request(id).row
    during = numbers_of(columns, row)
    unchanged = {
        name
        for name, value in during.items()
        if value == before[name] and name not in ("ids", "cached_len")
    }
    assert not unchanged, "a column that the request does not fill proves nothing"
    world.run_dry()
    assert numbers_of(columns, row) == before


def test_a_request_finds_in_its_row_what_it_would_find_in_a_new_one() -> None:
    """The first owner of the row decodes and is much longer; the second's prompt is computed in
    chunks."""
    first = {"prompt": list(range(40)), "max_new_tokens": 30}
    second = {"prompt": list(range(100, 130)), "max_new_tokens": 3}
    found = []
    for former in ([first], []):
        world = World(settings(max_running_requests=1, chunked_prefill_size=8, prefix_cache=False))
        for request in former:
            world.send(**request, ignore_eos=True)  # type: ignore[arg-type]
            world.run_dry()
        id = world.send(**second, ignore_eos=True, seed=1)  # type: ignore[arg-type]
        world.step()
        row = world.request(id).row
        assert row != NO_ROW
        numbers = numbers_of(world.scheduler.kv.columns, row)
        # These name the request, and those before it.
        del numbers["ids"], numbers["requests"], numbers["num_arrived"]
        found.append(numbers)
        world.run_dry()
    assert found[0] == found[1]
    assert found[0]["kv_len"] == 8


def test_pages_that_a_request_holds_are_counted_while_its_prompt_is_computed() -> None:
    world = World(settings(page_size=4, chunked_prefill_size=8, max_running_requests=1))
    world.send(list(range(40)), max_new_tokens=30, ignore_eos=True)
    world.run_dry()
    id = world.send(list(range(100, 118)), max_new_tokens=3, ignore_eos=True)
    kv = world.scheduler.kv
    while world.has_work:
        world.step()
        request = world.scheduler.requests.get(id)
        assert kv.accounts.num_owned == (
            0 if request is None else len(kv.accounts.owned_pages(request))
        )


def test_a_row_goes_on_with_the_pages_that_another_has_put_into_the_cache_meanwhile() -> None:
    """Both find the same prefix, and compute the same tokens behind it: too few for one to wait for
    the other."""
    world = World(settings(page_size=4))
    prefix = list(range(8))
    world.send(prefix, max_new_tokens=1, ignore_eos=True)
    world.run_dry()
    ids = [
        world.send([*prefix, *range(50, 62), 200 + n], max_new_tokens=9, ignore_eos=True)
        for n in range(2)
    ]
    world.step()
    world.step()
    kv = world.scheduler.kv
    used = [kv.rows.slots_of(world.request(id).row, 0, 20).tolist() for id in ids]
    assert used[0] == used[1] == slots_of(pages_of(world.request(ids[0]).prefix.handle), 4).tolist()
    world.run_dry()
    world.check_outputs()
