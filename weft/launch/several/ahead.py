"""Tokenizers that are read before a request needs them."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from weft.config.model import ModelError
from weft.config.options import SettingsError
from weft.launch.several.hosted import LoadFailed
from weft.launch.several.house import House

MOST = 16  # models; the tokenizer of each takes some tens of MB
QUIET_S = 0.2  # interval in which it is checked whether no request is open


async def read_ahead(house: House) -> None:
    """Read the tokenizers of the first models whenever no request is open: reading one would keep
    the streams of other models waiting."""
    for host in list(house.hosts.values())[:MOST]:
        while any(model.num_open for model in house.facts.models.values()):
            await asyncio.sleep(QUIET_S)
        with suppress(LoadFailed, ModelError, SettingsError, OSError):  # its load says why
            await host.prepare()
            await host.read_parts()
