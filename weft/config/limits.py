"""The one table of limits: everything that a client can make large, and its maximum.

Each field is an option (`--max-n 16`) and a value of `limit` in the metric `weft:refused_total`.
docs/reference/limits.md lists where each limit is checked. Knows nothing of HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.config.numbers import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_IMAGE_PIXELS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_PROCESSORS,
    MAX_STOP_LEN,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TIMEOUT_MS,
)
from weft.config.options import option

MAX_URL_BYTES = 65_535  # what httptools reads


@dataclass(frozen=True, kw_only=True)
class Limits:
    # the request as bytes
    max_body_mb: float = option(
        16.0, "largest request body", group="limits", low=0.001, high=1024.0
    )
    max_url_bytes: int = option(
        8_192, "longest path with its query", group="limits", low=64, high=MAX_URL_BYTES
    )
    max_header_bytes: int = option(
        32_768, "all names and values of headers together", group="limits", low=512, high=1 << 20
    )
    max_headers: int = option(128, "number of headers", group="limits", low=8, high=10_000)
    max_body_parts: int = option(
        300_000, "lists, objects and members of objects in one body", group="limits", low=1_000
    )
    max_framing_bytes: int = option(
        16_384,
        "chunk sizes, chunk extensions and trailers of a body, beyond eight bytes for each of "
        "its own",
        group="limits",
        low=512,
        high=1 << 20,
    )
    max_json_depth: int = option(
        64,
        "nesting of free-form values, such as tools, schemas, template arguments",
        group="limits",
        low=4,
        high=500,
    )
    max_json_values: int = option(
        100_000, "values inside of one free-form value", group="limits", low=1
    )

    # files and batches
    max_file_mb: float = option(
        512.0, "largest uploaded file", group="limits", low=0.001, high=65_536.0
    )
    max_files: int = option(1_000, "files of one key", group="limits", low=1)
    max_batch_lines: int = option(100_000, "lines of one batch", group="limits", low=1)
    max_open_batches: int = option(100, "open batches of one key", group="limits", low=1)

    # the content of the request
    max_prompts: int = option(1_024, "prompts in one request", group="limits", low=1)
    max_n: int = option(64, "completions of one prompt", group="limits", low=1, high=MAX_N)
    max_completions: int = option(
        4_096, "completions of one request: prompts times n", group="limits", low=1
    )
    max_request_share: float = option(
        0.75,
        "part of the engine's rows that the completions of one request may have; the others wait "
        "for their turn",
        group="limits",
        low=0.0,
        high=1_000.0,
    )
    max_request_tokens: int = option(
        16_000_000,
        "prompt tokens of one request, those of each prompt n times",
        group="limits",
        low=1,
    )
    max_messages: int = option(16_384, "messages of one conversation", group="limits", low=1)
    max_tools: int = option(1_024, "tools of one conversation", group="limits", low=0)
    max_stop_strings: int = option(
        64,
        "stop strings of a request; also its stop patterns, of which 16 at most",
        group="limits",
        low=0,
        high=MAX_STOP_STRINGS,
    )
    max_stop_len: int = option(
        1_024,
        "characters of one stop string, stop pattern or bad word",
        group="limits",
        low=1,
        high=MAX_STOP_LEN,
    )
    max_total_stop_len: int = option(
        16_384,
        "characters of all different stop strings, stop patterns and bad words of a request",
        group="limits",
        low=1,
    )
    max_stop_token_ids: int = option(
        1_024, "stop tokens of a request", group="limits", low=0, high=MAX_STOP_TOKEN_IDS
    )
    max_logit_bias: int = option(
        4_096, "entries of logit_bias", group="limits", low=0, high=MAX_LOGIT_BIAS
    )
    max_allowed_token_ids: int = option(
        65_536, "entries of allowed_token_ids", group="limits", low=0, high=MAX_ALLOWED_TOKEN_IDS
    )
    max_bad_words: int = option(
        1_024, "entries of bad_words", group="limits", low=0, high=MAX_BAD_WORDS
    )
    max_processors: int = option(
        8, "logit processors of a request", group="limits", low=0, high=MAX_PROCESSORS
    )
    max_total_logit_bias: int = option(
        1_000_000,
        "entries of logit_bias, allowed_token_ids and bad_words, and bytes of custom_params, in "
        "one request, those of each prompt n times",
        group="limits",
        low=0,
    )
    max_total_grammar_len: int = option(
        16_000_000,
        "characters of all schemas, expressions and grammars in one request, those of each "
        "prompt n times",
        group="limits",
        low=1,
        high=100_000_000,
    )
    max_logprobs: int = option(
        20,
        "most likely tokens returned beside each token",
        group="limits",
        low=0,
        high=MAX_LOGPROBS,
    )
    max_logprob_token_ids: int = option(
        128,
        "tokens whose log probability is returned at every position",
        group="limits",
        low=0,
        high=MAX_LOGPROB_TOKEN_IDS,
    )
    max_total_prompt_logprobs: int = option(
        300_000,
        "log probabilities of prompts returned for one request, those of each prompt n times",
        group="limits",
        low=0,
    )
    max_total_hidden_values: int = option(
        4_000_000,
        "values of hidden states in one answer: tokens times hidden size, those of each prompt n "
        "times",
        group="limits",
        low=0,
    )
    max_total_embed_values: int = option(
        16_000_000,
        "values of input embeddings in one request: tokens times hidden size",
        group="limits",
        low=0,
        high=50_000_000,
    )
    max_open_embeds_mb: float = option(
        2_048.0,
        "input embeddings of all open requests, those of each completion counted, and inputs of "
        "encoders of pictures, videos and sounds",
        group="limits",
        low=0.0,
    )
    max_media_mb: float = option(
        64.0,
        "largest request body of a model that takes pictures, videos or sounds, and all of "
        "their files in one request together, from any source",
        group="limits",
        low=0.001,
        high=1024.0,
    )
    max_image_pixels: int = option(
        36_000_000,
        "pixels of a picture, or of a frame",
        group="limits",
        low=1,
        high=MAX_IMAGE_PIXELS,
    )
    max_video_frames: int = option(768, "frames of a video", group="limits", low=1)
    max_video_pixels: int = option(
        64_000_000, "pixels of all frames of a video", group="limits", low=1
    )
    max_audio_s: float = option(60.0, "duration of a sound", group="limits", low=0.01)
    max_speech_s: float = option(
        1_800.0, "duration of a sound that is transcribed", group="limits", low=0.01
    )
    max_detokenized: int = option(
        1_000_000, "token ids in one call of /detokenize", group="limits", low=1
    )
    max_parsed_len: int = option(
        1_000_000, "characters of a text that is sent to be parsed", group="limits", low=1
    )
    max_rid_len: int = option(
        128, "characters of a request's name", group="limits", low=8, high=128
    )
    max_user_len: int = option(
        256, "characters of the field user; longer ones are cut", group="limits", low=0
    )
    max_salt_len: int = option(
        256, "characters of cache_salt and of extra_key", group="limits", low=0
    )
    max_timeout_ms: int = option(
        86_400_000,
        "longest timeout_ms or ttft_ms of a request",
        group="limits",
        low=1,
        high=MAX_TIMEOUT_MS,
    )

    # connections
    max_connections: int = option(
        4_096,
        "open connections; beyond this, idle ones are closed and requests get 503",
        group="limits",
        low=1,
    )
    head_timeout_s: float = option(
        10.0,
        "time for a request line and its headers to arrive",
        group="limits",
        low=0.1,
        high=3600.0,
    )
    body_timeout_s: float = option(
        60.0, "time for a body to arrive", group="limits", low=0.1, high=3600.0
    )
    linger_s: float = option(
        1.0,
        "time to read on after an answer that was sent before the end of the body, so that the "
        "client finds it",
        group="limits",
        low=0.0,
        high=60.0,
    )
    linger_mb: float = option(
        64.0,
        "how much of the body is read and dropped in that time",
        group="limits",
        low=0.0,
        high=1024.0,
    )
    stall_timeout_s: float = option(
        120.0,
        "time after which a client that reads nothing of its answer is cut off",
        group="limits",
        low=0.1,
        high=3600.0,
    )
    keep_alive_s: float = option(
        30.0, "time after which an idle connection is closed", group="limits", low=1.0, high=3600.0
    )
    max_pending_tokens: int = option(
        4_096,
        "tokens that a stream's client may leave unread before its request is ended",
        group="limits",
        low=1,
    )

    @property
    def max_head_bytes(self) -> int:
        """Maximal bytes of an incomplete request line with headers: a complete one of this size is
        never accepted."""
        return self.max_url_bytes + 4 * self.max_header_bytes
