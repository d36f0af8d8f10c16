"""The completions of one request while they grow: token ids in, `Delta`s of text out.

A consumer holds a `Generation` and iterates over everything that is new since it last looked, so
a slow consumer gets fewer and larger deltas. The client feeds it. This module knows nothing of
sockets, HTTP or the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.messages.pins import PinMark
from weft.messages.replies import AuxPiece, Finish, FinishReason, HiddenStatesPiece, TokenLogprobs
from weft.messages.sampling import SamplingParams
from weft.messages.weights import FIRST_VERSION
from weft.observe.metrics import Latency
from weft.text.detokenizer import Detokenizer
from weft.text.stop.stopping import StopMatcher


class CompletionEnd(NamedTuple):
    """How a completion ended. A `status` from 400 up means that it failed; `message` says why."""

    reason: FinishReason
    matched: str | int | None  # the stop string or stop token
    message: str
    status: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    queue_s: float
    e2e_s: float
    weight_version: str = FIRST_VERSION  # of the weights that computed its last token
    retry_after_s: int = 0  # when there may be room again; 0: unknown
    # Of the client's prediction: drafts that came out the same, and others.
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0

    @property
    def failed(self) -> bool:
        return self.status >= 400


class Delta(NamedTuple):
    """What is new of one completion.

    Text may lag behind the ids: half characters and possible beginnings of stop strings wait.
    """

    choice: int  # of the completion: prompt number * n + number among the n
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]  # one for each of `token_ids`, if the request asked for them
    num_tokens: int  # generated so far, with these
    end: CompletionEnd | None  # set in the last delta


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionSpec:
    """What is known of a completion before its first token. Times read `time.perf_counter`."""

    id: int  # of its request to the engine
    choice: int
    rid: str
    group: str = ""
    prompt_len: int
    params: SamplingParams  # as the user gave them
    latency: Latency  # where its times are recorded
    tenant: str = ""  # whose savings it counts among
    pins: tuple[PinMark, ...] = ()  # beginnings of the prompt that stay cached
    tells_cache: bool = False  # where cached tokens were is told with the end
    num_embed_bytes: int = 0  # of input embeddings that the engine keeps for it
    stream_interval: int = 1  # tokens in one delta, except the first
    started_s: float = field(default_factory=time.perf_counter)
    arrived_s: float = field(default_factory=time.perf_counter)  # when the HTTP request came
    traceparent: str = ""


class Completion:
    """One completion: the text of its tokens so far, and the part that was not taken yet.

        push ──▶ detokenizer ──▶ matcher ──▶ texts ──▶ take ──▶ Delta

    `spec` is fixed; everything else is state, which the client alone writes. It counts itself
    among the open completions of its generation.
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
        # Headers and texts; complete before the first token.
        self.warnings: list[tuple[str, str]] = []
        self.aux_outputs: list[AuxPiece] = []
        # A stop string ended it here; the engine's final word is still to come.
        self.stopped_by: str | None = None
        self.end: CompletionEnd | None = None
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
        """Take the stop token that ended it: one of its ids, text only if the request wants it."""
        if self.spec.params.include_stop:
            self.push(token)
        else:
            self.pending_ids.append(token)
            self.num_tokens += 1

    def push_aux_output(self, output: AuxPiece) -> None:
        """Keep an auxiliary output; of hidden states only the latest, if no more are wanted."""
        if self.stopped_by is not None:
            return  # it belongs to tokens behind the end
        only_last = self.spec.params.hidden_states == "last"
        if only_last and isinstance(output, HiddenStatesPiece):
            kept = [one for one in self.aux_outputs if not isinstance(one, HiddenStatesPiece)]
            self.aux_outputs[:] = kept
        self.aux_outputs.append(output)

    def push_logprobs(self, logprobs: TokenLogprobs) -> None:
        # Those of tokens behind a stop string have no token here.
        if len(self._logprobs) < len(self.pending_ids):
            self._logprobs.append(logprobs)

    def finish(self, finish: Finish, weight_version: str = FIRST_VERSION) -> CompletionEnd:
        """Take the engine's final word. A stop string that was found here outweighs it."""
        if self.stopped_by is None:
            text = self._detokenizer.flush()
            if text:
                self._match(text)
        if self._matcher is not None and self.stopped_by is None:
            text = self._matcher.flush()
            # An error stays an error, whatever its text ends with.
            if finish.reason in ("stop", "length"):
                self.stopped_by = self._matcher.matched
            if text:
                self._texts.append(text)
        return self.break_off(finish, weight_version)

    def break_off(self, finish: Finish, weight_version: str = FIRST_VERSION) -> CompletionEnd:
        """End here and now, as `finish` says, without the text that is still held back."""
        reason = finish.reason
        matched: str | int | None = finish.matched
        message = finish.message
        status = finish.status
        if self.stopped_by is not None:
            reason = "stop"
            matched = self.stopped_by
            message = ""
            status = 200
        self.end = CompletionEnd(
            reason=reason,
            matched=matched,
            message=message,
            status=status,
            # The engine counts the history of a session, too.
            prompt_tokens=finish.prompt_tokens or self.spec.prompt_len,
            completion_tokens=self.num_tokens,
            cached_tokens=finish.cached_tokens,
            queue_s=finish.queue_s,
            e2e_s=time.perf_counter() - self.spec.started_s,
            weight_version=weight_version,
            retry_after_s=finish.retry_after_s,
            accepted_prediction_tokens=finish.accepted_prediction_tokens,
            rejected_prediction_tokens=finish.rejected_prediction_tokens,
        )
        self.generation.num_open -= 1
        return self.end

    def take(self) -> Delta | None:
        """Everything new; None if it is not enough for a delta.

        The first token and the end wait for nothing.
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
        # By position: names cost a tenth of the time of a token here.
        return Delta(self.spec.choice, text, token_ids, logprobs, self.num_tokens, self.end)

    def _match(self, text: str) -> None:
        """Add text, up to a stop string if one is looked for yet."""
        matcher = self._matcher
        if matcher is not None and self.num_tokens > self.spec.params.min_new_tokens:
            text = matcher.push(text)
            self.stopped_by = matcher.matched
        if text:
            self._texts.append(text)


class Generation:
    """All completions of one request, as an asynchronous iterator over lists of deltas.

    With `stream` each list holds what is new; without, there is one list, when all completions
    have ended. Leaving the `with` block, or `close`, aborts what has not ended yet.
    """

    def __init__(self, *, stream: bool, on_close: Callable[[Generation], None]) -> None:
        """`on_close` is called at most once: when the consumer leaves before the end."""
        self.completions: list[Completion] = []  # by choice; each adds itself,
        self.num_open = 0  # and counts itself until it ends
        self.stream = stream
        self.closed = False
        self._on_close = on_close
        self._news = asyncio.Event()  # something may be new: the consumer shall look
        self._news.set()  # an in-process engine may have answered before the first look
        self._push: Callable[[], bool] | None = None  # takes what is new instead of a task

    @property
    def ended(self) -> bool:
        """Whether every completion has ended, though perhaps not been taken."""
        return self.num_open == 0

    @property
    def has_ends(self) -> bool:
        """Whether a completion has ended."""
        return self.num_open < len(self.completions)

    def take(self) -> list[Delta]:
        """What is new now, without waiting."""
        deltas: list[Delta] = []
        if self.closed or (self.num_open and not self.stream):
            return deltas
        for completion in self.completions:
            delta = completion.take()
            if delta is not None:
                deltas.append(delta)
        return deltas

    def wake(self) -> None:
        """Something may be new: let the consumer look, if that is of use."""
        if self._push is not None:
            if self._push():
                return
            self._push = None
        if self.stream or not self.num_open:
            self._news.set()

    async def push_to(self, push: Callable[[], bool]) -> None:
        """Have `push` called where something new comes, instead of waking a task for it.

        Returns once `push` says False: then it is this task's turn again. `push` must not raise.
        """
        if not push():
            return
        self._push = push
        self._news.clear()  # `push` has seen it
        try:
            await self._news.wait()
        finally:
            self._push = None

    def close(self) -> None:
        """The consumer leaves: abort what is open, forget the rest. A second call does nothing."""
        if not self.closed:
            self.closed = True
            if self.num_open:
                self._on_close(self)
            self._news.set()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[Delta]:
        while self._news.is_set() or (self.num_open and not self.closed):
            await self._news.wait()
            self._news.clear()  # before the look: what comes from now on is not missed
            deltas = self.take()
            if deltas:
                return deltas
        raise StopAsyncIteration

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
