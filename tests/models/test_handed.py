"""One engine computes prompts with a real model, another one takes their KV over a socket and goes
on, also where a draft model guesses for it: the tokens of one engine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.windowed import Served
from weft.handoff.decode import DecodeSide
from weft.handoff.prefill import PrefillSide
from weft.messages.handoff import HandoffParams
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.weights.known import BUNDLED

HANG_S = 100.0
HOST = "127.0.0.1"
DRAFT = {
    "draft_model": str(BUNDLED.parent / "weft-nano-draft"),
    "speculative": "draft",
}
SMALL = {"page_size": 4, "kv_tokens": 2_048, "handoff_wait_s": HANG_S}


class Handed:
    """Two engines. `settings` are those of the one that goes on."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        port = {"disaggregation_bootstrap_port": 0}
        self.prefill = Served(folder, disaggregation_mode="prefill", **port, **SMALL)
        self.decode = Served(folder, disaggregation_mode="decode", **SMALL, **settings)
        sides = [one.engine.services.handoff._handoff for one in (self.prefill, self.decode)]
        lender, taker = sides
        assert isinstance(lender, PrefillSide)
        assert isinstance(taker, DecodeSide)
        self.port = lender._listener.getsockname()[1]
        self.sides = (lender, taker)

    def close(self) -> None:
        for side in self.sides:
            side.close()
        for served in (self.prefill, self.decode):
            served.runner.close()

    def run(self, prompt: list[int], max_new: int) -> int:
        """The number of the request on the engine that goes on."""
        room = f"{len(self.decode.outputs)}"
        send(self.prefill, prompt, 0, HandoffParams(room))
        id = send(self.decode, prompt, max_new, HandoffParams(room, HOST, self.port))
        deadline = time.monotonic() + HANG_S
        while id not in self.decode.cached:
            assert time.monotonic() < deadline
            for served in (self.prefill, self.decode):
                served.step()
            time.sleep(0.0005)
        return id


def send(served: Served, prompt: list[int], max_new: int, handoff: HandoffParams) -> int:
    id = len(served.outputs)
    served.outputs[id] = []
    sampling = SamplingParams(max_new_tokens=max_new, temperature=0.0)
    ids = np.array(prompt, dtype=np.int32).tobytes()
    request = GenerateRequest(id=id, rid=f"{id}", input_ids=ids, sampling=sampling, handoff=handoff)
    served.engine.submit(request)
    return id


@pytest.mark.parametrize("settings", [{}, DRAFT], ids=["plain", "draft"])
def test_what_is_handed_over_gives_the_tokens_of_one_engine(settings: dict[str, str]) -> None:
    prompt = np.random.default_rng(1).integers(10, 4_000, 150).tolist()
    prompts = [prompt, [*prompt[:70], *prompt[20:60]]]
    alone = Served(BUNDLED, page_size=4, kv_tokens=2_048)
    expected = [alone.outputs[alone.run(one, max_new=12)[0]] for one in prompts]
    alone.runner.close()
    handed = Handed(BUNDLED, **settings)
    found = [handed.run(one, 12) for one in prompts]
    assert [handed.decode.outputs[id] for id in found] == expected
    assert [handed.decode.cached[id] for id in found] == [148, 108]
    if settings:
        assert handed.decode.engine.services.stats().total_drafts_draft > 0
    handed.close()
