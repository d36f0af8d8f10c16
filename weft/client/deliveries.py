"""The completions that have not ended, and what the engine's outputs do to them: each gets its
tokens, and ends once.

    StepOutput ─▶ push each token ─▶ process ends ─▶ wake the consumers
                       └─ a stop string, a slow reader, a fault: abort it in the engine

It knows neither how a request is checked nor the calls that control the engine (`client.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from weft.client.completion_metrics import CompletionRecorder
from weft.client.deferred import DeferredRequests, ShareLimits
from weft.client.engine_state import EngineState
from weft.client.generation import Completion, Generation
from weft.client.requests import batch_requests
from weft.messages.codec import ToEngine
from weft.messages.replies import WAIT_HEADER, Finish, StepOutput
from weft.messages.requests import Abort, GenerateRequest
from weft.observe.log import EventLog
from weft.observe.metrics import Metrics
from weft.observe.survivable import is_survivable

log = EventLog("client")


class OpenCompletions:
    """The completions that have not ended: by id, by name, and those whose requests still wait
    here.

    A request sends at most its share of the engine's rows, and of these only as many prompts as
    half a step computes. The other completions wait here in order, and follow when the earlier ones
    have their first tokens, or end. So a request with thousands of completions does not block all
    later requests in a queue ordered by arrival: they find half a step of its prompts before them.
    """

    def __init__(self) -> None:
        self.by_id: dict[int, Completion] = {}
        self._by_name: dict[str, set[int]] = {}  # of requests and of batches
        self.deferred: dict[Generation, DeferredRequests] = {}

    def add(self, completion: Completion) -> None:
        request = completion.spec.request
        self.by_id[request.id] = completion
        for name in {request.rid, request.group} - {""}:
            self._by_name.setdefault(name, set()).add(request.id)

    def remove(self, completion: Completion) -> None:
        """A completion has ended. The last one of a generation also drops its waiting requests."""
        request = completion.spec.request
        del self.by_id[request.id]
        for name in {request.rid, request.group} - {""}:
            ids = self._by_name[name]
            ids.discard(request.id)
            if not ids:
                del self._by_name[name]
        if self.deferred:
            self._note_end(completion)

    def _note_end(self, completion: Completion) -> None:
        generation = completion.generation
        deferred = self.deferred.get(generation)
        if deferred is None:
            return
        deferred.ended(completion.spec.request.id)
        if generation.ended:
            self.forget_deferred(generation)

    def named(self, name: str) -> list[Completion]:
        """The completions whose request or batch has exactly this name."""
        ids = self._by_name.get(name, ())
        return [self.by_id[id] for id in ids]

    @property
    def is_empty(self) -> bool:
        return not (self.by_id or self._by_name or self.deferred)

    # ---- requests beyond the share of one generation

    def defer(
        self, generation: Generation, requests: Sequence[GenerateRequest], limits: ShareLimits
    ) -> list[GenerateRequest]:
        """Keep the requests of a generation beyond its limits. Returns those that may be sent
        now."""
        deferred = DeferredRequests(requests, limits)
        sent = deferred.take()
        if deferred.num_waiting:
            self.deferred[generation] = deferred
        return sent

    def drop_deferred(self, completion: Completion) -> bool:
        """Drop the waiting request of `completion`. Returns whether it was still here."""
        deferred = self.deferred.get(completion.generation)
        return deferred is not None and deferred.drop(completion.spec.request.id)

    def forget_deferred(self, generation: Generation | None = None) -> None:
        """Drop the waiting requests of one generation, or of all."""
        if generation is None:
            self.deferred.clear()
        else:
            self.deferred.pop(generation, None)

    def note_first_token(self, completion: Completion) -> None:
        """The engine has computed the prompt of `completion`."""
        deferred = self.deferred.get(completion.generation)
        if deferred is not None:
            deferred.began(completion.spec.request.id)

    def take_deferred(self) -> list[GenerateRequest]:
        """The requests that may now be sent, because earlier ones have begun or ended."""
        following: list[GenerateRequest] = []
        for generation, deferred in list(self.deferred.items()):
            following += deferred.take()
            if not deferred.num_waiting:
                del self.deferred[generation]
        return following


class TokenDeliveries:
    """Gives outputs to the open completions of one engine, and ends them."""

    def __init__(
        self,
        send: Callable[[ToEngine], None],
        state: EngineState,
        recorder: CompletionRecorder,
        metrics: Metrics,
        max_pending_tokens: int,
        *,
        log_requests: bool,
    ) -> None:
        """`max_pending_tokens`: unread tokens that a consumer may have while its request
        continues."""
        self.open = OpenCompletions()
        self.log_requests = log_requests  # one line per finished request
        self.num_late_tokens = 0  # tokens for requests that had ended here
        self.send = send
        self._state = state
        self._recorder = recorder
        self._metrics = metrics
        self._max_pending_tokens = max_pending_tokens

    def send_requests(self, requests: Sequence[GenerateRequest]) -> None:
        """Send requests to the engine; their completions are entered."""
        started_s = time.perf_counter()
        for request in requests:
            self.open.by_id[request.id].spec.front.started_s = started_s
        if len(requests) == 1:
            self.send(requests[0])
        else:
            self.send(batch_requests(requests))

    def give_up(self, ids: Iterable[int], message: str) -> None:
        """Their outputs are lost: end these completions with an error."""
        for id in ids:
            completion = self.open.by_id.get(id)
            if completion is not None:
                self._fail(completion, message)
                completion.generation.wake()
        self.send_deferred()

    def step(self, step: StepOutput) -> None:
        """Give each token to its completion, then process ends, then wake the consumers."""
        by_id = self.open.by_id
        for warned in step.warnings:
            if warned.id in by_id:
                text = warned.text
                if warned.header == WAIT_HEADER:
                    text = self._recorder.delay.added_to(text)
                by_id[warned.id].warnings.append((warned.header, text))
        for output in step.aux:
            if output.id in by_id:
                by_id[output.id].push_aux_output(output)
        touched: set[Generation] = set()
        stopped = self._push_tokens(step, touched)
        for logprobs in step.logprobs:
            if logprobs.id in by_id:
                by_id[logprobs.id].push_logprobs(logprobs)
        for finish in step.finished:
            completion = by_id.get(finish.id)
            if completion is not None:
                self._end(completion, finish)
                touched.add(completion.generation)
        if stopped:
            self._abort_stopped(stopped)
        for generation in touched:
            generation.wake()
        if self.open.deferred:
            self.send_deferred()

    def send_deferred(self) -> None:
        """Send the requests that waited for earlier ones of theirs to begin or to end."""
        following = self.open.take_deferred()
        if following:
            self.send_requests(following)

    def _push_tokens(
        self,
        step: StepOutput,
        touched: set[Generation],
    ) -> list[Completion]:
        """Give each new token to its completion; return the completions that a stop string ended.

        This is the hot loop: it runs once per generated token. It adds generations with new output
        to `touched`.
        """
        now = time.perf_counter()
        find = self.open.by_id.get
        max_pending_tokens = self._max_pending_tokens
        stop_tokens: dict[int, int | str] = {}
        for finish in step.finished:
            if finish.matched is not None:
                stop_tokens[finish.id] = finish.matched
        # Lists: a loop in Python takes its numbers from them several times as fast as from arrays.
        ids = np.frombuffer(step.ids, dtype=np.int64).tolist()
        tokens = np.frombuffer(step.tokens, dtype=np.int32).tolist()
        stopped: list[Completion] = []
        for id, token in zip(ids, tokens, strict=True):
            completion = find(id)
            if completion is None or completion.stopped_by is not None:
                self.num_late_tokens += 1
                self._metrics.completions.abandoned["late"].inc()
                continue
            spec = completion.spec
            if completion.last_token_at:
                spec.latency.gaps.append(now - completion.last_token_at)
            else:
                completion.first_token_at = now
                spec.front.first_s = now
                if self.open.deferred:
                    self.open.note_first_token(completion)
                spec.latency.first_token.observe_one(now - spec.arrived_s, spec.request.rid)
            completion.last_token_at = now
            try:
                if stop_tokens and stop_tokens.get(id) == token:
                    completion.push_stop(token)
                else:
                    completion.push(token)
            except BaseException as exc:
                self._break_off(completion, exc)
            if completion.stopped_by is not None:
                stopped.append(completion)
            elif len(completion.pending_ids) > max_pending_tokens and completion.generation.stream:
                self._end_slow(completion)
            touched.add(completion.generation)
        self._metrics.completions.latencies.count_gaps()
        return stopped

    def _abort_stopped(self, stopped: Sequence[Completion]) -> None:
        """Abort in the engine the completions that a stop string ended and that are still open
        there."""
        ids: list[int] = []
        lens: list[int] = []
        for completion in stopped:
            if completion.end is None:
                ids.append(completion.spec.request.id)
                lens.append(completion.num_tokens)
        if ids:
            message = "a stop string was found"
            self.send(Abort(ids=tuple(ids), output_lens=tuple(lens), message=message))

    # ---- ends

    def abort(self, name: str) -> int:
        """Abort all requests whose rid or group is exactly `name`. Returns their number.

        Requests that the engine already has end when its reply arrives.
        """
        named = self.open.named(name)
        in_engine = [one for one in named if not self._abort_deferred(one)]
        if in_engine:
            ids = [one.spec.request.id for one in in_engine]
            self.send(Abort(ids=tuple(ids)))
        return len(named)

    def abort_all(self) -> int:
        """Abort all open completions. Returns their number."""
        num_open = len(self.open.by_id)
        for completion in list(self.open.by_id.values()):
            self._abort_deferred(completion)
        self.send(Abort(all=True))
        return num_open

    def end_all(self, message: str) -> None:
        """End all open completions at once with an error, without waiting for the engine."""
        self.open.forget_deferred()
        open_now = list(self.open.by_id.values())
        if open_now and self._state.lost is None:
            self.send(Abort(ids=tuple(self.open.by_id), message=message))
        for completion in open_now:
            id = completion.spec.request.id
            finish = Finish(id=id, reason="error", message=message, status=503)
            self._end(completion, finish)
            completion.generation.wake()

    def _abort_deferred(self, completion: Completion) -> bool:
        """Abort a completion that was not sent to the engine yet. Returns False for any other."""
        if not self.open.drop_deferred(completion):
            return False
        message = "the request was aborted"
        finish = Finish(id=completion.spec.request.id, reason="abort", message=message)
        self._end(completion, finish)
        completion.generation.wake()
        return True

    def _end_slow(self, completion: Completion) -> None:
        """Give up a completion whose client does not read, so that it costs no memory and no
        steps."""
        message = "the client does not read its answer"
        id = completion.spec.request.id
        self._metrics.refused("max_pending_tokens")
        self.send(Abort(ids=(id,), message=message))
        finish = Finish(id=id, reason="abort", message=message)
        self._end(completion, finish)

    def _end(self, completion: Completion, finish: Finish) -> None:
        try:
            end = completion.finish(finish, self._state.weight_version)
        except BaseException as exc:
            self._break_off(completion, exc)
            return
        self.open.remove(completion)
        self._recorder.record(completion, end, finish, is_logged=self.log_requests)

    def _break_off(self, completion: Completion, exc: BaseException) -> None:
        """End one completion with an error, because its output could not be processed."""
        if not is_survivable(exc):
            raise exc
        name = type(exc).__name__
        log.exception("output_failed", exc, rid=completion.spec.request.rid, error=name)
        self._fail(completion, f"the output could not be decoded ({name})")

    def _fail(self, completion: Completion, message: str) -> None:
        """End an open completion with an error, here and in the engine."""
        id = completion.spec.request.id
        finish = Finish(id=id, reason="error", message=message, status=500)
        self.send(Abort(ids=(id,), message=message))
        end = completion.break_off(finish, self._state.weight_version)
        self.open.remove(completion)
        self._recorder.record(completion, end, finish, is_logged=self.log_requests)

    def close(self, generation: Generation) -> None:
        """The consumer left before the end: abort the completions that are still open."""
        if self.open.deferred:
            self.open.forget_deferred(generation)
        left: list[int] = []
        message = "the client has disconnected"
        for completion in generation.completions:
            if completion.end is not None:
                continue
            id = completion.spec.request.id
            left.append(id)
            # A stream has delivered the tokens that were taken; any other has delivered none.
            lost = len(completion.pending_ids) if generation.stream else completion.num_tokens
            self._metrics.completions.abandoned["disconnect"].inc(lost)
            finish = Finish(id=id, reason="abort", message=message)
            end = completion.break_off(finish)
            self.open.remove(completion)
            self._recorder.record(completion, end, None, is_logged=self.log_requests)
        if left and self._state.lost is None:
            self.send(Abort(ids=tuple(left), message=message))
