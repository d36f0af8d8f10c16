"""Synthetic traces: arrivals from a random process, lengths from a distribution, shared prefixes,
chats, tenants.

Everything follows from the seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.config.options import SettingsError, option
from weft.messages.media import MediaItem
from weft.sim.trace import LONGEST, OUTPUT, PICTURE, Arrival, Prompt, Segment

BLOCK_LEN = 4_096  # conversations that are drawn together
# Of the Gamma distribution of gaps: the coefficient of variation is 1 / sqrt(shape), about 3.
BURST_SHAPE = 0.1
DEFAULT_SIGMA = 1.0  # of log-normal lengths; conversations with chatbots have about this value
FIRST_LINE = 1 << 32  # key of the first line of a batch: no prompt of the traffic has it
LENGTHS = "N, uniform:LOW:HIGH or lognormal:MEAN[:SIGMA]"  # how users write a distribution
MAX_SIGMA = 10.0
LOUD = 1.0  # tenant k sends 1 / (k + 1) ** LOUD times as much as tenant 0


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Options of synthetic traffic."""

    requests: int = option(
        1_000,
        "number of requests; of a trace file at most this number, 0 for all",
        group="traffic",
        everyday=True,
        low=0,
    )
    arrivals: str = option(
        "poisson",
        "process of arrivals; burst has gaps that vary three times as much",
        group="traffic",
        everyday=True,
        choices=("poisson", "burst", "constant"),
    )
    rate: float = option(
        10.0,
        "arrivals a second (of chats: first turns); 0: all at once",
        group="traffic",
        everyday=True,
        low=0.0,
    )
    input_len: str = option(
        "lognormal:512",
        f"tokens of a prompt: {LENGTHS}",
        group="traffic",
        everyday=True,
    )
    output_len: str = option(
        "lognormal:128", "tokens of a completion, likewise", group="traffic", everyday=True
    )
    max_tokens: int = option(
        2_048,
        "max_new_tokens of each request, all that the scheduler knows",
        group="traffic",
        everyday=True,
        low=1,
    )
    prefixes: int = option(
        0, "shared prefixes, drawn by Zipf's law", group="traffic", everyday=True, low=0
    )
    prefix_len: int = option(
        512, "tokens of a shared prefix, before the prompt", group="traffic", everyday=True, low=1
    )
    zipf: float = option(
        1.1, "exponent: the k-th prefix is used 1/k^s as often", group="traffic", low=0.0
    )
    turns: int = option(
        1,
        "mean turns of a chat; each contains the ones before",
        group="traffic",
        everyday=True,
        low=1,
    )
    think: float = option(
        10.0, "mean seconds from an answer to the next turn", group="traffic", low=0.0
    )
    tenants: int = option(
        1, "users; the k-th sends 1/k as much as the first", group="traffic", everyday=True, low=1
    )
    traffic_seed: int = option(0, "seed of everything that is drawn", group="traffic", low=0)


@dataclass(frozen=True, kw_only=True)
class PictureTraffic:
    """Options of pictures in synthetic traffic."""

    images: float = option(
        0.0,
        "mean number of pictures in a prompt (of a chat: in each turn), before its text",
        group="traffic",
        everyday=True,
        low=0.0,
        high=1_000.0,
    )
    image_tokens: str = option(
        "256", "tokens of a picture, as those of --input-len", group="traffic", everyday=True
    )
    image_pool: int = option(
        0,
        "different pictures that there are, drawn by Zipf's law (--zipf); 0: each is new",
        group="traffic",
        everyday=True,
        low=0,
        high=1_000_000,
    )


@dataclass(frozen=True, kw_only=True)
class BackgroundTraffic:
    """Options of a batch beside the traffic."""

    background: int = option(
        0,
        "lines of a batch that is there from the beginning, beside the traffic or a trace",
        group="traffic",
        everyday=True,
        low=0,
        high=10_000_000,
    )
    background_open: int = option(
        256, "lines of it that are open at once", group="traffic", low=1, high=100_000
    )
    background_input_len: str = option(
        "lognormal:512", "tokens of a line's prompt, as those of --input-len", group="traffic"
    )
    background_output_len: str = option(
        "lognormal:128", "tokens of a line's completion, likewise", group="traffic"
    )


def require_requests(traffic: Traffic) -> None:
    """Raises SettingsError if synthetic traffic would have no requests."""
    if not traffic.requests:
        raise SettingsError("--requests is 0; at least 1 is expected")


class Lengths(NamedTuple):
    """A distribution of lengths in tokens."""

    kind: str  # fixed, uniform, lognormal
    first: float  # the length, the lowest, the mean
    second: float = 0.0  # -, the highest, sigma

    @classmethod
    def parse(cls, text: str, flag: str) -> Lengths:
        """Read one of the forms `LENGTHS`. Raises SettingsError."""
        kind, *numbers = text.split(":") if ":" in text else ("fixed", text)
        try:
            values = [float(number) for number in numbers]
        except ValueError:
            values = []
        if kind == "lognormal" and len(values) == 1:
            values.append(DEFAULT_SIGMA)
        expected = {"fixed": 1, "uniform": 2, "lognormal": 2}.get(kind)
        is_right = len(values) == expected and 1 <= values[0] <= LONGEST
        if is_right and kind == "uniform":
            is_right = values[0] <= values[1] <= LONGEST
        if is_right and kind == "lognormal":
            is_right = 0 <= values[1] <= MAX_SIGMA
        if not is_right:
            raise SettingsError(f"{flag} is {text!r}; {LENGTHS} is expected")
        return cls(kind, *values)

    def draw(self, rng: np.random.Generator, n: int) -> list[int]:
        if self.kind == "fixed":
            return [int(self.first)] * n
        if self.kind == "uniform":
            low = int(self.first)
            high = int(self.second)
            lengths: list[int] = rng.integers(low, high, n, endpoint=True).tolist()
            return lengths
        sigma = self.second
        # The mean of a log-normal distribution is exp(mu + sigma^2 / 2).
        mu = np.log(self.first) - sigma**2 / 2
        drawn = rng.lognormal(mu, sigma, n)
        rounded = np.clip(np.rint(drawn), 1, LONGEST)
        whole: list[int] = rounded.astype(np.int64).tolist()
        return whole


def synthetic(
    traffic: Traffic, first_key: int = 0, pictures: PictureTraffic | None = None
) -> Iterator[Arrival]:
    """The trace that `traffic` describes, with `pictures` in its prompts; None: no pictures. Traces
    whose `first_key` differs by more than `requests` share no prompt."""
    drawn = None
    if pictures is not None and pictures.images:
        drawn = _Pictures(pictures, traffic, first_key)
    source = _Source(traffic, first_key, drawn)
    number = 0
    while number < traffic.requests:
        num_left = traffic.requests - number
        for conversation in source.block(min(BLOCK_LEN, num_left)):
            previous: Arrival | None = None
            for turn in conversation:
                if number == traffic.requests:
                    return
                arrival = source.arrival(turn, number, previous)
                yield arrival
                previous = arrival
                number = number + 1


def with_batch(
    arrivals: Iterable[Arrival], batch: BackgroundTraffic, seed: int
) -> Iterator[Arrival]:
    """The lines of a batch, and then `arrivals`. A line comes when the one that many lines before
    it has ended."""
    num = batch.background
    rng = np.random.default_rng([seed, 2])
    inputs = Lengths.parse(batch.background_input_len, "--background-input-len").draw(rng, num)
    outputs = Lengths.parse(batch.background_output_len, "--background-output-len").draw(rng, num)
    for index, (input_len, output_len) in enumerate(zip(inputs, outputs, strict=True)):
        yield Arrival(
            time_s=0.0,
            prompt=(Segment(FIRST_LINE + index, input_len),),
            output_len=output_len,
            max_new_tokens=output_len,
            ignore_eos=True,
            tenant="background",
            after=index - batch.background_open if index >= batch.background_open else -1,
            background=True,
        )
    for arrival in arrivals:
        if arrival.after >= 0:
            arrival = arrival._replace(after=arrival.after + num)
        yield arrival


def gaps_s(rng: np.random.Generator, process: str, rate: float, n: int) -> NDArray[np.float64]:
    """[n] seconds between arrivals at `rate` per second; 0: all at once. `process` is a value of
    `--arrivals`."""
    if rate == 0:
        return np.zeros(n)
    if process == "constant":
        return np.full(n, 1 / rate)
    if process == "burst":
        return rng.gamma(BURST_SHAPE, 1 / (rate * BURST_SHAPE), n)
    return rng.exponential(1 / rate, n)


def at_once(lengths: Iterable[tuple[int, int]], *, first_key: int = 0) -> list[Arrival]:
    """Requests that arrive at once, with exactly these lengths (input, output) and without shared
    prefixes."""
    arrivals = []
    for key, (input_len, output_len) in enumerate(lengths, first_key):
        arrival = Arrival(
            time_s=0.0,
            prompt=(Segment(key, input_len),),
            output_len=output_len,
            max_new_tokens=output_len,
            ignore_eos=True,
        )
        arrivals.append(arrival)
    return arrivals


class _Turn(NamedTuple):
    time_s: float
    input_len: int
    output_len: int
    prefix: int  # index of the shared prefix, -1: none
    tenant: int


class _Pictures:
    """Draws the pictures of prompts from a separate random generator, so that the rest of a trace
    is the same with and without pictures."""

    def __init__(self, pictures: PictureTraffic, traffic: Traffic, first_key: int) -> None:
        self._mean = pictures.images
        self._first_key = first_key
        self._rng = np.random.default_rng([traffic.traffic_seed, 1])
        self._lengths = Lengths.parse(pictures.image_tokens, "--image-tokens")
        self._pool = self._lengths.draw(self._rng, pictures.image_pool)
        self._shares = _zipf(pictures.image_pool, traffic.zipf)
        self._num_new = 0

    def draw(self, begin: int) -> tuple[MediaItem, ...]:
        """The pictures of one prompt, one after the other from its token `begin` on."""
        items: list[MediaItem] = []
        for _ in range(int(self._rng.poisson(self._mean))):
            number, length = self._one()
            name = f"picture {number} of {self._first_key}, {length} tokens"
            digest = hashlib.sha256(name.encode()).digest()
            items.append(MediaItem(kind="image", digest=digest, start=begin, length=length))
            begin += length
        return tuple(items)

    def _one(self) -> tuple[int, int]:
        """Number and token count of the next picture."""
        if self._pool:
            [number] = _draw(self._rng, self._shares, 1)
            return number, self._pool[number]
        self._num_new += 1
        [length] = self._lengths.draw(self._rng, 1)
        return self._num_new, length


class _Source:
    """Draws conversations in blocks."""

    def __init__(self, traffic: Traffic, first_key: int, pictures: _Pictures | None) -> None:
        self._pictures = pictures
        self._traffic = traffic
        self._first_key = first_key
        self._rng = np.random.default_rng(traffic.traffic_seed)
        self._input = Lengths.parse(traffic.input_len, "--input-len")
        self._output = Lengths.parse(traffic.output_len, "--output-len")
        self._prefixes = _zipf(traffic.prefixes, traffic.zipf)
        self._tenants = _zipf(traffic.tenants, LOUD)
        self._now = 0.0

    def block(self, n: int) -> Iterator[list[_Turn]]:
        """The next n conversations."""
        rng = self._rng
        traffic = self._traffic
        since_now = np.cumsum(gaps_s(rng, traffic.arrivals, traffic.rate, n))
        starts = (self._now + since_now).tolist()
        self._now = starts[-1]
        num_turns = rng.integers(1, 2 * traffic.turns, n).tolist()
        total = sum(num_turns)
        inputs = self._input.draw(rng, total)
        outputs = self._output.draw(rng, total)
        thinks = rng.exponential(traffic.think, total).tolist()
        prefixes = _draw(rng, self._prefixes, n)
        tenants = _draw(rng, self._tenants, n)
        first = 0  # index of this conversation's first turn among all turns
        for i in range(n):
            turns = []
            time_s = starts[i]  # of the first turn; a later turn follows an answer
            for j in range(first, first + num_turns[i]):
                turn = _Turn(
                    time_s=time_s if j == first else thinks[j],
                    input_len=inputs[j],
                    output_len=outputs[j],
                    prefix=prefixes[i],
                    tenant=tenants[i],
                )
                turns.append(turn)
            yield turns
            first += num_turns[i]

    def arrival(self, turn: _Turn, number: int, previous: Arrival | None) -> Arrival:
        traffic = self._traffic
        before: Prompt = ()
        media: tuple[MediaItem, ...] = ()
        if previous is not None:
            assert not isinstance(previous.prompt, bytes)
            before = (*previous.prompt, Segment(OUTPUT, previous.output_len))
            media = previous.media
        elif turn.prefix >= 0:
            before = (Segment(self._first_key + turn.prefix, traffic.prefix_len),)
        if self._pictures is not None:
            items = self._pictures.draw(sum(segment.length for segment in before))
            media = (*media, *items)
            before = (*before, *(Segment(PICTURE, item.length) for item in items))
        own = Segment(self._first_key + traffic.prefixes + number, turn.input_len)
        return Arrival(
            time_s=turn.time_s,
            prompt=(*before, own),
            output_len=min(turn.output_len, traffic.max_tokens),
            max_new_tokens=traffic.max_tokens,
            tenant=f"tenant-{turn.tenant}",
            after=-1 if previous is None else number - 1,
            media=media,
        )


def _zipf(n: int, exponent: float) -> NDArray[np.float64]:
    """[n] cumulative probabilities of Zipf's law."""
    ranks = np.arange(1, n + 1, dtype=np.float64)
    total = np.cumsum(1 / ranks**exponent)
    shares: NDArray[np.float64] = total / total[-1:]
    return shares


def _draw(rng: np.random.Generator, cumulative: NDArray[np.float64], n: int) -> list[int]:
    """n indices drawn by their cumulative probabilities; -1 if there are none."""
    if not len(cumulative):
        return [-1] * n
    drawn = np.searchsorted(cumulative, rng.random(n), side="right")
    return np.minimum(drawn, len(cumulative) - 1).tolist()  # type: ignore[no-any-return]
