"""A scheduler with an oracle for a model, the requests that were sent to it, and what came back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.scheduler.accounts import audit
from tests.scheduler.cache_check import CacheCheck
from tests.scheduler.draft_oracle import DraftOracle
from tests.scheduler.groups import find_states, find_transfers, find_windows
from tests.scheduler.media_oracle import MediaOracle, check_plan, with_content
from tests.scheduler.oracle_runner import (
    DeviceFailed,
    OracleRunner,
    OracleStep,
    adapter_weights,
    expected_logprobs,
    expected_output,
)
from tests.scheduler.state_oracle import StateOracle
from tests.scheduler.window_oracle import WindowOracle
from weft.client.aux_outputs import prompt_logprobs
from weft.config.media import MediaRules
from weft.engine.core import Loop
from weft.messages.media import MediaItem
from weft.messages.pins import PinMark
from weft.messages.replies import AuxPiece, Finish, StepOutput
from weft.messages.requests import Abort, GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.messages.sessions import SessionParams
from weft.plan.step import Plan, Result
from weft.scheduler.feature import Feature
from weft.scheduler.request import NO_ROW, Request, RequestState
from weft.scheduler.scheduler import Scheduler
from weft.scheduler.settings import SchedulerSettings
from weft.scheduler.times import NEVER

VOCAB = 300
EOS = 3


class World:
    memory_checked_every = 1  # steps

    def __init__(
        self,
        settings: SchedulerSettings,
        depth: int = 0,
        fail_steps: set[int] | None = None,
        features: tuple[Feature, ...] = (),
    ) -> None:
        self.settings = settings
        self.scheduler = Scheduler(settings, features)
        num_slots = settings.num_pages * settings.page_size
        self.runner = OracleRunner(
            num_slots,
            settings.max_running_requests,
            settings.context_length,
            VOCAB,
            fail_steps or set(),
        )
        if settings.windows is not None:
            self.runner.windows = WindowOracle(self.runner, settings.windows, settings.page_size)
        if settings.states is not None:
            self.runner.states = StateOracle(self.runner, settings.states)
        if settings.draft is not None:
            self.runner.draft = DraftOracle(self.runner, settings)
        if settings.media is not None:
            self._take_media(settings.media)
        self.time = 0.0
        self.tick_s = 1.0  # between two steps, besides what they cost
        self.failures: list[Exception] = []
        self.expected_failures: tuple[type[Exception], ...] = (DeviceFailed,)
        self.loop = Loop(
            self.scheduler,
            self.runner,
            clock=lambda: self.time,
            depth=depth,
            on_failure=self.failed,
            on_fault=self.failed,
        )
        self.sent: dict[int, GenerateRequest] = {}
        self.prompts: dict[int, list[int]] = {}  # whole ones, with the history of a session
        self.outputs: dict[int, list[int]] = {}
        self.finished: dict[int, Finish] = {}
        self.given: dict[int, list[AuxPiece]] = {}
        self.num_steps = 0
        self.cache_check = CacheCheck(self.runner)
        self.talked = Counter[str]()  # what happened to sessions

    def _take_media(self, rules: MediaRules) -> None:
        """The model has an encoder: every plan is looked at."""
        self.runner.media = MediaOracle(self.settings.encoder_cache_tokens)
        launch = self.runner.launch

        def checked(plan: Plan) -> OracleStep:
            check_plan(
                plan,
                self.scheduler.kv.columns.requests,  # type: ignore[arg-type]
                rotates=rules.has_three_positions,
                sees_both_ways=rules.sees_both_ways,
            )
            return launch(plan)

        self.runner.launch = checked  # type: ignore[method-assign]

    def failed(self, exc: Exception) -> None:
        """Something raised. What was not meant to must not be mended, but end the test."""
        self.failures.append(exc)
        if not isinstance(exc, self.expected_failures):
            raise exc

    def send(
        self,
        prompt: list[int],
        *,
        session: SessionParams | None = None,
        whole: list[int] | None = None,
        media: tuple[MediaItem, ...] = (),
        **sampling: object,
    ) -> int:
        """Send a request. `whole` is the prompt that it is to have, with the history of its
        `session`."""
        id = len(self.sent)
        self.prompts[id] = prompt if whole is None else whole
        if media:
            assert self.runner.media is not None
            self.runner.media.learn(media)
            self.prompts[id] = with_content(prompt, media)
        packed = np.array(prompt, dtype=np.int32).tobytes()
        salt, user, priority = (
            sampling.pop("salt", ""),
            sampling.pop("user", ""),
            sampling.pop("priority", 0),
        )
        tenant = str(sampling.pop("tenant", user))  # each user is a tenant, unless it is said
        timeout_ms = int(str(sampling.pop("timeout_ms", 0)))
        ttft_ms = int(str(sampling.pop("ttft_ms", 0)))
        background = bool(sampling.pop("background", False))
        pins = tuple(PinMark(**mark) for mark in sampling.pop("pins", ()))  # type: ignore[attr-defined]
        rid = str(sampling.pop("rid", f"r{id}"))
        adapter = str(sampling.pop("adapter", ""))
        may_pause = bool(sampling.pop("may_pause", False))
        prediction = np.array(sampling.pop("prediction", []), dtype=np.int32).tobytes()
        params = SamplingParams(**sampling)
        request = GenerateRequest(
            id=id,
            rid=rid,
            input_ids=packed,
            session=session,
            sampling=params,
            recompute_from=params.recompute_from,
            cache_salt=str(salt),
            tenant=tenant,
            user=str(user),
            priority=int(str(priority)),
            background=background,
            timeout_ms=timeout_ms,
            ttft_ms=ttft_ms,
            prediction=prediction,
            adapter=adapter,
            media=media,
            pins=pins,
            may_pause=may_pause,
        )
        self.sent[id] = request
        self.outputs[id] = []
        self.take_in(request)
        return id

    def let_steps_cost(self, seconds: Callable[[Plan], float]) -> None:
        """From now on the clock goes on by so much when a step runs."""
        execute = self.runner.execute

        def timed(plan: Plan) -> Result:
            result = execute(plan)
            self.time += seconds(plan)
            return result

        self.runner.execute = timed  # type: ignore[method-assign]

    def take_in(self, request: GenerateRequest) -> None:
        self.scheduler.add_request(request, self.time)

    def abort(self, message: Abort) -> None:
        self.scheduler.abort(message)

    def turn(self) -> list[StepOutput]:
        output = self.loop.step()
        return [] if output is None else [output]

    @property
    def has_work(self) -> bool:
        return self.loop.has_work

    def request(self, id: int) -> Request:
        return self.scheduler.requests[id]

    def step(self, check: bool = True) -> None:
        self.time += self.tick_s
        self.num_steps += 1
        for output in self.turn():
            self.receive(output)
        if check:
            self.check_step()
            if self.num_steps % self.memory_checked_every == 0:
                self.check_memory()

    def receive(self, output: StepOutput) -> None:
        ids = np.frombuffer(output.ids, dtype=np.int64).tolist()
        tokens = np.frombuffer(output.tokens, dtype=np.int32).tolist()
        for id, token in zip(ids, tokens, strict=True):
            assert id not in self.finished, "a token after the final word"
            self.outputs[id].append(token)
        for extra in output.aux:
            assert extra.id not in self.finished, "something is given after the final word"
            self.given.setdefault(extra.id, []).append(extra)
        for finish in output.finished:
            assert finish.id not in self.finished, "two final words"
            self.finished[finish.id] = finish
            self.check_time(finish.id)

    def check_time(self, id: int) -> None:
        """Every moment of a request that has ended was spent on something."""
        trace = self.scheduler.history.trace(id)
        if trace is not None and trace.finished_s != NEVER:
            assert min(trace.spent.seconds) >= -1e-9, trace.spent
            total_s = trace.finished_s - trace.waits[0].since_s
            assert math.isclose(sum(trace.spent.seconds), total_s, abs_tol=1e-6), trace.spent

    def run_dry(self, check: bool = True) -> None:
        idle = 0
        while self.has_work:
            before = (
                sum(map(len, self.outputs.values())),
                len(self.finished),
                self.runner.num_tokens_run,
            )
            self.step(check)
            after = (
                sum(map(len, self.outputs.values())),
                len(self.finished),
                self.runner.num_tokens_run,
            )
            idle = idle + 1 if before == after else 0
            assert idle < 5, "there is work, and nothing happens"

    def check(self) -> None:
        """The invariants 1 to 5 of docs/architecture.md."""
        self.check_step()
        self.check_memory()

    def check_step(self) -> None:
        """What of the invariants takes little time."""
        scheduler, kv = self.scheduler, self.scheduler.kv
        for fault in scheduler.outbox.take_faults():  # where no engine has taken them
            self.failed(fault)
        assert kv.accounts.imbalance == 0
        with_row = [r for r in scheduler.requests.values() if r.row != NO_ROW]
        assert kv.rows.num_used == len(with_row)
        assert len({r.row for r in with_row}) == len(with_row)
        waiting = list(scheduler.waiting_queue)
        assert len(waiting) + len(with_row) == len(scheduler.requests)
        assert all(r.state is RequestState.WAITING and not r.prefix.is_locked for r in waiting)
        open_prompts = [
            r for r in with_row if r.state is RequestState.PREFILLING and r.kv_len < r.fill_len
        ]
        assert open_prompts == (
            [scheduler.prefills.chunked_req] if scheduler.prefills.chunked_req else []
        )

    def check_memory(self) -> None:
        """Each page, each node of the cache and each token in it."""
        scheduler, kv = self.scheduler, self.scheduler.kv
        audit(scheduler)
        kv.cache.check()
        self.cache_check.check(kv.cache)
        if self.runner.windows is not None:
            self.runner.windows.check_tails(scheduler, self.cache_check)
        if self.runner.states is not None:
            self.runner.states.check_snapshots(scheduler, self.cache_check)
        self._check_prefix_index()
        if kv.cache.shares:
            self._check_locks()

    def _check_prefix_index(self) -> None:
        kv = self.scheduler.kv
        for line in self.scheduler.waiting_queue.lines:
            index = line.policy.prefix_index
            if index is None:
                continue
            for request in line:
                if (
                    not request.retractions and request.admitted_s < 0 and request.id >= 0
                ):  # below 0: of the engine
                    usable = request.packed[: request.reusable_len * 4]
                    assert index.length(request.spec.arrival_order) == kv.cache.peek(
                        request.cache_key(usable)
                    )

    def _check_locks(self) -> None:
        """Nodes are locked for those that are known to need them, and pinned for all pins."""
        kv = self.scheduler.kv
        needed = [
            one.prefix.handle for one in self.scheduler.requests.values() if one.row != NO_ROW
        ]
        needed += [pin.handle for pin in kv.pins.firm]
        needed += [lease.handle for lease in kv.leases]
        transfers = find_transfers(kv)
        if transfers is not None:
            needed += [transfer.handle for transfer in transfers.table.values()]
        locked = Counter[int]()
        for handle in needed:
            locked.update(map(id, _up_from(handle)))
        pinned = Counter[int]()
        for pin in kv.pins:
            pinned.update(map(id, _up_from(pin.handle)))
        nodes = list(kv.cache.tree.nodes())
        assert locked.keys() == {id(node) for node in nodes if node.locks}
        assert pinned == {id(node): node.pins for node in nodes if node.pins}

    def check_idle(self) -> None:
        kv = self.scheduler.kv
        self.check_memory()
        assert not self.scheduler.requests
        assert not len(self.scheduler.running_batch.rows)
        assert self.scheduler.prefills.chunked_req is None
        if not list(kv.pins.firm):
            assert kv.cache.protected_pages == 0
            assert self.scheduler.stats().kv_used == 0
        assert kv.rows.num_free == kv.rows.num_rows
        windows = find_windows(kv)
        if windows is not None:
            assert windows.available == windows.capacity
            assert not windows.pool.owned.any()
        states = find_states(kv)
        if states is not None:
            assert states.available == states.capacity
            assert states.num_rows == 0
            assert states.num_kept == 0
        assert set(self.finished) == set(self.sent)

    def check_outputs(self) -> None:
        for id, request in self.sent.items():
            finish = self.finished[id]
            prompt = self.prompts[id]
            max_new = request.sampling.max_new_tokens
            if max_new is None:
                max_new = self.scheduler.limits.max_len - len(prompt)
                if self.scheduler.kv.allocator.quarantined:
                    max_new = max(max_new, len(self.outputs[id]))  # from before memory was lost
            eos = set(request.sampling.stop_token_ids) | (
                set() if request.sampling.ignore_eos else {EOS}
            )
            weights = adapter_weights(request.adapter)
            expected = expected_output(prompt, max_new, VOCAB, eos, weights)
            output = self.outputs[id]
            assert output == expected[: len(output)], f"request {id} differs from a run on its own"
            if finish.reason == "length" and self.scheduler.kv.allocator.quarantined:
                # Where memory was lost, a request may end at the longest length that was left.
                least = self.scheduler.limits.max_len - len(prompt)
                assert len(output) >= min(least, len(expected))
                expected = expected[: len(output)]
            if finish.reason in ("stop", "length"):
                assert output == expected
                assert finish.reason == ("stop" if expected and expected[-1] in eos else "length")
                assert finish.completion_tokens == len(output)
                self.check_prompt_logprobs(id)

    def check_prompt_logprobs(self, id: int) -> None:
        """Each was given once, in order, and is that of the tokens before it."""
        params = self.sent[id].sampling
        if params.prompt_logprobs is not None:
            start, told = params.prompt_logprobs_start, prompt_logprobs(self.given.get(id, []))
            assert [one.token for one in told] == self.prompts[id][start:]
            weights = adapter_weights(self.sent[id].adapter)
            expected = expected_logprobs(self.prompts[id], start, weights)
            assert [one.logprob for one in told] == expected


def _up_from(node: Any) -> Iterator[Any]:
    """A node of the cache and those above it, without the root; None has none."""
    while node is not None and node.key:
        yield node
        node = node.parent
