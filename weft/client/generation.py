"""The completions of one request while they grow: token ids in, `Delta`s of text out.

A `Generation` is what a consumer holds: it iterates over everything that is new since it last looked, so a slow
consumer gets fewer and larger deltas. The client feeds it; it knows nothing of sockets, HTTP or the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from weft.messages.replies import Extra, Finish, FinishReason, HiddenStates, TokenLogprobs
from weft.messages.sampling import SamplingParams
from weft.messages.weights import FIRST_VERSION
from weft.observe.metrics import Latency
from weft.text.detokenizer import Detokenizer
from weft.text.stop.stopping import StopMatcher


class CompletionEnd(NamedTuple):
    """How a completion ended. With a `status` from 400 up it failed, and `message` says why."""

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
    retry_after_s: int = 0  # when there may be room again; 0: it is not known

    @property
    def failed(self) -> bool:
        return self.status >= 400


class Delta(NamedTuple):
    """What is new of one completion. Text may lag behind the ids: half characters and possible stop strings wait."""

    choice: int  # of the completion: prompt number * n + number among the n
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]  # one for each of `token_ids`, if asked for
    num_tokens: int  # generated so far, with these
    end: CompletionEnd | None  # set in the last delta


class Completion:
    """One completion: the text made of its tokens so far, and what of it the consumer has not taken yet."""

    __slots__ = (
        *("id", "choice", "rid", "group", "prompt_len", "began", "generation"),
        *("num_tokens", "first_token_at", "last_token_at", "stopped_by", "end"),
        *(
            "params",
            "arrived_s",
            "traceparent",
            "latency",
            "warnings",
            "given",
            "num_vector_bytes",
            "stream_interval",
        ),
        *("_detokenizer", "_matcher", "_num_unchecked", "_show_stop"),
        *("_texts", "_token_ids", "_logprobs", "_end_taken"),
    )

    def __init__(
        self,
        *,
        id: int,
        choice: int,
        rid: str,
        group: str = "",
        prompt_len: int,
        params: SamplingParams,
        detokenizer: Detokenizer,
        matcher: StopMatcher | None,
    ) -> None:
        self.id = id
        self.choice = choice
        self.rid = rid
        self.group = group
        self.prompt_len = prompt_len
        self.num_tokens = 0
        self.began = time.perf_counter()
        self.first_token_at = self.last_token_at = 0.0
        self.params = params
        self.arrived_s = self.began  # when the HTTP request came, if it was one
        self.traceparent = ""
        self.latency: Latency
        self.warnings: list[str] = []  # there before the first token
        self.given: list[Extra] = []  # what it was given besides tokens
        self.num_vector_bytes = 0  # that the engine keeps for it
        self.stream_interval = 1  # tokens that are told together
        self.stopped_by: str | None = (
            None  # the stop string that ended it here; the engine's last word is awaited
        )
        self.end: CompletionEnd | None = None
        self.generation: Generation
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._num_unchecked = params.min_new_tokens  # tokens in which no stop string is looked for
        self._show_stop = params.include_stop
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._end_taken = False

    @property
    def ended(self) -> CompletionEnd:
        """How it has ended."""
        assert self.end is not None, "the completion has not ended"
        return self.end

    @property
    def num_pending(self) -> int:
        """Tokens that the consumer has not taken."""
        return len(self._token_ids)

    @property
    def has_news(self) -> bool:
        """Whether there is something to be told, and enough of it: the first token and the end do not wait for more."""
        if self.end is not None and not self._end_taken:
            return True
        num = len(self._token_ids)
        return (num >= self.stream_interval or num == self.num_tokens) and bool(
            self._texts or self._logprobs
        )

    def push(self, token: int) -> None:
        self._token_ids.append(token)
        self.num_tokens += 1
        text = self._detokenizer.push(token)
        if text:
            if self._matcher is None:
                self._texts.append(text)
            else:
                self._add(text)

    def push_stop(self, token: int) -> None:
        """The stop token that ended the completion: part of its ids, of its text only if asked for."""
        if self._show_stop:
            self.push(token)
        else:
            self._token_ids.append(token)
            self.num_tokens += 1

    def give(self, extra: Extra) -> None:
        """Keep what it is given besides tokens; of hidden states only the latest, if no more are wanted."""
        if self.stopped_by is not None:
            return  # it is about what came behind the end
        if isinstance(extra, HiddenStates) and self.params.hidden_states == "last":
            self.given[:] = [one for one in self.given if not isinstance(one, HiddenStates)]
        self.given.append(extra)

    def push_logprobs(self, logprobs: TokenLogprobs) -> None:
        if len(self._logprobs) < len(self._token_ids):
            self._logprobs.append(logprobs)

    def finish(self, finish: Finish, weight_version: str = FIRST_VERSION) -> None:
        """The engine's last word. A stop string that was found here before outweighs it."""
        if self.stopped_by is None:
            text = self._detokenizer.flush()
            if text:
                self._add(text)
        if self._matcher is not None and self.stopped_by is None:
            text = self._matcher.flush()
            if finish.reason in (
                "stop",
                "length",
            ):  # an error stays one, whatever its text ends with
                self.stopped_by = self._matcher.matched
            if text:
                self._texts.append(text)
        self._end(finish, weight_version)

    def break_off(self, finish: Finish, weight_version: str = FIRST_VERSION) -> None:
        """End here and now, as `finish` says: what its text lacks is not asked for."""
        self._end(finish, weight_version)

    def _end(self, finish: Finish, weight_version: str) -> None:
        stopped = self.stopped_by is not None
        self.end = CompletionEnd(
            reason="stop" if stopped else finish.reason,
            matched=self.stopped_by if stopped else finish.matched,
            message="" if stopped else finish.message,
            status=200 if stopped else finish.status,
            prompt_tokens=finish.prompt_tokens
            or self.prompt_len,  # with the history of its session
            completion_tokens=self.num_tokens,
            cached_tokens=finish.cached_tokens,
            queue_s=finish.queue_s,
            e2e_s=time.perf_counter() - self.began,
            weight_version=weight_version,
            retry_after_s=finish.retry_after_s,
        )

    def take(self) -> Delta:
        """Everything new. Call only if `has_news`."""
        texts, token_ids, logprobs = self._texts, self._token_ids, self._logprobs
        self._texts, self._token_ids, self._logprobs = [], [], []
        self._end_taken = self.end is not None
        text = texts[0] if len(texts) == 1 else "".join(texts)
        return Delta(self.choice, text, token_ids, logprobs, self.num_tokens, self.end)

    def _add(self, text: str) -> None:
        if self._matcher is not None and self.num_tokens > self._num_unchecked:
            text = self._matcher.push(text)
            self.stopped_by = self._matcher.matched
        if text:
            self._texts.append(text)


class Generation:
    """All completions of one request, as an asynchronous iterator over lists of deltas.

    With `stream` each list holds what is new; without, there is one list, when all completions have ended. Leaving the
    `with` block, or `close`, ends in the engine what has not ended yet.
    """

    def __init__(
        self, completions: list[Completion], *, stream: bool, on_close: Callable[[Generation], None]
    ) -> None:
        self.completions = completions
        self.stream = stream
        self.closed = False
        self._on_close = on_close
        self._waiter: asyncio.Future[None] | None = None
        self._push: Callable[[], bool] | None = None  # takes what is new instead of a task
        self._looks = True  # whether something may be new
        for completion in completions:
            completion.generation = self

    @property
    def ended(self) -> bool:
        """Whether every completion has ended, though perhaps not been taken."""
        return None not in [
            completion.end for completion in self.completions
        ]  # asked for each token: no generator

    @property
    def has_ends(self) -> bool:
        """Whether a completion has ended."""
        return any(
            [completion.end is not None for completion in self.completions]
        )  # for each token: no generator

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
        if self._waiter is not None and not self._waiter.done() and (self.stream or self.ended):
            self._waiter.set_result(None)

    async def push_to(self, push: Callable[[], bool]) -> None:
        """Let `push` be called where something new comes, instead of waking a task for it, until it says False: then it
        is this task's turn again. It must not raise."""
        if not push():
            return
        self._push, self._waiter = push, asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._push = self._waiter = None

    def close(self) -> None:
        """The consumer is gone: abort what is open, forget the rest. May be called at any time, more than once."""
        if not self.closed:
            self.closed = True
            self._on_close(self)
            if self._waiter is not None and not self._waiter.done():
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
