"""`/infill`, as llama.cpp has it: the text that fills a gap; and the prompt of any request with a
`suffix`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from weft.client.generation import Completion, Delta
from weft.messages.sampling import SamplingParams
from weft.server.body import json_bytes, read_json
from weft.server.context import ServerContext
from weft.server.errors import ApiError, error_json, over
from weft.server.stream import Answer, Wire
from weft.server.submit import SampledRequest, encode_texts, prompts, sampling_of, submit
from weft.text.infill import Infill

LLAMA_EVENTS = Wire(
    b"text/event-stream; charset=utf-8", lambda error: b"data: " + error_json(error) + b"\n\n", b""
)
OWN_NAME = "filename"  # of the file with the gap, where others are given


class ExtraFile(msgspec.Struct, kw_only=True):
    text: str
    filename: str | None = None


class InfillRequest(SampledRequest, kw_only=True):
    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[ExtraFile] | None = None  # other files, which the model may look at
    prompt: str = ""  # how the text that fills the gap begins
    n_predict: int | None = None  # below 0: as many as the context allows
    repeat_penalty: float | None = None


async def infill(context: ServerContext, request: Request) -> ASGIApp:
    body = await read_json(context, request, InfillRequest)
    context.require_model(body.model)
    tokens = infill_tokens(context, "input_suffix")
    files = body.input_extra or []
    if len(files) > context.limits.max_prompts:
        message = (
            f"input_extra has {len(files):,} files; {context.limits.max_prompts:,} are allowed"
        )
        raise over("max_prompts", message, param="input_extra")
    params = with_stops(context, tokens, _params(context, body))
    params.check(context.client.engine.vocab_size)
    ids = await infill_prompt(
        context, tokens, body.input_prefix, body.input_suffix, beginning=body.prompt, files=files
    )
    body.rid = body.rid or body.request_id
    generation = submit(
        context, prompts(context, request, body, [ids], params), stream=bool(body.stream)
    )
    reply = InfillReply(context.info.model_name, generation.completions[0])
    return Answer(generation, reply, LLAMA_EVENTS)


def infill_tokens(context: ServerContext, param: str) -> Infill:
    """How the model is asked to fill a gap.

    Raises `ApiError` 400, which names the field, if it cannot.
    """
    if context.infill is None:
        message = (
            f"{param}: this model cannot fill in the middle; its tokenizer has no tokens for it"
        )
        raise ApiError(400, message, param=param, code="unsupported_parameter")
    return context.infill


def with_stops(context: ServerContext, tokens: Infill, params: SamplingParams) -> SamplingParams:
    """`params` that also end at the model's own tokens for parts and files: behind them it writes
    something else.
    """
    if params.ignore_eos:
        return params
    stops = [token for token in tokens.stops if token < context.client.engine.vocab_size]
    return msgspec.structs.replace(
        params, stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *stops)))
    )


async def infill_prompt(
    context: ServerContext,
    tokens: Infill,
    prefix: str | Sequence[int],
    suffix: str,
    *,
    beginning: str = "",
    files: Sequence[ExtraFile] = (),
    add_special_tokens: bool = True,
) -> list[int]:
    """The ids that a gap between `prefix` and `suffix` becomes; `beginning` is how what fills it
    begins.
    """
    before: list[int] = context.tokenizer.opening_ids if add_special_tokens else []
    if files and tokens.file is None:
        prefix = "\n\n".join([*(one.text for one in files), str(prefix)])
    elif files:
        texts = [f"{one.filename or OWN_NAME}\n{one.text}" for one in files]
        encoded = await encode_texts(context, [*texts, f"{OWN_NAME}\n"], add_special_tokens=False)
        before = [
            *before,
            *(token for ids in encoded for token in (tokens.file, *ids) if token is not None),
        ]
    if isinstance(prefix, str):
        [prefix] = await encode_texts(context, [prefix], add_special_tokens=False)
    behind, middle = await context.tokenizer.encode_within(
        [suffix, beginning], context_len=context.info.context_length
    )
    return [*before, *tokens.prompt(prefix, behind, middle)]


def _params(context: ServerContext, body: InfillRequest) -> SamplingParams:
    if body.n_predict is not None:
        body.max_tokens = None if body.n_predict < 0 else body.n_predict
    if body.repetition_penalty is None:
        body.repetition_penalty = body.repeat_penalty
    body.n = None  # llama.cpp has one
    return sampling_of(
        body, context.info.sampling, max_new_tokens=body.max_tokens, logprobs=None, fewest_tokens=0
    )


class InfillReply:
    """One answer in llama.cpp's form.

    Each event of a stream has a piece; the last has the numbers.
    """

    def __init__(self, model: str, completion: Completion) -> None:
        self._model = model
        self._completion = completion
        self._began = time.perf_counter()

    def full_body(self, deltas: Sequence[Delta]) -> bytes:
        return json_bytes(self._answer(deltas[0]))

    def events(self, delta: Delta) -> bytes:
        return b"data: " + json_bytes(self._answer(delta)) + b"\n\n"

    def closing(self) -> bytes:
        return b""

    def _answer(self, delta: Delta) -> dict[str, Any]:
        answer: dict[str, Any] = {
            "index": 0,
            "content": delta.text,
            "tokens": delta.token_ids,
            "stop": delta.end is not None,
        }
        return answer if delta.end is None else answer | self._numbers(delta)

    def _numbers(self, delta: Delta) -> dict[str, Any]:
        end = delta.end
        assert end is not None
        total_ms = 1e3 * (time.perf_counter() - self._began)
        first = self._completion.first_token_at
        prompt_ms = min(max(1e3 * (first - self._began), 0.0), total_ms) if first else 0.0
        word = end.matched if isinstance(end.matched, str) else ""
        kinds = {"length": "limit", "stop": "word" if word else "eos"}
        num_prompt = end.prompt_tokens - end.cached_tokens
        return {
            "model": self._model,
            "stop_type": kinds.get(end.reason, "none"),
            "stopping_word": word,
            "tokens_predicted": end.completion_tokens,
            "tokens_evaluated": end.prompt_tokens,
            "tokens_cached": end.cached_tokens,
            "truncated": False,
            "timings": {
                "prompt_n": num_prompt,
                "prompt_ms": prompt_ms,
                "prompt_per_second": _rate(num_prompt, prompt_ms),
                "predicted_n": end.completion_tokens,
                "predicted_ms": total_ms - prompt_ms,
                "predicted_per_second": _rate(end.completion_tokens, total_ms - prompt_ms),
            },
        }


def _rate(num: int, ms: float) -> float:
    return 1e3 * num / ms if ms else 0.0
