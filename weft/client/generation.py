"""The completions of one request while they grow: token ids in, `Delta`s of text out.

A consumer holds a `Generation` and iterates over everything that is new since it last looked, so
a slow consumer gets fewer and larger deltas. The client feeds it. This module knows nothing of
sockets, HTTP or the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

from msgspec.structs import replace

from weft.client.front_times import FrontTimes
from weft.json_types import JsonObject
from weft.messages.replies import AuxPiece, Finish, HiddenStatesPiece, TokenLogprobs
from weft.messages.requests import GenerateRequest
from weft.messages.weights import FIRST_VERSION
from weft.observe.metrics import Latency
from weft.text.detokenizer import Detokenizer
from weft.text.parsers.output import Parser
from weft.text.stop.stopping import StopMatcher


class Delta(NamedTuple):
    """The new output of one completion.

    Text may come later than its ids: half characters and possible beginnings of stop strings are
    held back.
    """

    choice: int  # of the completion: prompt number * n + number among the n
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]  # one for each of `token_ids`, if the request asked for them
    num_tokens: int  # generated so far, including these
    end: Finish | None  # in the last delta


class TextDelivery(NamedTuple):
    """How the text of a request's completions reaches its reader. The engine knows nothing of
    it."""

    stream_interval: int = 1  # tokens in one delta, except the first
    # A new parser of the reasoning before the answer, if stop strings end only the answer.
    reasoning: Callable[[], Parser] | None = None


class CompletionSpec(NamedTuple):
    """What is known of a completion before its first token. Times are from `time.perf_counter`."""

    request: GenerateRequest  # as it was made, with its number and without its prompt
    choice: int
    prompt_len: int
    latency: Latency  # where its times are recorded
    started_s: float
    arrived_s: float  # when the HTTP request came
    front: FrontTimes
    num_embed_bytes: int = 0  # of input embeddings that the engine keeps for it
    stream_interval: int = 1  # tokens in one delta, except the first
    traceparent: str = ""


class Completion:
    """One completion: the text of its tokens so far, and the output that was not taken yet.

        push ──▶ detokenizer ──▶ matcher ──▶ texts ──▶ take ──▶ Delta

    `spec` is fixed; all other fields are state, which only the client writes. A completion counts
    itself among the open completions of its generation.
    """

    __slots__ = (
        "_detokenizer",
        "_end_taken",
        "_logprobs",
        "_matcher",
        "_texts",
        "aux_outputs",
        "end",
        "first_token_at",
        "generation",
        "last_token_at",
        "num_tokens",
        "pending_ids",
        "spec",
        "stopped_by",
        "warnings",
    )

    def __init__(
        self,
        spec: CompletionSpec,
        generation: Generation,
        detokenizer: Detokenizer,
        matcher: StopMatcher | None = None,
    ) -> None:
        self.spec = spec
        self.generation = generation
        self.num_tokens = 0
        self.pending_ids: list[int] = []  # tokens that the consumer has not taken
        self.first_token_at = 0.0
        self.last_token_at = 0.0
        # (header, text) of each warning; complete before the first token.
        self.warnings: list[tuple[str, str]] = []
        self.aux_outputs: list[AuxPiece] = []
        # The stop string that ended the completion here; the engine's final message is still to
        # come.
        self.stopped_by: str | None = None
        self.end: Finish | None = None
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._end_taken = False
        generation.completions.append(self)
        generation.num_open += 1

    def push(self, token: int) -> None:
        """Take a token of the output."""
        self.pending_ids.append(token)
        self.num_tokens += 1
        text = self._detokenizer.push(token)
        if text:
            if self._matcher is None:
                self._texts.append(text)
            else:
                self._match(text)

    def push_stop(self, token: int) -> None:
        """Take the stop token that ended it. Its id always counts; its text only with
        `include_stop`."""
        if self.spec.request.sampling.include_stop:
            self.push(token)
        else:
            self.pending_ids.append(token)
            self.num_tokens += 1

    def push_aux_output(self, output: AuxPiece) -> None:
        """Keep an auxiliary output. Of hidden states keep only the latest if the request wants
        "last"."""
        if self.stopped_by is not None:
            return  # it belongs to tokens after the end
        only_last = self.spec.request.sampling.hidden_states == "last"
        if only_last and isinstance(output, HiddenStatesPiece):
            kept = [one for one in self.aux_outputs if not isinstance(one, HiddenStatesPiece)]
            self.aux_outputs[:] = kept
        self.aux_outputs.append(output)

    def push_logprobs(self, logprobs: TokenLogprobs) -> None:
        # Logprobs of tokens after a stop string have no token here.
        if len(self._logprobs) < len(self.pending_ids):
            self._logprobs.append(logprobs)

    def finish(self, finish: Finish, weight_version: str = FIRST_VERSION) -> Finish:
        """Take the engine's final message. A stop string that was found here has priority."""
        if self.stopped_by is None:
            text = self._detokenizer.flush()
            if text:
                self._match(text)
        if self._matcher is not None and self.stopped_by is None:
            text = self._matcher.flush()
            # An error stays an error, even if its text ends with a stop string.
            if finish.reason in ("stop", "length"):
                self.stopped_by = self._matcher.matched
            if text:
                self._texts.append(text)
        return self.break_off(finish, weight_version)

    def break_off(self, finish: Finish, weight_version: str = FIRST_VERSION) -> Finish:
        """End at once, as `finish` says, without the text that is still held back."""
        # The engine's count includes the history of a session.
        prompt_tokens = finish.prompt_tokens or self.spec.prompt_len
        ended_s = time.perf_counter()
        self.spec.front.ended_s = ended_s
        e2e_s = ended_s - self.spec.started_s
        self.end = replace(
            finish,
            prompt_tokens=prompt_tokens,
            completion_tokens=self.num_tokens,
            e2e_s=e2e_s,
            weight_version=weight_version,
        )
        if self.stopped_by is not None:
            self.end = replace(
                self.end, reason="stop", matched=self.stopped_by, message="", status=200
            )
        self.generation.num_open -= 1
        return self.end

    def take(self) -> Delta | None:
        """All new output as a delta; None if there is too little for one.

        `stream_interval` does not hold back the first token and the end.
        """
        token_ids = self.pending_ids
        if self.end is None or self._end_taken:
            if not self._texts and not self._logprobs:
                return None
            num_pending = len(token_ids)
            if num_pending < self.spec.stream_interval and num_pending != self.num_tokens:
                return None
        texts = self._texts
        logprobs = self._logprobs
        self.pending_ids = []
        self._texts = []
        self._logprobs = []
        self._end_taken = self.end is not None
        text = texts[0] if len(texts) == 1 else "".join(texts)
        # Positional arguments: keywords would add a tenth to the time per token.
        return Delta(self.spec.choice, text, token_ids, logprobs, self.num_tokens, self.end)

    def _match(self, text: str) -> None:
        """Add text, cut at a stop string once `min_new_tokens` are exceeded."""
        matcher = self._matcher
        if matcher is not None:
            if self.num_tokens > self.spec.request.sampling.min_new_tokens:
                text = matcher.push(text)
                self.stopped_by = matcher.matched
            else:
                text = matcher.pass_over(text)
        if text:
            self._texts.append(text)


class Generation:
    """All completions of one request, as an asynchronous iterator over lists of deltas.

    With `stream` each list holds the new deltas; without, there is one list, after all completions
    have ended. Leaving the `with` block, or `close`, aborts the completions that are still open.
    """

    def __init__(self, *, stream: bool, on_close: Callable[[Generation], None]) -> None:
        """`on_close` is called at most once: when the consumer leaves before the end."""
        self.completions: list[Completion] = []  # by choice; each adds itself,
        self.num_open = 0  # and counts itself until it ends
        self.stream = stream
        self.closed = False
        # Awaited before an end is sent to the client: what was stored with it must be on disk.
        self.before_end: Callable[[], Awaitable[None]] | None = None
        # Awaited before an end is written: it gets what the answer tells besides.
        self.before_answer: Callable[[], Awaitable[None]] | None = None
        # Why not more of their prompts were cached, by the number of a request, if it asked.
        self.causes: dict[int, JsonObject] = {}
        self._on_close = on_close
        self._news = asyncio.Event()  # set: there may be new output, and the consumer looks
        self._news.set()  # an in-process engine may have answered before the first look
        # called with new output instead of waking a task
        self._push: Callable[[], bool] | None = None

    @property
    def ended(self) -> bool:
        """Whether every completion has ended; their deltas may still wait to be taken."""
        return self.num_open == 0

    @property
    def has_ends(self) -> bool:
        """Whether at least one completion has ended."""
        return self.num_open < len(self.completions)

    def take(self) -> list[Delta]:
        """The new deltas, without waiting."""
        deltas: list[Delta] = []
        if self.closed or (self.num_open and not self.stream):
            return deltas
        for completion in self.completions:
            delta = completion.take()
            if delta is not None:
                deltas.append(delta)
        return deltas

    def warn(self, texts: Iterable[str]) -> None:
        """Add warnings about the request, for the header of its answer."""
        for completion in self.completions:
            completion.warnings += [("warnings", text) for text in texts]

    def wake(self) -> None:
        """There may be new output: let the consumer look, if it can use it."""
        if self._push is not None:
            if self._push():
                return
            self._push = None
        if self.stream or not self.num_open:
            self._news.set()

    async def push_to(self, push: Callable[[], bool]) -> None:
        """Have `push` called for new output, instead of waking a task each time.

        Returns once `push` returns False: then this task must read again. `push` must not raise.
        """
        if not push():
            return
        self._push = push
        self._news.clear()  # `push` has seen all output so far
        try:
            await self._news.wait()
        finally:
            self._push = None

    def close(self) -> None:
        """The consumer leaves: abort the open completions, drop the rest. A second call does
        nothing."""
        if not self.closed:
            self.closed = True
            if self.num_open:
                self._on_close(self)
            self._news.set()
            # All of the answer is written, or nobody reads it.
            sent_s = time.perf_counter()
            answered_s = 0.0
            for completion in self.completions:
                answered_s = max(answered_s, completion.spec.front.ended_s)
            for completion in self.completions:
                completion.spec.front.answered_s = answered_s
                completion.spec.front.sent_s = sent_s

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[Delta]:
        while self._news.is_set() or (self.num_open and not self.closed):
            await self._news.wait()
            self._news.clear()  # cleared before `take`, so that no later output is missed
            deltas = self.take()
            if deltas:
                return deltas
        raise StopAsyncIteration

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
