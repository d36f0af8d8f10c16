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
    num_embed_bytes: int = 0  # of input embeddings that the engine keeps for it
    stream_interval: int = 1  # tokens in one delta, except the first
    started_s: float = field(default_factory=time.perf_counter)
    arrived_s: float = field(default_factory=time.perf_counter)  # when the HTTP request came
    traceparent: str = ""


class Completion:
    """One completion: the text of its tokens so far, and the part that was not taken yet.

        push ──▶ detokenizer ──▶ matcher ──▶ texts ──▶ take ──▶ Delta

    `spec` is fixed; everything else is state, which the client alone writes.
    """

    __slots__ = (
        "_detokenizer",
        "_end_taken",
        "_logprobs",
        "_matcher",
        "_texts",
        "_token_ids",
        "aux_outputs",
        "end",
        "first_token_at",
        "generation",
        "last_token_at",
        "num_tokens",
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
        self.first_token_at = 0.0
        self.last_token_at = 0.0
        self.warnings: list[str] = []  # complete before the first token
        self.aux_outputs: list[AuxPiece] = []
        # A stop string ended it here; the engine's final word is still to come.
        self.stopped_by: str | None = None
        self.end: CompletionEnd | None = None
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._end_taken = False
        generation.completions.append(self)

    @property
    def num_pending(self) -> int:
        """Tokens that the consumer has not taken."""
        return len(self._token_ids)

    @property
    def has_news(self) -> bool:
        """Whether `take` has enough to say. The first token and the end wait for nothing."""
        if self.end is not None and not self._end_taken:
            return True
        if not self._texts and not self._logprobs:
            return False
        num_pending = len(self._token_ids)
        return num_pending >= self.spec.stream_interval or num_pending == self.num_tokens

    def push(self, token: int) -> None:
        """Take a token of the output."""
        self._token_ids.append(token)
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
            self._token_ids.append(token)
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
        if len(self._logprobs) < len(self._token_ids):
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
        )
        self.generation.num_ended += 1
        return self.end

    def take(self) -> Delta:
        """Everything new. Call it only if `has_news`."""
        texts = self._texts
        token_ids = self._token_ids
        logprobs = self._logprobs
        self._texts = []
        self._token_ids = []
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
        """`on_close` is called once, when the consumer leaves."""
        self.completions: list[Completion] = []  # by choice; each adds itself,
        self.num_ended = 0  # and counts itself when it ends
        self.stream = stream
        self.closed = False
        self._on_close = on_close
        self._waiter: asyncio.Future[None] | None = None
        self._push: Callable[[], bool] | None = None  # takes what is new instead of a task
        self._looks = True  # whether something may be new

    @property
    def ended(self) -> bool:
        """Whether every completion has ended, though perhaps not been taken."""
        return self.num_ended == len(self.completions)

    @property
    def has_ends(self) -> bool:
        """Whether a completion has ended."""
        return self.num_ended > 0

    def take(self) -> list[Delta]:
        """What is new now, without waiting."""
        if self.closed or not (self.stream or self.ended):
            return []
        return [completion.take() for completion in self.completions if completion.has_news]

    def wake(self) -> None:
        """Something may be new: let the consumer look."""
        if self._push is not None:
            if self._push():
                return
            self._push = None
        self._looks = True
        if self._waiter is not None and (self.stream or self.ended):
            self._end_wait()

    async def push_to(self, push: Callable[[], bool]) -> None:
        """Have `push` called where something new comes, instead of waking a task for it.

        Returns once `push` says False: then it is this task's turn again. `push` must not raise.
        """
        if not push():
            return
        self._push = push
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._push = None
            self._waiter = None

    def close(self) -> None:
        """The consumer leaves: abort what is open, forget the rest. A second call does nothing."""
        if not self.closed:
            self.closed = True
            self._on_close(self)
            if self._waiter is not None:
                self._end_wait()

    def _end_wait(self) -> None:
        assert self._waiter is not None
        if not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[Delta]:
        while True:
            if self._looks:
                self._looks = False
                deltas = self.take()
                if deltas:
                    return deltas
            if self.closed or self.ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
