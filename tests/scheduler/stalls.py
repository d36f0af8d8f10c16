"""Streams beside prompts that never end, on machines of many kinds: how long a stream waits for its
next token."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from tests.scheduler.media_oracle import PLACEHOLDER, MediaOracle
from tests.scheduler.oracle_runner import adapter_weights, expected_output
from tests.scheduler.random_worlds import picture
from tests.scheduler.scenes import settings
from tests.scheduler.world import VOCAB, World
from weft.config.media import MediaRules
from weft.messages.media import MediaItem
from weft.messages.replies import StepOutput
from weft.plan.inputs import MediaVectors
from weft.plan.step import BASE, Plan, Result, find
from weft.scheduler.features.adapters import AdaptersFeature, LoadedAdapter
from weft.scheduler.features.media import MediaFeature
from weft.scheduler.pace.step_cost import StepLoad
from weft.scheduler.settings import DraftSettings, StateSettings, WindowSettings

STEP_S, TOKEN_S, PAIR_S = 0.004, 0.0004, 2e-7  # of a step, a token, a pair
Ways: TypeAlias = dict[str, dict[str, Any]]

WINDOW = 64
ADAPTER = "a"
NUM_STREAMS = 4
PROMPT_LEN = 400
PICTURE_S = 0.002  # a piece of the encoder's work
PICTURE_PIECES = 20


def plain_seconds(plan: Plan) -> float:
    load = StepLoad.of(plan)
    return STEP_S + TOKEN_S * load.tokens + PAIR_S * load.pairs


def windowed_seconds(plan: Plan) -> float:
    """A token sees no more than its window."""
    load = StepLoad.of(plan)
    return STEP_S + TOKEN_S * load.tokens + PAIR_S * min(load.pairs, load.tokens * WINDOW)


def stateful_seconds(plan: Plan) -> float:
    return STEP_S + TOKEN_S * StepLoad.of(plan).tokens


def expert_seconds(plan: Plan) -> float:
    """Two of 32 experts are read for each token: the first tokens of a step cost most."""
    tokens = StepLoad.of(plan).tokens
    part = 1.0 if plan.layers is None else plan.layers.part
    read = 1 - (1 - 2 / 32) ** (tokens / part)
    return 0.001 + part * 0.02 * float(read) + TOKEN_S / 2 * tokens


def wide_seconds(plan: Plan) -> float:
    """Reading the weights takes as long as computing 100 tokens."""
    part = 1.0 if plan.layers is None else plan.layers.part
    return 0.001 + TOKEN_S / 4 * max(StepLoad.of(plan).tokens, 100 * part)


def adapter_seconds(plan: Plan, more: float) -> float:
    """A token with an adapter costs `more` than another one, as a share of that."""
    load = StepLoad.of(plan)
    part = 1.0 if plan.layers is None else plan.layers.part
    adapted = 0
    if plan.adapters is not None:
        adapted = int(plan.lens[plan.adapters != BASE].sum() * part)
    return STEP_S + TOKEN_S * (load.tokens + more * adapted) + PAIR_S * load.pairs


def drafting_seconds(plan: Plan) -> float:
    """A pass of the draft model costs a fifth of a step."""
    if plan.drafting is None:
        return plain_seconds(plan)
    passes = int(plan.drafting.counts.max(initial=1))
    return STEP_S / 5 * passes + TOKEN_S / 10 * plan.num_tokens


class Kind(NamedTuple):
    """A model: what its steps cost, and what is particular about its requests."""

    seconds: Callable[[Plan], float]
    changes: Mapping[str, Any] = MappingProxyType({})
    mark: str = ""  # of requests


KINDS = {
    "plain": Kind(plain_seconds),
    "pages": Kind(plain_seconds, {"page_size": 16, "num_pages": 2_000}),
    "wide": Kind(wide_seconds),
    "experts": Kind(expert_seconds),
    "windows": Kind(windowed_seconds, {"windows": WindowSettings(window=WINDOW, num_pages=12_000)}),
    "states": Kind(stateful_seconds, {"states": StateSettings(num_slots=40)}),
    # Decode steps of a 0.6B model take 1.19 times as long with adapters, prompts 1.07 times.
    "adapters": Kind(partial(adapter_seconds, more=0.2), mark="adapters"),
    "dear adapters": Kind(partial(adapter_seconds, more=1.0), mark="adapters"),
    "predictions": Kind(plain_seconds, {"speculative": "prediction"}, mark="predictions"),
    "draft model": Kind(
        drafting_seconds,
        {"speculative": "draft", "draft": DraftSettings(vocab_size=VOCAB, context_length=2_000)},
    ),
    "pictures": Kind(plain_seconds, {"media": MediaRules()}, mark="pictures"),
}


class SlowEncoder(MediaOracle):
    """Its work behind a step takes time, and stops when that is over."""

    def __init__(self, max_tokens: int, world: StallWorld) -> None:
        super().__init__(max_tokens)
        self._world = world
        self._done: dict[bytes, int] = {}  # pieces, by digest

    def work_ahead(self, plan: Plan) -> tuple[bytes, ...]:
        if plan.ahead is None:
            return ()
        spent_s = 0.0
        for one in plan.ahead.encode:
            while one.digest not in self.held and (not spent_s or spent_s < plan.ahead.seconds):
                spent_s += PICTURE_S
                self._done[one.digest] = self._done.get(one.digest, 0) + 1
                if self._done[one.digest] >= PICTURE_PIECES:
                    self.held[one.digest] = one.length
                    self.num_ahead += 1
        self._world.encode_s(spent_s)
        return tuple(one.digest for one in plan.ahead.encode if one.digest in self.held)


class StallWorld(World):
    """`depth`: of the loop. Notes when each stream got its tokens."""

    def __init__(self, kind: Kind, depth: int = 0, **changes: Any) -> None:
        self._kind = kind
        self.adapters = AdaptersFeature(8, 8, 24)
        values: dict[str, Any] = {
            "num_pages": 24_000,
            "context_length": 2_000,
            "max_running_requests": 24,
            "chunked_prefill_size": 512,
            **kind.changes,
            **changes,
        }
        if values.get("split_prefill_layers"):
            values["num_layers"] = 28
        made = settings(**values)
        features: tuple[Any, ...] = (self.adapters,)
        if made.media is not None:
            features = (self.adapters, MediaFeature(made))
        super().__init__(made, depth, features=features)
        self.tick_s = 0.0
        self._encoder_s = 0.0
        if made.media is not None:
            self.runner.media = SlowEncoder(made.encoder_cache_tokens, self)
        self.adapters.add(LoadedAdapter(ADAPTER, 0, ADAPTER))
        self.runner.adapters[0] = adapter_weights(ADAPTER)
        self.last_s: dict[int, float] = {}
        self.gaps_s: list[float] = []
        self.rng = random.Random(0)
        self._time_steps()

    def _time_steps(self) -> None:
        execute = self.runner.execute

        def timed(plan: Plan) -> Result:
            took_s = self._kind.seconds(plan) * self.rng.uniform(0.95, 1.05)
            self.time += took_s
            op = find(plan.inputs, MediaVectors)
            if op is not None:
                self.encode_s(PICTURE_S * PICTURE_PIECES * len(op.encode))
            result = execute(plan)
            result = replace(result, encoder_s=self._encoder_s)
            self._encoder_s = 0.0
            return result

        self.runner.execute = timed  # type: ignore[method-assign]

    def encode_s(self, seconds: float) -> None:
        self.time += seconds
        self._encoder_s += seconds

    def receive(self, output: StepOutput) -> None:
        ids = set(np.frombuffer(output.ids, dtype=np.int64).tolist())
        super().receive(output)
        for id in ids:
            if id in self.last_s:
                self.gaps_s.append(self.time - self.last_s[id])
            self.last_s[id] = self.time

    def send_one(self, length: int, num_new: int) -> int:
        """A request of the kind."""
        number = len(self.sent)
        prompt = [number % VOCAB, *[self.rng.randrange(10, VOCAB) for _ in range(length - 1)]]
        more: dict[str, Any] = {}
        if self._kind.mark == "adapters" and number % 2:
            more["adapter"] = ADAPTER
        if self._kind.mark == "predictions":
            expected = expected_output(prompt, num_new, VOCAB, set())
            more["prediction"] = expected if number % 3 else expected[::-1]
        if self._kind.mark == "pictures" and length > 100:
            items: list[MediaItem] = []
            for place in range(20, length - 40, 60):
                item = with_digest(picture(number, place), number * 1_000 + place)
                items.append(item)
                prompt[place : place + item.length] = [PLACEHOLDER] * item.length
            more["media"] = tuple(items)
        return self.send(prompt, max_new_tokens=num_new, ignore_eos=True, **more)


def with_digest(item: MediaItem, number: int) -> MediaItem:
    return msgspec.structs.replace(item, digest=number.to_bytes(32, "little"))


@dataclass
class Stalls:
    """What streams have seen: their longest waits for a token, in seconds."""

    first_s: float  # in the first quarter, while costs are learnt
    longest_s: float  # from then on
    num_prompts: int  # that were computed meanwhile


def stalls(
    kind: Kind,
    depth: int = 0,
    *,
    num_tokens: int = 64,
    num_alone: int = 2,
    **changes: Any,
) -> Stalls:
    """Streams begin; `num_alone` steps behind, prompts come as fast as they are computed."""
    world = StallWorld(kind, depth, **changes)
    streams = [world.send_one(8, num_tokens) for _ in range(NUM_STREAMS)]
    while not all(world.outputs[id] for id in streams):
        world.step(check=False)
    for _ in range(num_alone):
        world.step(check=False)
    world.gaps_s.clear()
    first_s = 0.0
    while not all(id in world.finished for id in streams):
        if len(world.scheduler.waiting_queue) < 2:
            world.send_one(PROMPT_LEN, 4)
        world.step(check=False)
        if not first_s and min(len(world.outputs[id]) for id in streams) > num_tokens // 4:
            first_s = max(world.gaps_s)
            world.gaps_s.clear()
    num_prompts = sum(1 for id, tokens in world.outputs.items() if id not in streams and tokens)
    return Stalls(first_s, max(world.gaps_s), num_prompts)
