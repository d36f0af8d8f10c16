"""`/infill`, as in llama.cpp: the text that fills a gap. Also the prompt of any request with a
`suffix`."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from weft.client.generation import Completion, Delta, TextDelivery
from weft.json_types import JsonObject
from weft.messages.replies import Finish
from weft.messages.sampling import SamplingParams
from weft.server.body import json_bytes, read_json
from weft.server.context import ServerContext
from weft.server.errors import ApiError, over
from weft.server.model_names import answering_name
from weft.server.operation import post
from weft.server.prompt_ids import encode_texts
from weft.server.requests import SampledRequest, make_requests, sampling_of, submit
from weft.server.stream import SSE, Answer, Wire, sse_error
from weft.text.infill import Infill

LLAMA_EVENTS = Wire(SSE, sse_error, b"")
OWN_NAME = "filename"  # name of the file with the gap, if other files are given


class ExtraFile(msgspec.Struct, kw_only=True):
    text: str
    filename: str | None = None


class InfillRequest(SampledRequest, kw_only=True):
    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[ExtraFile] | None = None  # other files as context
    prompt: str = ""  # the beginning of the text that fills the gap
    n_predict: int | None = None  # below 0: as many as the context allows
    repeat_penalty: float | None = None


async def infill(context: ServerContext, request: Request) -> ASGIApp:
    body = await read_json(context, request, InfillRequest)
    tokens = infill_tokens(context, "input_suffix")
    files = body.input_extra or []
    if len(files) > context.limits.max_prompts:
        message = (
            f"input_extra has {len(files):,} files; {context.limits.max_prompts:,} are allowed"
        )
        raise over("max_prompts", message, param="input_extra")
    params = with_stops(context, tokens, _params(context, body))
    params.check(context.client.engine.vocab_size)  # before the work on the prompt
    ids = await infill_prompt(
        context,
        tokens,
        body.input_prefix,
        body.input_suffix,
        beginning=body.prompt,
        files=files,
    )
    body.rid = body.rid or body.request_id
    requests = make_requests(context, request, body, [ids], params)
    delivery = TextDelivery(body.stream_interval or context.config.stream_interval)
    generation = submit(context, requests, [delivery], stream=bool(body.stream), valid=params)
    name = answering_name(context, body.model, body.lora_path)
    reply = InfillReply(name, generation.completions[0])
    return Answer(generation, reply, LLAMA_EVENTS)


def infill_tokens(context: ServerContext, param: str) -> Infill:
    """The tokens with which the model is asked to fill a gap.

    Raises `ApiError` 400, which names the field `param`, if the model cannot fill gaps.
    """
    if context.infill is None:
        message = (
            f"{param}: this model cannot fill in the middle; its tokenizer has no tokens for it"
        )
        raise ApiError(400, message, param=param, code="unsupported_parameter")
    return context.infill


def with_stops(
    context: ServerContext,
    tokens: Infill,
    params: SamplingParams,
) -> SamplingParams:
    """`params` that also stop at the model's own tokens for parts and files, after which the model
    writes unrelated text."""
    if params.ignore_eos:
        return params
    vocab_size = context.client.engine.vocab_size
    stops = dict.fromkeys(params.stop_token_ids)  # each id once, in order
    stops.update(dict.fromkeys(token for token in tokens.stops if token < vocab_size))
    return msgspec.structs.replace(params, stop_token_ids=tuple(stops))


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
    """The token ids of a prompt with a gap between `prefix` and `suffix`; `beginning` is the
    beginning of the text that fills it."""
    before: list[int] = []
    if add_special_tokens:
        before += context.tokenizer.opening_ids
    if files and tokens.file is None:
        texts = [file.text for file in files]
        prefix = "\n\n".join([*texts, str(prefix)])
    elif files:
        texts = [f"{file.filename or OWN_NAME}\n{file.text}" for file in files]
        texts.append(f"{OWN_NAME}\n")
        for ids in await encode_texts(context, texts, add_special_tokens=False):
            if tokens.file is not None:
                before.append(tokens.file)
            before += ids
    if isinstance(prefix, str):
        [prefix] = await encode_texts(context, [prefix], add_special_tokens=False)
    after, middle = await context.tokenizer.encode_within(
        [suffix, beginning], context_len=context.info.context_length
    )
    return [*before, *tokens.prompt(prefix, after, middle)]


def _params(context: ServerContext, body: InfillRequest) -> SamplingParams:
    max_tokens = body.max_tokens
    if body.n_predict is not None:
        max_tokens = None if body.n_predict < 0 else body.n_predict
    body.n = None  # llama.cpp has one completion
    return sampling_of(
        body,
        context.info.sampling,
        max_new_tokens=max_tokens,
        logprobs=None,
        fewest_tokens=0,
    )


class InfillReply:
    """One answer in llama.cpp's form.

    Each event of a stream has a piece of the text; the last event has the counts and times.
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

    def _answer(self, delta: Delta) -> JsonObject:
        answer: JsonObject = {
            "index": 0,
            "content": delta.text,
            "tokens": delta.token_ids,
            "stop": delta.end is not None,
        }
        if delta.end is not None:
            answer |= self._numbers(delta.end)
        return answer

    def _numbers(self, end: Finish) -> JsonObject:
        total_ms = 1e3 * (time.perf_counter() - self._began)
        prompt_ms = 0.0
        if self._completion.first_token_at:
            first_ms = 1e3 * (self._completion.first_token_at - self._began)
            prompt_ms = min(max(first_ms, 0.0), total_ms)
        stop_type = "none"
        word = ""
        if end.reason == "length":
            stop_type = "limit"
        elif end.reason == "stop" and isinstance(end.matched, str) and end.matched:
            stop_type = "word"
        elif end.reason == "stop":
            stop_type = "eos"
        if isinstance(end.matched, str):
            word = end.matched
        num_prompt = end.prompt_tokens - end.cached_tokens
        num_predicted = end.completion_tokens
        predicted_ms = total_ms - prompt_ms
        return {
            "model": self._model,
            "stop_type": stop_type,
            "stopping_word": word,
            "tokens_predicted": num_predicted,
            "tokens_evaluated": end.prompt_tokens,
            "tokens_cached": end.cached_tokens,
            "truncated": False,
            "timings": {
                "prompt_n": num_prompt,
                "prompt_ms": prompt_ms,
                "prompt_per_second": _rate(num_prompt, prompt_ms),
                "predicted_n": num_predicted,
                "predicted_ms": predicted_ms,
                "predicted_per_second": _rate(num_predicted, predicted_ms),
            },
        }


def _rate(num: int, ms: float) -> float:
    return 1e3 * num / ms if ms else 0.0


ROUTES = (post("/infill", infill, "Fill the gap between two texts (llama.cpp)", InfillRequest),)
