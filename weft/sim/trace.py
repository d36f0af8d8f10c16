"""Arrivals: a trace is an iterable of `Arrival`, in order of time. No other module knows its source
(a generator, a file, a journal).

A prompt is written as segments, and becomes token ids only when it is sent: two prompts share a
prefix as far as their first segments are equal.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple, TypeAlias

import numpy as np

from weft.messages.media import MediaItem

LONGEST = 2**24  # tokens of a prompt, or of an output: no model has room for more
VOCAB_SIZE = 32_768  # of a simulated model
EOS = 0  # the token that ends an output in simulation
FILLER = 1  # every other token of an output
FIRST_TOKEN = 2  # of prompts
PICTURE = -2  # key of a segment of placeholders; `Arrival.media` has the picture
OUTPUT = -1  # key of a segment that repeats an output of an earlier chat turn


class Segment(NamedTuple):
    """A piece of a prompt. Segments with equal keys begin with the same tokens; segments with
    different keys differ from the start."""

    key: int  # 0 and up, OUTPUT or PICTURE
    length: int


Prompt: TypeAlias = tuple[Segment, ...]
AnyPrompt: TypeAlias = Prompt | bytes  # bytes: the token ids themselves, int32 each


class Arrival(NamedTuple):
    """One request of a trace. Its number is its index in the trace.

    `time_s` counts from the beginning of the trace. If `after` names another request (this one is
    the next turn of a chat), it counts from the end of that request; the request then follows
    that one in the trace, and precedes all that wait for no other and arrive later than it does.
    """

    time_s: float
    prompt: AnyPrompt
    output_len: int  # true length of its output: hidden from the scheduler
    max_new_tokens: int | None  # the limit that the scheduler sees; None: as many as fit
    tenant: str = ""
    after: int = -1
    priority: int = 0
    ignore_eos: bool = False  # the output ends at max_new_tokens, and the scheduler knows
    salt: str = ""  # prefixes are shared only with equal salts
    adapter: str = ""  # uid of its adapter; empty: none
    ttft_ms: int = 0  # its bound on the time to the first token; 0: none
    timeout_ms: int = 0  # its bound on the whole time; 0: none
    # The token ids of its output, int32 each, `output_len` of them; empty: fillers.
    output: bytes = b""
    # What becomes of a guess of each of its tokens (`guesses.py`), if they are not known.
    guesses: bytes = b""
    is_cut: bool = False  # its output ends early because its client leaves
    leaves_s: float = math.inf  # its client leaves after this time, whatever it has received
    media: tuple[MediaItem, ...] = ()  # pictures, videos and sounds in its prompt, without values
    background: bool = False  # it gets what other requests leave

    @property
    def prompt_len(self) -> int:
        prompt = self.prompt
        if isinstance(prompt, bytes):
            return len(prompt) // 4
        return sum(segment.length for segment in prompt)


class TokenSource:
    """Turns prompts into packed token ids, at the speed of a copy.

    A segment is its key, encoded in its first two tokens, and then a section of one long random
    table. (Segments of one token can distinguish only `vocab_size` keys.)
    """

    TABLE_LEN = 1 << 18

    def __init__(self, vocab_size: int) -> None:
        self._base = vocab_size - FIRST_TOKEN
        table = np.random.default_rng(0).integers(
            FIRST_TOKEN, vocab_size, self.TABLE_LEN, dtype=np.int32
        )
        self._table = table.tobytes()

    def pack(self, prompt: AnyPrompt) -> bytes:
        """The prompt's token ids, int32 each."""
        if isinstance(prompt, bytes):
            return prompt
        return b"".join([self._segment(*segment) for segment in prompt])

    def _segment(self, key: int, length: int) -> bytes:
        if key == OUTPUT:
            return struct.pack("<i", FILLER) * (length - 1) + struct.pack("<i", EOS)
        if key == PICTURE:
            return struct.pack("<i", FILLER) * length
        high, low = divmod(key, self._base)
        head = struct.pack("<ii", FIRST_TOKEN + low, FIRST_TOKEN + high % self._base)
        start = key * 2_654_435_761 % self.TABLE_LEN * 4
        rest = (length - 2) * 4
        if rest <= 0:
            return head[: length * 4]
        body = self._table[start : start + rest]
        while len(body) < rest:
            body += self._table[: rest - len(body)]
        return head + body
