"""Reads the tokenizers of models before they are loaded, whenever no request is open; after that,
the collector of garbage need not examine them.

Reading one of 50,000 tokens keeps the front for a tenth of a second, and the streams of other
models with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from weft.config.model import ModelError
from weft.config.options import SettingsError
from weft.launch.several.hosted import HostedModel, LoadFailed
from weft.observe import garbage

MOST = 16  # models; the tokenizer of each takes some tens of MB
QUIET_S = 0.2  # interval in which it is checked whether no request is open


async def read_ahead(hosts: Sequence[HostedModel], is_busy: Callable[[], bool]) -> None:
    """Read what the front needs of the first of these models. What is wrong with one is said when
    it is loaded."""
    for host in hosts[:MOST]:
        while is_busy():
            await asyncio.sleep(QUIET_S)
        with suppress(LoadFailed, ModelError, SettingsError, OSError):
            await host.prepare()
            await host.read_parts()
    while is_busy():
        await asyncio.sleep(QUIET_S)
    garbage.freeze()
