"""Drives the GPU's path with a GPU that is played."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.executor.driver import Driver, Turn, ints, make_driver
from weft.plan.step import Sampling


def gpu_driver(sizes: str = "1,2,4", **settings: object) -> Driver:
    return make_driver(
        **{"device": "cuda", "cuda_graph_sizes": sizes, "cuda_graph_prompt": 0, **settings}
    )


def drawn(each: Driver, *turns: Turn) -> list[int]:
    """Tokens of a step whose requests draw, each in its own way."""
    plan = each.plan(*turns)
    num = len(plan.sampling.positions)
    how = Sampling(
        temperature=np.linspace(0.0, 2.0, num + 1, dtype=np.float32)[1:],
        top_p=np.full(num, 0.9, np.float32),
        top_k=ints(range(3, 3 + num)),
        min_p=np.full(num, 0.01, np.float32),
        seeds=np.arange(num, dtype=np.int64) - 5,
        positions=plan.sampling.positions,
    )
    return each.runner.launch(replace(plan, sampling=how, outputs=())).result().tokens.tolist()
