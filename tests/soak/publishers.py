"""Files of strangers that multiply: pictures whose sides, scans or pixels are far more than their
bytes, and adapters with patterns that never end. Each is refused at once, and text beside them goes
on with the same bits."""

from __future__ import annotations

import asyncio
import base64
import functools
import io
import json
import random
from pathlib import Path
from typing import Any

from PIL import Image

from tests.nano_adapters import make_adapter
from tests.soak import traffic
from tests.soak.http import Exchange, call
from tests.soak.ledger import Wrong
from tests.soak.world import World
from tests.text.media_fakes import png_of_size, saved
from tests.text.scanned_pictures import scanned

CHAT = "/v1/chat/completions"
REFUSED_WITHIN_S = 30.0  # by the wall clock of a busy machine; such a picture took 50 to 122 s
# name of an adapter -> its `rank_pattern`, and whether it may be loaded
PATTERNS: dict[str, tuple[dict[str, int], bool]] = {
    "no-end": ({"^(([a-z._0-9])+)+$X": 8}, True),
    "many-steps": ({"(a{999}){99}": 8}, False),
    "look-around": ({"(?=q)q_proj": 8}, False),
}
PLAIN = "plain"  # an adapter without a pattern


def make_adapters(folder: Path) -> None:
    """Folders of adapters for the bundled model, each with one of `PATTERNS`, and a plain one."""
    make_adapter(folder / PLAIN, seed=1)
    for seed, (name, (pattern, _)) in enumerate(PATTERNS.items(), start=2):
        config = make_adapter(folder / name, seed) / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"rank_pattern": pattern}))


async def adapter(world: World, rng: random.Random) -> None:
    """A request that names an adapter, which is loaded for it."""
    name = rng.choice((PLAIN, *PATTERNS))
    is_good = name == PLAIN or PATTERNS[name][1]
    body = {"prompt": traffic.text(rng, 5), "max_tokens": 4, "lora_path": name}
    body["rid"] = world.name()
    expected = 200 if is_good else 400
    await world.ledger.account(
        f"adapter {name}", lambda: _expect(world, "/v1/completions", body, expected)
    )


# ---- pictures


@functools.cache
def hostile_pictures() -> dict[str, str]:
    """Name -> data URL. Each is small, and was long work or much memory."""
    webp = io.BytesIO()
    Image.new("RGB", (6_000, 6_000)).save(webp, "WEBP", lossless=True)
    return {
        "36,000,000 x 1": _url(png_of_size(36_000_000, 1, 36_000_001), "png"),
        "5,000 scans": _url(scanned(5_000), "jpeg"),
        "webp of 6,000 x 6,000": _url(webp.getvalue(), "webp"),
    }


@functools.cache
def honest_picture(width: int, height: int) -> str:
    return _url(saved(Image.effect_noise((width, height), 50).convert("RGB"), "JPEG"), "jpeg")


def _url(data: bytes, type: str) -> str:
    return f"data:image/{type};base64,{base64.b64encode(data).decode()}"


def _asking(world: World, url: str, most: int = 4) -> dict[str, Any]:
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "Look."},
    ]
    message = {"role": "user", "content": parts}
    return {"messages": [message], "max_tokens": most, "rid": world.name()}


async def hostile_picture(world: World, rng: random.Random) -> None:
    name, url = rng.choice(list(hostile_pictures().items()))
    body = _asking(world, url)

    async def send() -> str:
        try:
            async with asyncio.timeout(REFUSED_WITHIN_S):
                return await _expect(world, CHAT, body, 400)
        except TimeoutError:
            raise Wrong(f"no answer within {REFUSED_WITHIN_S:g} s") from None

    await world.ledger.account(f"picture of {name}", send)


async def picture(world: World, rng: random.Random) -> None:
    """One that is what it says."""
    body = _asking(world, honest_picture(rng.randrange(40, 200), rng.randrange(40, 200)))
    await world.ledger.account("picture", lambda: _expect(world, CHAT, body, 200))


async def leave_a_picture(world: World, rng: random.Random) -> None:
    """Leave while a large picture is decoded: its work ends with its client."""
    body = _asking(world, honest_picture(4_000, 3_000))

    async def go() -> str:
        async with Exchange(world.port, "POST", CHAT, body) as exchange:
            await asyncio.sleep(rng.random() * 0.3)
            if rng.random() < 0.5:
                exchange.reset()
        return "left"

    await world.ledger.account("leave a picture", go)


async def _expect(world: World, path: str, body: dict[str, Any], expected: int) -> str:
    status, answer = await call(world.port, "POST", path, body)
    if status != expected and str(status) not in world.may:
        raise Wrong(f"{path} is answered with {status} {answer[:300]!r}, not {expected}")
    if status == 200:
        return "complete"
    if not json.loads(answer)["error"]["message"]:
        raise Wrong(f"{path}: an error without a message: {answer[:200]!r}")
    return f"error {status}"
