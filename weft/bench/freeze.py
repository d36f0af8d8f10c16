"""How long streams stand still while the prompts of others are computed, by the size of chunks and with mixed steps.

Some requests stream all the while; long prompts come, so many at once, the next when one has got its output. What is
measured lies between the first prompt and the end of the last one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from weft.messages.codec import FromEngine, ToEngine
from weft.messages.replies import StepOutput
from weft.messages.requests import Abort, GenerateRequest
from weft.messages.sampling import SamplingParams

SETTLED = 8  # tokens that each stream has before the first prompt comes


class AnyEngine(Protocol):
    """What is needed of `weft.engine.engine.Engine`."""

    @property
    def has_work(self) -> bool: ...

    def submit(self, message: ToEngine) -> FromEngine | None: ...

    def step(self) -> list[FromEngine]: ...


class Load(NamedTuple):
    num_streams: int
    stream_prompt_len: int
    stream_output_len: int  # a stream that ends is followed by another one
    num_prompts: int
    prompt_len: int
    output_len: int
    at_once: int  # prompts


class Variant(NamedTuple):
    """One way to prefill. `chunk` None: prompts are not cut."""

    chunk: int | None
    mixed: bool

    @property
    def name(self) -> str:
        return f"{self.chunk or 'none'}, mixed {'on' if self.mixed else 'off'}"


class Trial(NamedTuple):
    """One run. Times in seconds."""

    gaps_s: list[float]  # between two tokens of a stream
    ttft_s: list[float]  # of the prompts
    num_tokens: int  # of prompts, and generated
    seconds: float


class Figures(NamedTuple):
    """Of all runs of a variant."""

    p50_s: float
    p99_s: float
    longest_s: float
    ttft_s: float  # median
    tokens_per_s: float

    @property
    def ratio(self) -> float:
        """How much slower a stream gets, at its worst hundredth."""
        return self.p99_s / self.p50_s


class Player:
    """Plays a load on one engine. `clock` gives seconds."""

    def __init__(
        self, engine: AnyEngine, clock: Callable[[], float], load: Load, vocab_size: int, seed: int
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._load = load
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(seed)
        self._next_id = 0
        self._streams: dict[int, float] = {}  # by id: when its last token came
        self._prompts: dict[int, float] = {}  # by id: when it was sent
        self._num_outputs: dict[int, int] = defaultdict(int)  # by id
        self._gaps_s: list[float] = []
        self._ttft_s: list[float] = []
        self._num_generated = 0

    def play(self) -> Trial:
        load = self._load
        for _ in range(load.num_streams):
            self._streams[self._send(load.stream_prompt_len, load.stream_output_len)] = 0.0
        while min(self._num_outputs[id] for id in self._streams) < SETTLED:
            self._step()
        began_s = self._clock()
        self._gaps_s, self._num_generated = [], 0
        num_sent = 0
        while num_sent < load.num_prompts or self._prompts:
            while num_sent < load.num_prompts and len(self._prompts) < load.at_once:
                self._prompts[self._send(load.prompt_len, load.output_len)] = self._clock()
                num_sent += 1
            self._step()
        seconds = self._clock() - began_s
        self._engine.submit(Abort(all=True))
        while self._engine.has_work:
            self._engine.step()
        num_tokens = load.num_prompts * load.prompt_len + self._num_generated
        return Trial(self._gaps_s, self._ttft_s, num_tokens, seconds)

    def _send(self, prompt_len: int, output_len: int) -> int:
        id = self._next_id
        self._next_id += 1
        ids = self._rng.integers(0, self._vocab_size, prompt_len).astype(np.int32).tobytes()
        sampling = SamplingParams(
            max_new_tokens=output_len, temperature=0.0, seed=id, ignore_eos=True
        )
        self._engine.submit(GenerateRequest(id=id, rid=str(id), input_ids=ids, sampling=sampling))
        return id

    def _step(self) -> None:
        outputs = [reply for reply in self._engine.step() if isinstance(reply, StepOutput)]
        now = self._clock()
        for output in outputs:
            for id in np.frombuffer(output.ids, dtype=np.int64).tolist():
                self._take(id, now)
            for finish in output.finished:
                if finish.reason == "error":
                    raise ValueError(finish.message)
                self._end(finish.id)

    def _take(self, id: int, now: float) -> None:
        """A token has come."""
        is_first = not self._num_outputs[id]
        self._num_outputs[id] += 1
        self._num_generated += 1
        if id in self._streams:
            if not is_first:
                self._gaps_s.append(now - self._streams[id])
            self._streams[id] = now
        elif is_first:
            self._ttft_s.append(now - self._prompts[id])

    def _end(self, id: int) -> None:
        if id in self._streams:
            del self._streams[id]
            self._streams[
                self._send(self._load.stream_prompt_len, self._load.stream_output_len)
            ] = 0.0
        else:
            del self._prompts[id]


def figures(trials: list[Trial]) -> Figures:
    """Of all gaps of the trials together; tokens a second are the median."""
    gaps = np.concatenate([trial.gaps_s for trial in trials])
    ttft = np.concatenate([trial.ttft_s for trial in trials])
    p50, p99 = np.percentile(gaps, (50, 99)).tolist()
    per_s = [trial.num_tokens / trial.seconds for trial in trials]
    return Figures(p50, p99, float(gaps.max()), float(np.median(ttft)), float(np.median(per_s)))
