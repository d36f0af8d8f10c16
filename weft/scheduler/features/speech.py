"""What requests to a model that writes down speech may sample, as Whisper was trained, and the
weights of its attention to the sound (`SpeechRules`).

The rules about times need the last two tokens and the last time of an output, so a step with them
is planned when the tokens before it are known.
"""

from __future__ import annotations

import numpy as np

from weft.arrays import IntArray
from weft.messages.replies import HeardWeightsPiece
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SpeechRules
from weft.plan.logits import LogitBias, TimestampRules
from weft.plan.outputs import HeardWeights, HeardWeightsRequest
from weft.plan.step import Result, find
from weft.scheduler.batch import Batch
from weft.scheduler.feature import Feature, StepEffects, StepInputs
from weft.scheduler.features.bias import forbidden, joined
from weft.scheduler.limits import Refusal
from weft.scheduler.request import Columns, Request

Range = tuple[int, int]  # of token ids, the end exclusive
NUM_RANGES = 5  # the most that one row has


class SpeechFeature(Feature):
    """Keeps the rows of such requests."""

    sampling_fields = ("speech",)
    no_draft = "what it may sample depends on its last tokens"

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: dict[int, Request] = {}

    def refusal(self, message: GenerateRequest) -> Refusal | None:
        rules = message.sampling.speech
        assert rules is not None, "a request that does not use the feature"
        if rules.alignment_heads and not any(item.num_heard for item in message.media):
            return Refusal("alignment heads are asked for, and the tokens attend to no sound", 400)
        return None

    def enter_row(self, request: Request) -> None:
        self._rows[request.row] = request

    def release(self, request: Request) -> None:
        self._rows.pop(request.row, None)

    def prepare(self, batch: Batch, columns: Columns, step: StepInputs) -> None:
        self._ask_for_weights(batch, step)
        found = batch.sampling_in(self._rows)
        biases: list[LogitBias] = []
        index: list[int] = []
        firsts: list[int] = []
        ranges: list[list[Range]] = []
        for i, row, length in zip(found.index.tolist(), found.rows, found.lens, strict=True):
            request = self._rows[row]
            rules = _rules(request)
            prompt_len = request.spec.prompt_len
            tokens = rules.suppress
            if length == prompt_len:
                tokens += rules.begin_suppress
            if tokens:
                biases.append(forbidden(i, np.array(tokens, dtype=np.int32)))
            if rules.first_timestamp:
                output = columns.tokens[row, prompt_len:length]
                step.blocks_overlap |= not rules.forbids_times
                index.append(i)
                firsts.append(rules.first_timestamp)
                ranges.append(forbidden_ranges(rules, output, self._vocab_size))
        if biases:
            step.logits.append(joined(biases))
        if not index:
            return
        padded = np.zeros((len(index), NUM_RANGES, 2), dtype=np.int32)
        for number, of_row in enumerate(ranges):
            padded[number, : len(of_row)] = of_row
        step.logits.append(
            TimestampRules(
                np.array(index, dtype=np.int32), np.array(firsts, dtype=np.int32), padded
            )
        )

    def commit(self, batch: Batch, columns: Columns, result: Result, effects: StepEffects) -> None:
        asked = find(batch.plan.outputs, HeardWeightsRequest)
        output = find(result.outputs, HeardWeights)
        if asked is None or output is None:
            return
        for i, weights in zip(asked.index.tolist(), output.weights, strict=True):
            row = batch.rows[i]
            if columns.epoch[row] != batch.epochs[i]:
                continue  # it has left
            end = int(batch.starts[i] + batch.lens[i])
            effects.aux.append(
                HeardWeightsPiece(
                    id=int(columns.ids[row]),
                    start=end - len(weights),
                    shape=weights.shape,
                    weights=weights.tobytes(),
                )
            )

    def _ask_for_weights(self, batch: Batch, step: StepInputs) -> None:
        index: list[int] = []
        counts: list[int] = []
        heads: list[tuple[tuple[int, int], ...]] = []
        for i, request in enumerate(batch.prefills):
            rules = request.message.sampling.speech
            if rules is None or not rules.alignment_heads:
                continue
            end = int(batch.starts[i] + batch.lens[i])
            count = min(int(batch.lens[i]), end - rules.align_from)
            if count > 0:
                index.append(i)
                counts.append(count)
                heads.append(rules.alignment_heads)
        if index:
            step.outputs.append(
                HeardWeightsRequest(
                    index=np.array(index, dtype=np.int32),
                    counts=np.array(counts, dtype=np.int32),
                    heads=tuple(heads),
                )
            )


def forbidden_ranges(rules: SpeechRules, output: IntArray, vocab_size: int) -> list[Range]:
    """The ids that may not follow an output of a model with times. At most `NUM_RANGES`."""
    first = rules.first_timestamp
    if rules.forbids_times:
        return [(first, vocab_size)]
    found = [(first - 1, first)]  # the token that asks for no times
    if not len(output):
        found.append((0, first))
        if rules.max_initial >= 0:
            found.append((min(first + rules.max_initial + 1, vocab_size), vocab_size))
        return found
    ends_in_time = bool(output[-1] >= first)
    ends_in_pair = ends_in_time and (len(output) < 2 or bool(output[-2] >= first))
    if ends_in_pair:
        found.append((first, vocab_size))
    elif ends_in_time:
        found.append((0, rules.end))
    times = output[output >= first]
    if len(times):
        # The end of a segment may be repeated as the beginning of the next; else times rise.
        is_open = ends_in_time and not ends_in_pair
        found.append((first, int(times[-1]) + (0 if is_open else 1)))
    return found


def _rules(request: Request) -> SpeechRules:
    rules = request.message.sampling.speech
    assert rules is not None, "a request that does not use the feature"
    return rules
