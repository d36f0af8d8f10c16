"""The one table of ranges: every number that a request may give, and its range.

All APIs, `weft.LLM` and the engine look a number up here by the name of its field, so a field has
the same range everywhere. Users: `server/fields/numbers.py` (bodies and queries),
`messages/sampling.py` (all callers that generate, also `weft.LLM`), `scheduler/limits.py` (columns
of the scheduler), `server/openapi.py` (the document). `limits.py` has the limits of counts and
lengths; their upper bounds are here.
"""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple

INT32 = 2**31 - 1
INT64 = 2**63 - 1

# Upper bounds of the engine; options can set lower limits (`limits.py`).
MAX_N = 64
MAX_STOP_STRINGS = 64
MAX_STOP_LEN = 1_024
MAX_STOP_REGEX = 16
MAX_STOP_REGEX_LEN = 1_024
MAX_STOP_TOKEN_IDS = 1_024
MAX_LOGIT_BIAS = 4_096
MAX_ALLOWED_TOKEN_IDS = 1_000_000
MAX_BAD_WORDS = 1_024
MAX_IMAGE_PIXELS = 80_000_000  # the decoder's own limit is higher
MAX_LOGPROBS = 64
MAX_LOGPROB_TOKEN_IDS = 1_024
MAX_LABEL_IDS = 1_024
MAX_GRAMMAR_LEN = 4_000_000
MAX_CHOICES = 100_000
# Characters of a choice: each step through a longer one takes many milliseconds.
MAX_CHOICE_LEN = 16_384
MAX_CHOICES_LEN = 1_000_000  # characters of all choices: more compile for seconds, in 100s of MB
MAX_PROCESSORS = 8
MAX_PROCESSOR_PARAMS = 16_384  # bytes
MAX_STREAM_INTERVAL = 1_024
MAX_ENGINES = 256  # engines of one server
MAX_PROFILED_STEPS = 200  # all events are kept in memory until the end
MIN_EXPIRY_S = 3_600
MAX_EXPIRY_S = 30 * 86_400
MAX_TIMEOUT_MS = 10**12
MAX_SHOWN = 40  # characters of a wrong value in an error


class Number(NamedTuple):
    """The range of a number, including both ends.

    `also`: values outside of the range with a special meaning.
    """

    kind: type[int] | type[float]
    low: float
    high: float
    also: tuple[int, ...] = ()
    is_open: bool = False  # `low` itself is not allowed
    is_token: bool = False  # a token id: the vocabulary has the upper end

    @property
    def allowed(self) -> str:
        """The range in words."""
        if self.is_open:
            return f"a number above {_plain(self.low)}, at most {_plain(self.high)}, is allowed"
        words = f"{_plain(self.low)} to {_plain(self.high)} are allowed"
        if self.low == self.high:
            words = f"only {_plain(self.low)} is allowed"
        for value in self.also:
            words += f", or {value}"
        return words

    @property
    def least(self) -> str:
        """The lower end of the range in words, for a number whose upper end the model or an option
        decides."""
        words = f"{_plain(self.low)} or more are allowed"
        for value in self.also:
            words += f", or {value}"
        return words

    def holds(self, value: float) -> bool:
        """Whether the number is in the range. NaN is in no range."""
        if value == self.low and not self.is_open:
            return True
        return self.low < value <= self.high or value in self.also

    def within(self, vocab_size: int) -> Number:
        """The same range; token ids are limited to a vocabulary of this size."""
        if self.is_token:
            return self._replace(high=vocab_size - 1)
        return self

    def wrong(self, name: str, value: Any) -> str:
        """The fault of the value of the field `name`, and the range; "" if the value is right."""
        is_plain = type(value) is int or (type(value) is float and self.kind is float)
        if is_plain and self.holds(value):
            return ""  # the usual case
        needed = numbers.Real
        if self.kind is int:
            needed = numbers.Integral
        if isinstance(value, bool) or not isinstance(value, needed):
            kind = "a number"
            if self.kind is int:
                kind = "a whole number"
            return f"{name} is {shown(value)}; {kind} is needed, {self.allowed}"
        if self.holds(value):  # type: ignore[arg-type]  # numpy's numbers
            return ""
        has = "is"
        if self.is_token:
            has = "has token id"
        allowed = self.allowed
        if self.high == INT32 and value < self.low:
            allowed = self.least
        return f"{name} {has} {shown(value)}; {allowed}"


def _integer(low: int, high: int, *also: int) -> Number:
    return Number(int, low, high, also)


def _real(low: float, high: float) -> Number:
    return Number(float, low, high)


def _above(low: float, high: float) -> Number:
    return Number(float, low, high, is_open=True)


TOKEN = Number(int, 0, INT32, is_token=True)
_LENGTH = _integer(0, INT32)  # generated tokens; the context limits them further
_SEED = _integer(-INT64 - 1, INT64)
_TOP = _integer(0, MAX_LOGPROBS)

# Field of a body or of `SamplingParams` → range. A name has the same meaning everywhere.
NUMBERS: dict[str, Number] = {
    # how tokens are sampled
    "temperature": _real(0, 2),
    "top_p": _real(0, 1),  # 0: the likeliest token
    "top_k": _integer(-1, INT32),  # -1 and 0: off
    "min_p": _real(0, 1),
    "frequency_penalty": _real(-2, 2),
    "presence_penalty": _real(-2, 2),
    "repetition_penalty": _real(0.01, 10),
    "repeat_penalty": _real(0.01, 10),  # Ollama's name for it
    "logit_bias": _real(-100, 100),
    "seed": _SEED,
    "sampling_seed": _SEED,
    "n": _integer(1, MAX_N),
    "best_of": _integer(1, MAX_N),
    # how many
    "max_new_tokens": _LENGTH,
    "max_tokens": _integer(0, INT32, -1),  # -1: up to the end of the context
    "max_completion_tokens": _integer(1, INT32, -1),
    "max_output_tokens": _integer(1, INT32, -1),
    "num_predict": _integer(-INT32, INT32),  # below 0: up to the end of the context
    "n_predict": _integer(-INT32, INT32),  # llama.cpp's name for it
    "min_new_tokens": _LENGTH,
    "min_tokens": _LENGTH,
    "thinking_budget": _LENGTH,
    "thinking_token_budget": _LENGTH,
    "max_thinking_tokens": _LENGTH,
    "budget_tokens": _LENGTH,
    "max_tool_calls": _LENGTH,
    "truncate_prompt_tokens": _integer(1, INT32, -1),  # -1: so that the answer has room
    "stream_interval": _integer(1, MAX_STREAM_INTERVAL),
    "routed_dp_rank": _integer(0, MAX_ENGINES - 1),
    "data_parallel_rank": _integer(0, MAX_ENGINES - 1),
    # log probabilities
    "logprobs": _TOP,
    "top_logprobs": _TOP,
    "top_logprobs_num": _TOP,
    "prompt_logprobs": _TOP,
    "prompt_logprobs_start": _integer(0, INT32),
    "logprob_start_len": _integer(-1, INT32),  # -1: none of the prompt
    # token ids
    "prompt": TOKEN,
    "input": TOKEN,
    "input_ids": TOKEN,
    "query": TOKEN,
    "items": TOKEN,
    "tokens": TOKEN,
    "context": TOKEN,
    "stop_token_ids": _integer(0, INT32),  # ids beyond the vocabulary never occur
    "allowed_token_ids": TOKEN,
    "bad_word_ids": TOKEN,
    "logprob_token_ids": TOKEN,
    "token_ids_logprob": TOKEN,
    "label_token_ids": TOKEN,
    "thinking_marks": TOKEN,
    # vectors
    "dimensions": _integer(1, INT32),  # the model limits it further
    "token_type_ids": _integer(0, 255),
    "top_n": _integer(1, INT32),
    # priority and deadlines
    "priority": _integer(-INT32 - 1, INT32),
    "timeout_ms": _integer(1, MAX_TIMEOUT_MS),
    "ttft_ms": _integer(1, MAX_TIMEOUT_MS),
    "seconds": _integer(MIN_EXPIRY_S, MAX_EXPIRY_S),  # until a file expires
    # sessions
    "capacity": _integer(1, INT32),
    "capacity_of_str_len": _integer(1, INT32),
    "offset": _integer(-INT32, INT32),
    "timeout": _above(0, 1e9),
    # the prefix cache
    "node": _integer(0, INT32),
    "keep": _integer(0, INT32),
    "ttl_s": _above(0, 31_536_000),
    # what outlives the server
    "older_than_s": _real(0, 1e9),
    # control
    "forward_sleep_time": _real(0, 60),
    "call": _integer(0, INT64),  # number of a control request; the server sets its own
    "server_args": _real(-INT64 - 1, INT64),  # the option limits it further
    "log_requests_level": _integer(0, 0),  # bodies of requests are never logged
    "num_steps": _integer(1, MAX_PROFILED_STEPS),
    # weights
    "master_port": _integer(1, 65_535),
    "rank_offset": _integer(1, INT32),
    "world_size": _integer(2, INT32),
    "timeout_s": _above(0, 3_600),
    "truncate_size": _integer(1, 1_000_000),
    "shape": _integer(0, 2**40),
    "shapes": _integer(0, 2**40),
}

# Of messages from outside of weft: what can be sent to the engine.
ANY_INTEGER = _integer(-INT64 - 1, INT64)
ANY_REAL = _real(-1e308, 1e308)

# Field of the query of a URL → range.
QUERIES: dict[str, Number] = {
    "limit": _integer(1, 10_000),
    "timeout": _real(0, 600),
    "dp_rank": _integer(0, MAX_ENGINES - 1),
    "node": _integer(0, INT32),
    "ramp_s": _real(0, 3_600),
}


def counted(number: int, one: str, many: str = "") -> str:
    """ "1 token", "2,000 tokens"; `many`: the plural, if it is more than an added s."""
    if number == 1:
        return f"1 {one}"
    return f"{number:,} {many or one + 's'}"


def shown(value: Any) -> str:
    """A wrong value as errors show it; long values are cut."""
    if isinstance(value, int) and value.bit_length() > 4_000:  # Python would refuse to write it
        return f"a number of {value.bit_length():,} bits"
    if isinstance(value, str):
        text = repr(value[: MAX_SHOWN + 1])  # in quotes
    else:
        text = _one_line(value)
    if len(text) <= MAX_SHOWN:
        return text
    return text[:MAX_SHOWN] + "..."


def _one_line(value: Any) -> str:
    try:
        return " ".join(str(value).split())
    except (ValueError, RecursionError):  # a number in it that is too long, or lists in lists
        return f"a {type(value).__name__}"


def _plain(value: float) -> str:
    if isinstance(value, float) and not value.is_integer():
        return f"{value:g}"
    if math.isfinite(value):
        return f"{int(value):,}"
    return f"{value}"
