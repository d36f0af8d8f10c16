"""`POST /v1/audio/transcriptions` and `/v1/audio/translations`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import ASGIApp

from weft.config.numbers import shown
from weft.messages.sampling import SamplingParams
from weft.server.body import json_bytes, json_response
from weft.server.context import ServerContext
from weft.server.errors import ApiError, error_json, translated
from weft.server.leaving import while_client_waits
from weft.server.media import ServedMedia, require_media
from weft.server.model_names import use_named
from weft.server.openai.audio.by_chat import ChatTranscript, begin_chat
from weft.server.openai.audio.form import read_speech
from weft.server.openai.audio.models import (
    Duration,
    SpeechForm,
    TextDelta,
    TextDone,
    TranscribedSegment,
    TranscribedWord,
    Transcription,
    Usage,
    VerboseTranscription,
)
from weft.server.openai.audio.windows import NewText, SpeechTask, Transcriber, Window
from weft.server.operation import post
from weft.server.requests import common_request, request_name, sharing_of
from weft.text.media.placing import ReadyMedia
from weft.text.media.sources import MediaSource
from weft.text.speech import formats
from weft.text.speech.languages import NAMES, name_of
from weft.text.speech.vocabulary import TRANSCRIBE, TRANSLATE, SpeechTokens

CAPTIONS = {"srt": formats.srt, "vtt": formats.vtt}


async def transcriptions(context: ServerContext, request: Request) -> ASGIApp:
    return await _answer(context, request, TRANSCRIBE)


async def translations(context: ServerContext, request: Request) -> ASGIApp:
    return await _answer(context, request, TRANSLATE)


async def _answer(context: ServerContext, request: Request, task: str) -> ASGIApp:
    form, raw = await read_speech(context, request, task)
    await use_named(context, form)
    source = MediaSource("audio", "file", data=raw)
    media = require_media(context.media, [source])
    tokens = media.speech
    if tokens is None:
        return await _by_chat(context, request, form, raw)
    asked = _asked(context, form, tokens)
    common = common_request(
        context,
        request,
        form,
        SamplingParams(),
        rid=request_name(request, None),
        sharing=sharing_of(context, request, user=form.user[: context.limits.max_user_len]),
    )
    (sound,) = await media.load([source], context.info.context_length)
    (item,) = sound.items
    work = Transcriber(context, common, tokens, item, asked)
    if form.stream:
        texts = _texts(media, sound, work)
        return await _stream(texts, lambda: Duration(seconds=item.seconds))
    windows = await while_client_waits(_collected(media, sound, work))
    return _written(form, windows, item.seconds)


async def _by_chat(
    context: ServerContext, request: Request, form: SpeechForm, raw: bytes
) -> ASGIApp:
    chat = ChatTranscript(await begin_chat(context, request, form, raw))
    if form.stream:
        return await _stream(chat.texts(), chat.usage)
    text = (await while_client_waits(_joined(chat.texts()))).strip()
    if form.response_format == "text":
        return PlainTextResponse(f"{text}\n")
    return json_response(Transcription(text=text, usage=chat.usage()))


async def _joined(texts: AsyncIterator[str]) -> str:
    return "".join([text async for text in texts])


async def _collected(media: ServedMedia, sound: ReadyMedia, work: Transcriber) -> list[Window]:
    with media.holding(sound, "file"):
        return [one async for one in work.windows() if isinstance(one, Window)]


def _asked(context: ServerContext, form: SpeechForm, tokens: SpeechTokens) -> SpeechTask:
    """Raises `ApiError` for what the model does not know."""
    if form.task == TRANSLATE and not tokens.is_multilingual:
        raise ApiError(400, "this model knows English alone: it translates nothing", param="model")
    known = list(tokens.languages) if tokens.is_multilingual else ["en"]
    language = form.language
    by_name = {name: code for code, name in NAMES.items()}
    language = by_name.get(language, language)
    if language and language not in known:
        message = f"language is {shown(form.language)}; allowed: {', '.join(sorted(known))}"
        raise ApiError(400, message, param="language")
    prompt: list[int] = []
    if form.prompt:
        prompt = context.tokenizer.encode(f" {form.prompt}", add_special_tokens=False)
        if any(id >= tokens.end for id in prompt):
            raise ApiError(400, "prompt has special tokens of the model", param="prompt")
    is_detailed = form.response_format == "verbose_json"
    return SpeechTask(
        task=form.task,
        language=language,
        prompt=prompt,
        temperature=form.temperature,
        with_times=form.response_format in (*CAPTIONS, "verbose_json"),
        with_words=form.wants_words,
        with_quality=is_detailed,
    )


# ---- one answer


def _written(form: SpeechForm, windows: Sequence[Window], seconds: float) -> ASGIApp:
    text = _text_of(windows)
    match form.response_format:
        case "text":
            return PlainTextResponse(f"{text}\n")
        case "srt" | "vtt" as name:
            return PlainTextResponse(CAPTIONS[name](_captions(windows)))
        case "verbose_json":
            return json_response(_verbose(form, windows, text, seconds))
        case _:
            return json_response(Transcription(text=text, usage=Duration(seconds=seconds)))


def _text_of(windows: Sequence[Window]) -> str:
    return "".join(text for one in windows for text in one.texts).strip()


def _captions(windows: Sequence[Window]) -> list[formats.Caption]:
    found = []
    for one in windows:
        for segment, text in zip(one.segments, one.texts, strict=True):
            found.append(formats.Caption(segment.start_s, segment.end_s, text))
    return found


def _verbose(
    form: SpeechForm, windows: Sequence[Window], text: str, seconds: float
) -> VerboseTranscription:
    answer = VerboseTranscription(
        task=form.task,
        language=name_of(windows[0].language),
        duration=round(seconds, 3),
        text=text,
        usage=Duration(seconds=seconds),
    )
    if not form.granularities or "segment" in form.granularities:
        answer.segments = []
        for one in windows:
            for segment, segment_text in zip(one.segments, one.texts, strict=True):
                answer.segments.append(
                    TranscribedSegment(
                        id=len(answer.segments),
                        seek=one.begin,
                        start=round(segment.start_s, 2),
                        end=round(segment.end_s, 2),
                        text=segment_text,
                        tokens=list(segment.ids),
                        temperature=one.quality.temperature,
                        avg_logprob=one.quality.logprob,
                        compression_ratio=one.quality.compression,
                        no_speech_prob=one.quality.no_speech,
                    )
                )
    if form.wants_words:
        answer.words = [
            TranscribedWord(
                word=word.text.strip(), start=round(word.start_s, 2), end=round(word.end_s, 2)
            )
            for one in windows
            for word in one.words
        ]
    return answer


# ---- a stream


async def _stream(texts: AsyncIterator[str], usage: Callable[[], Usage]) -> ASGIApp:
    """The answer as events; `usage` is asked after the last text. An error before the first event
    is an answer of its own."""
    events = _events(texts, usage)
    first = await while_client_waits(_first(events))
    headers = {"cache-control": "no-cache"}
    return StreamingResponse(
        _survived(first, events), media_type="text/event-stream", headers=headers
    )


async def _first(events: AsyncIterator[bytes]) -> bytes:
    return await anext(events)


async def _survived(first: bytes, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The events. An error is the last of them."""
    yield first
    try:
        async for event in events:
            yield event
    except Exception as exc:
        yield b"data: " + error_json(translated(exc)) + b"\n\n"


async def _texts(media: ServedMedia, sound: ReadyMedia, work: Transcriber) -> AsyncIterator[str]:
    with media.holding(sound, "file"):
        async for one in work.windows(with_deltas=True):
            if isinstance(one, NewText):
                yield one.text


async def _events(texts: AsyncIterator[str], usage: Callable[[], Usage]) -> AsyncIterator[bytes]:
    said: list[str] = []
    async for one in texts:
        # The text as a whole begins without a blank.
        text = one if said else one.lstrip()
        if text:
            said.append(text)
            yield _event(TextDelta(delta=text))
    yield _event(TextDone(text="".join(said).strip(), usage=usage()))


def _event(value: TextDelta | TextDone) -> bytes:
    return b"data: " + json_bytes(value) + b"\n\n"


ROUTES = (
    post(
        "/v1/audio/transcriptions",
        transcriptions,
        "Write down a sound",
        answer=Transcription,
    ),
    post(
        "/v1/audio/translations",
        translations,
        "Write down a sound in English",
        answer=Transcription,
    ),
)
