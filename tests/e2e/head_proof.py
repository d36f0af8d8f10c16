"""Random requests of every kind with heads: bit for bit the answers without them, beside adapters,
a cache on disk, overlap, aborts and retractions.

`python -m tests.e2e.head_proof --requests 1000` runs so many for each family, which takes some
minutes; the suite runs a sample (`test_heads.py`). Weights and heads are random, and each guess is
computed, whatever it costs.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.e2e.draft_proof import NANO, prove
from tests.e2e.random_heads import save_eagle3
from tests.executor.gguf_ahead import VARIANTS, ahead_weights, written
from tests.executor.gguf_models import described
from tests.nano_adapters import NANO as NANO_FOLDER
from tests.nano_adapters import make_adapter
from weft.messages.status import Stats

FAMILIES = ("eagle3", *VARIANTS)
ENDINGS = ("q_proj", "o_proj", "down_proj")


class Family(NamedTuple):
    """A model with a head, and adapters for it."""

    source: str
    model: str
    head: str
    adapters: dict[str, str]


@contextmanager
def family_of(name: str) -> Iterator[Family]:
    """The files of a family, as long as they are used."""
    with tempfile.TemporaryDirectory(prefix="weft-heads-") as root:
        folder = Path(root)
        model = NANO
        files = NANO_FOLDER
        head = ""
        source = "mtp"
        if name == "eagle3":
            source = name
            head = str(save_eagle3(folder / "head"))
        else:
            model = str(written(folder, name, ahead_weights(name, VARIANTS[name][0])))
            files = described(Path(model))
        adapters = {
            each: str(make_adapter(folder / each, seed, endings=ENDINGS, model=files))
            for seed, each in enumerate(("one", "two"))
        }
        yield Family(source, model, head, adapters)


def prove_beside(family: Family, seed: int, num_requests: int) -> tuple[Stats, Stats]:
    """The engine's numbers without and with the head. What is beside it depends on `seed`."""
    rng = random.Random(f"beside {seed}")
    settings: dict[str, Any] = {"model": family.model, "max_mamba_cache_size": 64}
    if rng.random() < 0.5:
        settings["lora_paths"] = family.adapters
    with tempfile.TemporaryDirectory(prefix="weft-disk-") as cache:
        if rng.random() < 0.5:
            settings |= {"cache_dir": cache, "kv_tokens": 192}
        settings["overlap"] = rng.random() < 0.3
        plain, with_head = prove(seed, num_requests, (family.source,), family.head, **settings)
    return plain, with_head


def num_drafts(stats: Stats) -> int:
    return stats.total_drafts_eagle3 + stats.total_drafts_mtp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000, help="for each family")
    parser.add_argument("--per-world", type=int, default=20, help="with the same settings")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    for name in args.families.split(","):
        began = time.monotonic()
        drafts = 0
        retractions = 0
        num_worlds = -(-args.requests // args.per_world)
        with family_of(name) as family:
            for seed in range(args.seed, args.seed + num_worlds):
                _, with_head = prove_beside(family, seed, args.per_world)
                drafts += num_drafts(with_head)
                retractions += with_head.total_retractions
        took_s = time.monotonic() - began
        told = f"{drafts:,} guesses, {retractions:,} retractions, {took_s:.0f} s"
        print(f"{name}: {num_worlds * args.per_world:,} requests the same; {told}", flush=True)


if __name__ == "__main__":
    main()
