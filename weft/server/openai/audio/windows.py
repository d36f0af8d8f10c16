"""Transcribes a sound in windows of 30 s, one after the other: each begins where the last segment
of the one before ended, and knows what was said before.

    sound      |------- window 0 -------|
    segments   | hello | how are you |  I am ..
                                     |------- window 1 -------|

The engine knows nothing of this: a window is a request, or a few of them. The encoder reads a
window once for all of these, because its vectors stay cached by the content of the window.

Source: Radford et al., arXiv:2212.04356, section 3.8, and section 4.5 for the thresholds.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from weft.arrays import FloatArray
from weft.client.generation import TextDelivery
from weft.client.requests import pack_ids
from weft.messages.media import MediaItem
from weft.messages.replies import HeardWeightsPiece
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.server.context import ServerContext
from weft.server.errors import failed
from weft.server.requests import submit
from weft.text.media.whisper import window
from weft.text.speech.segments import SpokenSegment, cut
from weft.text.speech.vocabulary import FRAMES_PER_TIME, TIME_STEP_S, SpeechTokens
from weft.text.speech.words import Word, token_times, words_of

# Tried one after the other, until an answer looks right.
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
MAX_COMPRESSION = 2.4  # a text that repeats itself is shorter by more when it is compressed
LEAST_LOGPROB = -1.0  # on average
NO_SPEECH = 0.6  # probability from which an unlikely answer is taken for silence
KEEPS_CONTEXT_BELOW = 0.5  # the text of a window at this temperature says nothing about the next
FRAMES_PER_S = FRAMES_PER_TIME / TIME_STEP_S
# Windows that a sound may have, times those of 30 s: after them, the next begins where one ends.
MOST_OVERLAPS = 4


@dataclass(frozen=True, kw_only=True)
class SpeechTask:
    """What a client wants to know of a sound."""

    task: str
    language: str  # a code; "": it is detected
    prompt: Sequence[int]  # tokens that might have been said before
    temperature: float | None
    with_times: bool  # of segments
    with_words: bool
    with_quality: bool  # each window has the probability that nobody speaks


class AnswerQuality(NamedTuple):
    temperature: float
    logprob: float  # average of its tokens
    compression: float
    no_speech: float  # probability; 0: unknown


class NewText(NamedTuple):
    """New text of a window that is still being written."""

    text: str


class Window(NamedTuple):
    """The transcript of a window."""

    begin: int  # frame of the sound
    language: str
    segments: list[SpokenSegment]
    texts: list[str]  # of the segments
    quality: AnswerQuality
    words: list[Word]


class Ran(NamedTuple):
    """The output of one request."""

    ids: list[int]  # without the token that ended it
    is_complete: bool  # whether such a token did, not the length
    logprob: float  # average
    id_logprobs: list[float]  # of the first token
    weights: list[HeardWeightsPiece]


class Transcriber:
    """The transcript of one sound. `common`: the client's request, without prompt and sound."""

    def __init__(
        self,
        context: ServerContext,
        common: GenerateRequest,
        tokens: SpeechTokens,
        sound: MediaItem,
        asked: SpeechTask,
    ) -> None:
        self._context = context
        self._common = common
        self._tokens = tokens
        self._sound = sound
        self._asked = asked
        self._language = asked.language
        self._vocab_size = context.client.engine.vocab_size
        self._context_len = context.info.context_length
        self.num_frames = max(int(sound.seconds * FRAMES_PER_S + 1e-6), 1)
        # The next window begins at a time in the one before.
        self._with_times = asked.with_times or self.num_frames > 2 * sound.num_heard

    async def windows(self, *, with_deltas: bool = False) -> AsyncIterator[NewText | Window]:
        """The windows in order; with their text while it comes, if `with_deltas`: token by token,
        or by segments, because what follows the last of these is heard again. Raises `ApiError` and
        whatever a request can raise."""
        by_token = with_deltas and not self._with_times
        longest = 2 * self._sound.num_heard
        before = list(self._asked.prompt)
        num_left = MOST_OVERLAPS * -(-self.num_frames // longest)
        begin = 0
        while begin < self.num_frames:
            heard = window(self._sound, begin)
            num_frames = min(longest, self.num_frames - begin)
            no_speech = await self._look(heard, before)
            found: Ran | None = None
            quality = AnswerQuality(0.0, 0.0, 0.0, no_speech)
            prompt = self._prompt(before)
            async for step in self._answers(heard, prompt, no_speech, with_deltas=by_token):
                if isinstance(step, NewText):
                    yield step
                else:
                    found, quality = step
            assert found is not None, "a window without an answer"
            skipped = num_frames
            segments: list[SpokenSegment] = []
            if not self._is_silence(quality):
                begin_s = begin / FRAMES_PER_S
                segments, skipped = cut(found.ids, self._tokens, begin_s, num_frames)
            segments = [one for one in segments if self._tokens.text_of(one.ids)]
            words: list[Word] = []
            if self._asked.with_words and segments:
                words = await self._words(heard, prompt, found, segments, begin, num_frames)
            texts = [self._text(one.ids) for one in segments]
            if with_deltas and not by_token:
                for text in texts:
                    yield NewText(text)
            yield Window(begin, self._language, segments, texts, quality, words)
            before = self._before(before, segments, quality)
            num_left -= 1
            begin += skipped if num_left > 0 else num_frames

    # One window

    async def _look(self, heard: MediaItem, before: Sequence[int]) -> float:
        """Find the language, if it is not known yet. Returns the probability that nobody speaks, if
        it is needed; else 0."""
        tokens = self._tokens
        if not self._language and not tokens.is_multilingual:
            self._language = "en"
        needs_language = not self._language
        judges = self._asked.with_quality or self._asked.temperature is None
        if not needs_language and not judges:
            return 0.0
        prompt = [tokens.begin]
        if before and not needs_language:
            prompt = [tokens.previous, *self._cut(before), tokens.begin]
        ids = [tokens.no_speech, *tokens.languages.values()]
        sampling = SamplingParams(
            max_new_tokens=1, temperature=0.0, logprobs=0, logprob_token_ids=tuple(ids)
        )
        ran = await self._run(heard, prompt, sampling)
        if needs_language:
            by_code = dict(zip(tokens.languages, ran.id_logprobs[1:], strict=True))
            self._language = max(by_code, key=by_code.__getitem__)
        return math.exp(ran.id_logprobs[0])

    async def _answers(
        self, heard: MediaItem, prompt: list[int], no_speech: float, *, with_deltas: bool
    ) -> AsyncIterator[NewText | tuple[Ran, AnswerQuality]]:
        """The answer for a window, after its deltas: the first that looks right."""
        asked = self._asked.temperature
        temperatures = TEMPERATURES if asked is None and not with_deltas else (asked or 0.0,)
        for temperature in temperatures:
            sampling = SamplingParams(
                max_new_tokens=self._context_len - len(prompt),
                temperature=temperature,
                seed=0,  # the same sound gets the same answer
                logprobs=0,
                speech=self._tokens.rules(with_times=self._with_times),
            )
            message = self._request(heard, prompt, sampling)
            ran: Ran | None = None
            async for step in self._steps(message, with_deltas=with_deltas):
                if isinstance(step, NewText):
                    yield step
                else:
                    ran = step
            assert ran is not None, "a request without an end"
            text = self._text(ran.ids)
            quality = AnswerQuality(temperature, ran.logprob, _compression(text), no_speech)
            is_last = temperature == temperatures[-1]
            if is_last or self._is_silence(quality) or _looks_right(quality):
                yield ran, quality
                return

    def _is_silence(self, quality: AnswerQuality) -> bool:
        """Whether an answer is dropped, because probably nobody speaks. Only if the temperature may
        change: a client that sets it gets what the model writes."""
        if self._asked.temperature is not None:
            return False
        return quality.no_speech > NO_SPEECH and quality.logprob < LEAST_LOGPROB

    async def _words(
        self,
        heard: MediaItem,
        prompt: list[int],
        output: Ran,
        segments: Sequence[SpokenSegment],
        begin: int,
        num_frames: int,
    ) -> list[Word]:
        rules = replace(
            self._tokens.rules(with_times=False),
            alignment_heads=self._tokens.alignment_heads,
            align_from=len(prompt),
        )
        sampling = SamplingParams(max_new_tokens=0, temperature=0.0, speech=rules)
        # What the model attended to while it wrote the token after each one. Nothing comes after
        # the last token of an output that was cut off: it ends with the one before.
        ids = output.ids if output.is_complete else output.ids[:-1]
        if not ids:
            return []
        ran = await self._run(heard, prompt + ids, sampling)
        num_vectors = num_frames // FRAMES_PER_TIME
        weights = _joined(ran.weights, len(prompt))[:, :, :num_vectors]
        begin_s = begin / FRAMES_PER_S
        work = self._context.readers.run(lambda: token_times(weights), is_long=False)
        ends = [begin_s + end for end in await work]
        ends += ends[-1:]
        starts = [begin_s, *ends]
        found: list[Word] = []
        for one in segments:
            text = [
                (id, (starts[index], ends[index]))
                for index, id in enumerate(one.ids, one.first)
                if id < self._tokens.end
            ]
            ids_of_text = [id for id, _ in text]
            spans = [span for _, span in text]
            found += words_of(ids_of_text, spans, self._language, self._text)
        return found

    # Prompts

    def _prompt(self, before: Sequence[int]) -> list[int]:
        return self._tokens.prompt(
            self._language, self._asked.task, self._cut(before), with_times=self._with_times
        )

    def _cut(self, before: Sequence[int]) -> list[int]:
        """The end of the text before a window, which gets half of the context."""
        most = self._context_len // 2 - 1
        return list(before[-most:])

    def _before(
        self, before: list[int], segments: Sequence[SpokenSegment], quality: AnswerQuality
    ) -> list[int]:
        """The text before the next window."""
        if quality.temperature >= KEEPS_CONTEXT_BELOW:
            return []
        said = [id for one in segments for id in one.ids]
        return self._cut([*before, *said])

    # Requests

    def _request(
        self, heard: MediaItem, prompt: Sequence[int], sampling: SamplingParams
    ) -> GenerateRequest:
        packed = pack_ids(prompt, self._vocab_size)
        return replace(self._common, input_ids=packed, sampling=sampling, media=(heard,))

    async def _run(self, heard: MediaItem, prompt: Sequence[int], sampling: SamplingParams) -> Ran:
        message = self._request(heard, prompt, sampling)
        async for step in self._steps(message, with_deltas=False):
            if isinstance(step, Ran):
                return step
        raise AssertionError("a request without an end")

    async def _steps(
        self, message: GenerateRequest, *, with_deltas: bool
    ) -> AsyncIterator[NewText | Ran]:
        """The output of a request, after its deltas. Raises `ApiError`."""
        ids: list[int] = []
        logprobs: list[float] = []
        of_first: list[float] = []
        detokenizer = self._context.tokenizer.detokenizer()
        generation = submit(self._context, [message], [TextDelivery()], stream=with_deltas)
        with generation:
            async for deltas in generation:
                for delta in deltas:
                    ids += delta.token_ids
                    if delta.logprobs and not logprobs:
                        of_first = delta.logprobs[0].id_logprobs
                    logprobs += [one.logprob for one in delta.logprobs]
                    text = "".join(map(detokenizer.push, self._tokens.text_of(delta.token_ids)))
                    if with_deltas and text:
                        yield NewText(text)
                    if delta.end is not None and delta.end.status >= 400:
                        raise failed(delta.end.status, delta.end.message, delta.end.retry_after_s)
        rest = detokenizer.flush()
        if with_deltas and rest:
            yield NewText(rest)
        outputs = generation.completions[0].aux_outputs
        weights = [one for one in outputs if isinstance(one, HeardWeightsPiece)]
        is_complete = bool(ids) and ids[-1] == self._tokens.end
        if is_complete:
            ids.pop()
        average = sum(logprobs) / max(len(logprobs), 1)
        yield Ran(ids, is_complete, average, of_first, weights)

    def _text(self, ids: Sequence[int]) -> str:
        return self._context.tokenizer.decode(self._tokens.text_of(ids))


def _joined(pieces: Sequence[HeardWeightsPiece], first: int) -> FloatArray:
    """The weights [tokens, heads, vectors] of the tokens from position `first` on. A step that was
    computed again sends some of them twice."""
    end = max(one.start + one.shape[0] for one in pieces)
    found = np.zeros((end - first, *pieces[0].shape[1:]), dtype=np.float32)
    for one in pieces:
        begin = one.start - first
        values = np.frombuffer(one.weights, dtype=np.float32).reshape(one.shape)
        found[begin : begin + one.shape[0]] = values
    return found


def _compression(text: str) -> float:
    data = text.encode("utf-8", "replace")
    return len(data) / len(zlib.compress(data)) if data else 0.0


def _looks_right(quality: AnswerQuality) -> bool:
    return quality.compression <= MAX_COMPRESSION and quality.logprob >= LEAST_LOGPROB
