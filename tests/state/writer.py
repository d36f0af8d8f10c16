"""Writes records without end, and prints the number of each one that is on disk. The test kills it.

Each round writes one record of two parts, changes another, and deletes one: all of an owner.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from weft.state.store import StateStore

SIZE = 3_000  # bytes of a body, several pages


def body(number: int, part: str) -> bytes:
    """What a part of a record has: it tells whose it is."""
    return f"{number}/{part};".encode() * (SIZE // 8)


def owner(number: int) -> str:
    return "alice" if number % 2 else "bob"


async def write(folder: Path, first: int) -> None:
    store = StateStore(folder)
    number = first
    while True:
        for _ in range(3):  # some are one transaction
            name = f"r{number}"
            parts = {part: body(number, part) for part in ("", "history")}
            store.put("response", owner(number), name, parts)
            if number >= 5:
                store.delete("response", owner(number - 5), f"r{number - 5}")
            number += 1
        await store.settled()
        print(number - 1, flush=True)


if __name__ == "__main__":
    asyncio.run(write(Path(sys.argv[1]), int(sys.argv[2])))
