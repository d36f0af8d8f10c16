"""Every limit of the HTTP side in one place. Those of sampling parameters stand in `messages.sampling`, the size of a
body and of the queue are settings."""

from __future__ import annotations

MAX_PROMPTS = 1_024  # in one request
MAX_COMPLETIONS = 4_096  # prompts * n
MAX_TOTAL_TOKENS = 16_000_000  # of all prompts, each n times: what is sent to the engine
MAX_TOTAL_STOP_LEN = 16_384  # characters of all different stop strings
MAX_TOTAL_LOGIT_BIAS = 1_000_000  # entries, those of each prompt n times
MAX_MESSAGES = 16_384  # of one conversation
MAX_TOOLS = 1_024
MAX_CHAT_LOGPROBS = 20  # OpenAI's own limit of `top_logprobs`
MAX_COMPLETION_LOGPROBS = 20  # of `logprobs` in text completions; OpenAI has 5
MAX_DETOKENIZED = 1_000_000  # ids
MAX_RID_LEN = 128
MAX_USER_LEN = 256  # longer ones are cut
MAX_SALT_LEN = 256
MAX_TIMEOUT_MS = 86_400_000  # of one request: a day
MAX_ERROR_LEN = 1_000  # characters of a message in an error body

MAX_URL_BYTES = 8_192
MAX_HEADER_BYTES = 32_768  # all names and values together
MAX_HEADERS = 128
MAX_HEAD_BYTES = 131_072  # of a request line and headers that are not complete yet

HEAD_TIMEOUT_S = 10.0  # for the request line and headers
BODY_TIMEOUT_S = 60.0  # for the body
STALL_TIMEOUT_S = 120.0  # a client that takes nothing of an answer for so long is cut off
KEEP_ALIVE_S = 30.0
LINGER_S = 1.0  # an answer that comes before the end of the body is held open, for the client to find it:
LINGER_BYTES = 64_000_000  # so long, or until so much has come
HEALTH_TIMEOUT_S = 20.0
SCRAPE_TIMEOUT_S = 0.5  # for fresh numbers of the engine when metrics are asked for
