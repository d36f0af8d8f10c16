"""A runner without a model whose output depends on every token that came before, as a model's does.

Each slot stores a hash of the tokens up to its own; the next token is a function of the hash of the
last one. The runner reads that hash through its own row table, as attention reads K and V: if a
page was shared, freed, evicted or re-pointed wrongly, the outputs differ from `expected_output`,
which looks only at the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tests.scheduler.draft_oracle import DraftOracle
from tests.scheduler.media_oracle import MediaOracle
from tests.scheduler.state_oracle import StateOracle
from tests.scheduler.window_oracle import WindowOracle
from weft.arrays import IntArray, or_zeros
from weft.plan.device import (
    DeviceReply,
    DeviceRequest,
    LoadAdapter,
    Pending,
    ReleaseMemory,
    ResumeMemory,
    UnloadAdapter,
    UpdateFromDisk,
)
from weft.plan.outputs import AuxOutput, PromptLogprobs, PromptLogprobsRequest
from weft.plan.step import BASE, LAST_SAMPLED, ForwardMode, LayerSpan, Plan, Result, find

MASK = (1 << 61) - 1
IN_PART = -3  # the state of a token some of whose layers are computed: nobody may read it
POISONED = -2  # the state of a token whose K and V are not finite, and of all that see it
NO_SLOTS = np.empty(0, dtype=np.int32)


def extend_hash(before: int, token: int, weights: int = 0) -> int:
    return (before * 1_000_003 + token * 7_919 + 12_345 + weights) & MASK


def next_token(state: int, vocab_size: int) -> int:
    return (state ^ (state >> 17)) % vocab_size


def adapter_weights(uid: str) -> int:
    """What an adapter adds to the weights."""
    return 1_000 + int(uid, 16) % 1_000_003 if uid else 0


def logprob(state: int, token: int) -> float:
    """Of a token behind what leads to this state."""
    return -float((state ^ token) % 9_973)


def expected_logprobs(prompt: list[int], start: int, weights: int = 0) -> list[float | None]:
    """Of the tokens of a prompt from `start` on."""
    states = [0]
    for token in prompt:
        states.append(extend_hash(states[-1], token, weights))
    told = [logprob(states[i], prompt[i]) for i in range(start + 1, len(prompt))]
    return [None, *told] if start < len(prompt) else []


def expected_output(
    prompt: list[int], max_new: int, vocab_size: int, eos: set[int], weights: int = 0
) -> list[int]:
    state = 0
    output = []
    for token in prompt:
        state = extend_hash(state, token, weights)
    while len(output) < max_new:
        token = next_token(state, vocab_size)
        output.append(token)
        if token in eos:
            break
        state = extend_hash(state, token, weights)
    return output


class DeviceFailed(RuntimeError):
    """A step was to fail."""


@dataclass(eq=False)
class OracleStep:
    runner: OracleRunner
    plan: Plan
    fails: bool = False

    def result(self) -> Result:
        self.runner.pending.remove(self)
        if self.fails:
            self.runner.groups_in_doubt()
            raise DeviceFailed("the device failed")
        return self.runner.execute(self.plan)

    def done(self) -> bool:
        return True


class OracleWork:
    """Is carried out when its end is seen."""

    def __init__(self, runner: OracleRunner, request: DeviceRequest, patience: int) -> None:
        self._runner = runner
        self._request = request
        self._patience = patience

    def done(self) -> bool:
        self._patience -= 1
        return self._patience < 0

    def result(self) -> DeviceReply:
        return self._runner.carry_out(self._request)


@dataclass
class OracleRunner:
    """Executes lazily, when the result is asked for: the latest that a device could."""

    num_slots: int
    num_rows: int
    max_len: int
    vocab_size: int
    fail_steps: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.state = np.zeros(
            self.num_slots, dtype=np.int64
        )  # hash of the sequence that ends in this slot
        self.table = np.zeros((self.num_rows, self.max_len), dtype=np.int32)
        self.last = np.zeros(self.num_rows, dtype=np.int32)
        # What each row sampled in its last step, and how many drafts of it were wrong.
        self.runs: dict[int, list[int]] = {}
        self.num_lost: dict[int, int] = {}
        self.num_unsettled = 0  # rows of steps that began with a run
        self.num_tokens_run = 0
        self.pending: list[OracleStep] = []  # launched, and not run yet
        self.poison = 0  # one of so many tokens that are sampled from is not finite; 0: none
        self.weights = 0  # other ones give other outputs
        # What adapters add to the weights, by place and by row of the prefill that is open by
        # layers.
        self.adapters: dict[int, int] = {}
        self.carried_adapters: dict[int, int] = {}
        self.patience = 0  # how often work is asked for in vain whether it is done
        self._released: set[str] = set()
        # Row, position and slot of each token of the prefill that is open by layers, and its layers
        # so far.
        self.carried: list[tuple[int, int, int]] = []
        self.num_layers_run = 0
        self.num_pieces = 0
        self.in_doubt_until = -1  # the last step that may read what a failed one did not write
        # What it has of layers with windows, if these have slots of their own.
        self.windows: WindowOracle | None = None
        self.states: StateOracle | None = None  # of layers that keep a state
        self.draft: DraftOracle | None = None  # a model that guesses beside it
        self.media: MediaOracle | None = None  # an encoder of pictures

    def launch(self, plan: Plan) -> OracleStep:
        step = OracleStep(self, plan, fails=plan.step in self.fail_steps)
        self.pending.append(step)
        return step

    def groups_in_doubt(self) -> None:
        """A step has not been run: those that are launched already may read what it did not
        write."""
        if not self.pending:
            return
        self.in_doubt_until = self.pending[-1].plan.step
        for group in (self.windows, self.states):
            if group is not None:
                group.in_doubt_until = self.in_doubt_until

    def pending_slots(self) -> IntArray:
        """The slots that launched steps are still to write."""
        written = [NO_SLOTS]
        for step in self.pending:
            written.append(step.plan.slots)
            if step.plan.copies is not None:
                written.append(step.plan.copies.targets)
        return np.concatenate(written)

    def control(self, request: DeviceRequest) -> Pending:
        return OracleWork(self, request, self.patience)

    def carry_out(self, request: DeviceRequest) -> DeviceReply:
        """Weights are named by a number; memory that is released is forgotten."""
        ok = True
        changed = False
        match request:
            case UpdateFromDisk(folder):
                ok = changed = folder.isdecimal()
                self.weights = int(folder) if ok else self.weights
            case ReleaseMemory(tags):
                self._released |= set(tags)
                self.state[:] = -1
            case ResumeMemory(tags):
                self._released -= set(tags)
            case LoadAdapter(place, path, uid):
                ok = path != "wrong"
                if ok:
                    self.adapters[place] = adapter_weights(uid)
            case UnloadAdapter(place):
                del self.adapters[place]
        message = "" if ok else "there are no such weights"
        return DeviceReply(
            ok=ok, message=message, kv_is_stale=changed, released=tuple(sorted(self._released))
        )

    def execute(self, plan: Plan) -> Result:
        assert not self._released, "a step runs without its memory"
        of_rows = self._weights_of(plan)
        self._follow_table(plan)
        if plan.copies is not None:
            assert len(set(plan.copies.targets.tolist())) == len(plan.copies.targets)
            self.state[plan.copies.targets] = self.state[plan.copies.sources]
        if plan.drafting is not None:
            assert self.draft is not None, "there is no draft model"
            return self.draft.execute(plan, plan.drafting)
        assert len(set(plan.slots.tolist())) == len(plan.slots), (
            "two tokens of one step share a slot"
        )
        given = plan.tokens
        if self.media is not None:
            given = self.media.follow(plan, is_in_doubt=plan.step <= self.in_doubt_until)
        if plan.layers is not None and not self._is_last_piece(plan, plan.layers):
            self.state[plan.slots] = IN_PART
            if self.windows is not None:
                self.windows.follow(plan)
            return Result(
                tokens=NO_SLOTS, not_encoded=self._not_encoded(), encoded=self._encoded(plan)
            )
        tokens = []
        at = 0
        states = []
        invalid = []
        unsettled = or_zeros(plan.unsettled, len(plan.rows))
        for row, start, length, num_sampled, num_open in zip(
            plan.rows.tolist(),
            plan.starts.tolist(),
            plan.lens.tolist(),
            plan.num_sampled.tolist(),
            unsettled.tolist(),
            strict=True,
        ):
            assert num_sampled + num_open <= length
            self.num_unsettled += num_open > 0
            num_lost = self.num_lost[row] if num_open else 0
            first = at + length - num_sampled - num_lost
            found: list[int] = []
            state = int(self.state[self.table[row, start - 1]]) if start else 0
            assert state != IN_PART or plan.step <= self.in_doubt_until, (
                "a token is read before all of its layers are computed"
            )
            for i in range(at, at + length):
                token = int(given[i])
                if num_open and token < LAST_SAMPLED:  # else it is of a picture
                    assert num_open >= LAST_SAMPLED - token
                    run = self.runs[row]
                    # Where the step before has failed, its run is not there.
                    is_lost = LAST_SAMPLED - token >= len(run) and plan.step <= self.in_doubt_until
                    token = LAST_SAMPLED if is_lost else run[LAST_SAMPLED - token]
                token = int(self.last[row]) if token == LAST_SAMPLED else token
                state = POISONED if state == POISONED else extend_hash(state, token, of_rows[row])
                kept = state
                is_bad = bool(self.poison) and (state == POISONED or state % self.poison == 0)
                if num_sampled and (i == first or i > at + length - num_sampled):
                    invalid.append(is_bad)
                    found.append(next_token(state, self.vocab_size))
                    kept = POISONED if is_bad else state
                states.append((int(plan.slots[i]), kept))
            drafts = given[at + length - num_sampled + 1 : at + length].tolist()
            at += length
            tokens += found
            assert len(found) == num_sampled
            if num_sampled:
                self.last[row] = found[0]
                self.runs[row] = found
                num_right = 0
                while not num_lost and num_right < len(drafts):
                    if found[num_right] != drafts[num_right]:
                        break
                    num_right += 1
                self.num_lost[row] = len(drafts) - num_right
        for (
            slot,
            state,
        ) in (
            states
        ):  # written after all was read: no request may read what another writes in this step
            self.state[slot] = state
        if self.windows is not None:
            self.windows.follow(plan)
        if self.states is not None:
            self.states.follow(plan)
        self.num_tokens_run += plan.num_tokens
        assert len(plan.sampling.seeds) == len(tokens)
        return Result(
            tokens=np.array(tokens, dtype=np.int32),
            invalid=np.array(invalid, dtype=np.bool_) if self.poison else None,
            outputs=self._outputs(plan, [state for _, state in states]),
            not_encoded=self._not_encoded(),
            encoded=self._encoded(plan),
        )

    def _encoded(self, plan: Plan) -> tuple[bytes, ...]:
        return () if self.media is None else self.media.work_ahead(plan)

    def _not_encoded(self) -> tuple[tuple[bytes, str], ...]:
        return () if self.media is None else self.media.take_errors()

    def _weights_of(self, plan: Plan) -> dict[int, int]:
        """The weights that each row computes with."""
        adapters = plan.adapters_of_tokens(1 + max(self.adapters, default=-1))
        if adapters is None:
            places = [BASE] * len(plan.rows)
        else:
            assert plan.adapters is not None
            assert max(plan.adapters) > BASE, "adapters in a step without any"
            places = plan.adapters.tolist()
        rows = zip(plan.rows.tolist(), places, strict=True)
        found = {
            row: self.weights + (0 if place == BASE else self.adapters[place])
            for row, place in rows
        }
        if plan.layers is not None:
            if not plan.layers.is_first and plan.step > self.in_doubt_until:
                assert found.items() <= self.carried_adapters.items(), "pieces of other adapters"
            self.carried_adapters = found
        return found

    def _is_last_piece(self, plan: Plan, layers: LayerSpan) -> bool:
        """The pieces of a prefill follow each other, over the tokens of those that stay."""
        assert plan.mode is ForwardMode.SPLIT_PREFILL
        assert 0 <= layers.first < layers.last <= layers.num_layers
        ends = zip(plan.rows.tolist(), plan.starts.tolist(), plan.lens.tolist(), strict=True)
        places = [(row, start + i) for row, start, length in ends for i in range(length)]
        tokens = [
            (row, position, slot)
            for (row, position), slot in zip(places, plan.slots.tolist(), strict=True)
        ]
        self.num_pieces += 1
        if not layers.is_first and plan.step > self.in_doubt_until:
            assert layers.first == self.num_layers_run, "layers are left out"
            if layers.kept is None:
                assert tokens == self.carried
            else:
                assert tokens == [self.carried[place] for place in layers.kept.tolist()]
                assert len(tokens) < len(self.carried)
        self.carried = tokens
        self.num_layers_run = layers.last
        if not layers.is_last:
            assert not plan.samples.any()
            assert not plan.outputs
            self.num_tokens_run += plan.num_tokens
        return layers.is_last

    @staticmethod
    def _outputs(plan: Plan, states: list[int]) -> tuple[AuxOutput, ...]:
        """`states` [T] after each token of the step."""
        asked = find(plan.outputs, PromptLogprobsRequest)
        if asked is None:
            return ()
        assert int(asked.counts.sum()) == len(asked.places) == len(asked.targets)
        pairs = zip(asked.places.tolist(), asked.targets.tolist(), strict=True)
        values = np.array(
            [logprob(states[place], token) for place, token in pairs], dtype=np.float32
        )
        none = np.zeros((len(values), 0), dtype=np.float32)
        return (
            PromptLogprobs(
                logprobs=values,
                ranks=np.ones(len(values), dtype=np.int32),
                top_ids=none.astype(np.int32),
                top_logprobs=none,
                id_logprobs=np.repeat(values[:, None], asked.ids.shape[1], axis=1),
            ),
        )

    def _follow_table(self, plan: Plan) -> None:
        if plan.table is not None:
            at = 0
            t = plan.table
            for row, start, length in zip(
                t.rows.tolist(), t.starts.tolist(), t.lens.tolist(), strict=True
            ):
                self.table[row, start : start + length] = t.slots[at : at + length]
                at += length
        at = 0
        for row, start, length in zip(
            plan.rows.tolist(), plan.starts.tolist(), plan.lens.tolist(), strict=True
        ):
            self.table[row, start : start + length] = plan.slots[at : at + length]
            at += length
