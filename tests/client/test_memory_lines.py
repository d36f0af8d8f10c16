"""Memory in words, as the live page tells it."""

from __future__ import annotations

from msgspec.structs import replace

from weft.client.memory_lines import owners, pins, stores
from weft.config.drafts import SOURCES
from weft.messages.pins import PinStatus
from weft.messages.status import Stats


def test_a_store_has_a_line_where_it_holds_something() -> None:
    assert stores(Stats()) == []
    stats = Stats(
        adapter_slots=4,
        adapter_slots_used=1,
        num_adapters=2,
        disk_bytes=1_234_000_000,
        disk_blocks=12_345,
        total_drafts_ngram=10,
        total_accepted_ngram=7,
    )
    assert stores(stats) == [
        {
            "words": "on disk: 1.23 GB in 12,345 blocks · 0 tokens found there · 0 faults",
            "share": None,
        },
        {"words": "adapters: 1 run in 4 slots, 2 loaded", "share": 0.25},
        {"words": "guesses (ngram): 7 of 10 right", "share": 0.7},
    ]


def test_each_source_of_guesses_has_a_line() -> None:
    for source in SOURCES:
        numbers = {f"total_drafts_{source}": 4, f"total_accepted_{source}": 3}
        [line] = stores(replace(Stats(), **numbers))
        assert line == {"words": f"guesses ({source}): 3 of 4 right", "share": 0.75}


def test_the_owners_of_the_pool_sum_up_to_it() -> None:
    stats = Stats(kv_tokens=100, kv_used=40, pinned_tokens=6, kv_evictable=20, kv_held=5)
    found = owners(stats)
    assert found == {"requests": 34, "cached": 20, "pinned": 11, "out of use": 0, "free": 35}
    assert sum(found.values()) == stats.kv_tokens


def test_a_pin_says_whose_it_is_for_how_long_and_what_is_wrong() -> None:
    pin = PinStatus(
        name="a", tenant="alice", tokens=64, state="firm", ttl_s=300, expires_in_s=7_260.0, uses=1
    )
    lost = PinStatus(
        name="b", tenant="", tokens=64, state="gives way", ttl_s=9, expires_in_s=125.0, uses=2
    )
    assert [one["words"] for one in pins([pin, lost])] == [
        "64 tokens · alice · used 1 time · for 2 h 1 min",
        "64 tokens · used 2 times · for 2 min · gives way",
    ]
