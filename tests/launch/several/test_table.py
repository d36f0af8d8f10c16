"""The models of a server as lines of `weft ps` and `weft ctl models list`."""

from __future__ import annotations

import msgspec

from weft.cli.models_table import loaded_table, models_table
from weft.server.admin.models import OfferedModel, OfferedModels, StatusOfModel


def answer() -> object:
    small = OfferedModel(
        id="small",
        created=1,
        status=StatusOfModel(value="loaded"),
        pin=True,
        open_requests=3,
        memory_bytes=512_000_000,
        context_length=2048,
    )
    large = OfferedModel(
        id="large",
        created=1,
        is_default=False,
        status=StatusOfModel(value="unloaded", position=1, eta_s=4.4),
        waiting_requests=2,
        size_bytes=3_000_000_000,
    )
    broken = OfferedModel(
        id="broken",
        created=1,
        is_default=False,
        status=StatusOfModel(value="failed", failed=True, reason="its weights are made of wool"),
    )
    return msgspec.to_builtins(OfferedModels(data=[small, large, broken]))


def test_all_models_have_a_line_and_failures_their_reason() -> None:
    assert list(models_table(answer())) == [
        "NAME     STATE                        MEMORY  CONTEXT  OPEN  WAITING  UNTIL",
        "small *  loaded                       512 MB  2,048    3     0        pinned",
        "large    unloaded (1 before it, 4 s)  3.0 GB  -        0     2        -",
        "broken   failed                       -       -        0     0        -",
        "broken: its weights are made of wool",
    ]


def test_models_in_memory_are_shown_alone() -> None:
    lines = list(loaded_table(answer()))
    assert len(lines) == 2
    assert list(loaded_table({"data": []})) == ["no model is loaded"]
