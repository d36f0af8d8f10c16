"""Pictures, videos and sounds in prompts.

Their tokens have vectors of the model's encoder instead of embeddings. This feature keeps the
inputs of the encoder while their request is open, because a retracted request is computed again. It
also tracks which items the device has encoded, so that each step encodes exactly the items that it
takes and the device lacks. The prefix cache compares items by content (`Request.cache_key`): a
prefix that is found there needs no encoder.

The feature also adds to the plan the positions of tokens in time, height and width
(`Plan.rotation`), and how far they see each other (`Plan.sees_to`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from weft.arrays import IntArray, consecutive
from weft.messages.replies import FinishReason
from weft.messages.requests import GenerateRequest
from weft.plan.inputs import EncodeAhead, EncoderInput, HeardMedia, MediaVectors
from weft.plan.step import Result
from weft.scheduler.batch import Batch, End
from weft.scheduler.feature import Feature, Note, StepEffects, StepInputs
from weft.scheduler.kv import KvMemory
from weft.scheduler.limits import Refusal
from weft.scheduler.media.budget import EncoderBudget, longest_piece
from weft.scheduler.media.encoder_cache import EncoderCache
from weft.scheduler.media.prompt import (
    MediaPrompt,
    PlacedInput,
    read_prompt,
    wrong_heard,
    wrong_media,
)
from weft.scheduler.pace.pace import StepBudget
from weft.scheduler.request import Columns, Request, RequestState
from weft.scheduler.settings import SchedulerSettings

LONGEST_AHEAD_S = 0.05  # longest work of the encoder after a step, until the cost of steps is known


class TakenItem(NamedTuple):
    """The tokens of an item that a step computes."""

    request: Request
    item: PlacedInput
    start: int  # position of the first of these tokens in the prompt
    end: int
    token_index: int  # index of the first of these tokens in the step


class PromptPiece(NamedTuple):
    """The tokens of a prompt that a step computes."""

    request: Request
    prompt: MediaPrompt
    start: int  # position in the prompt
    end: int
    token_index: int  # index of the first token in the step


class MediaFeature(Feature):
    """Keeps the encoder's inputs of open requests, and the accounts of encoded items."""

    request_fields = ("media",)
    gives_inputs = True
    changes_layers = True

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._rules = settings.media
        self.by_id: dict[int, MediaPrompt] = {}  # of open requests
        self._rows: dict[int, Request] = {}  # those that have a row, by row
        # Requests that have yet to read the sound to which all of their tokens attend: the first
        # step after they got a row writes it.
        self._unheard: set[int] = set()
        # By id of requests with a row: digests of the items in the last piece of the prompt.
        self._taken: dict[int, set[bytes]] = {}
        # [rows] what to add to the index of a token after the prompt to get its position
        num_rows = settings.sized_for.max_running_requests
        self._shifts: IntArray = np.zeros(num_rows, dtype=np.int32)
        vector_bytes = 0 if self._rules is None else self._rules.vector_bytes
        self.cache = EncoderCache(settings.encoder_cache_tokens, vector_bytes=vector_bytes)
        self._notes: list[Note] = []  # of steps that were planned since the last result
        # Of the last pass over the queue: the items, and how long the step may take.
        self._pass: EncoderBudget | None = None
        self._step_budget: StepBudget | None = None

    def refusal(self, message: GenerateRequest) -> Refusal | None:
        why_not = self._why_not(message)
        return Refusal(why_not, 400) if why_not else None

    def _why_not(self, message: GenerateRequest) -> str:
        if self._rules is None:
            return f"this model takes no {message.media[0].kind} input; it reads only text"
        if message.session is not None:
            return "a request of a session cannot have images, videos or sounds"
        if message.vectors:
            return "a prompt of input embeddings cannot have images, videos or sounds besides"
        if self._rules.heard_len:
            return wrong_heard(message, self._rules.heard_len)
        if any(item.num_heard for item in message.media):
            return "this model's tokens do not attend to a sound that has no tokens"
        wrong = wrong_media(message)
        if wrong or self._settings.windows is None or not self._settings.keeps_items_unsplit:
            return wrong
        # The memory of layers with windows is sized for the longest chunk.
        chunk_len = self._settings.chunk_len
        num_tokens = message.prompt_len
        longest = longest_piece(message.spans, num_tokens, self._settings.page_size)
        if chunk_len is not None and longest > chunk_len:
            return (
                f"{longest:,} tokens of the prompt's images must be computed together; "
                f"--chunked-prefill-size allows {chunk_len:,}"
            )
        return ""

    def arrive(self, message: GenerateRequest) -> None:
        assert self._rules is not None, "a request that was refused"
        has_three_positions = self._rules.has_three_positions
        prompt = read_prompt(message, has_three_positions=has_three_positions)
        self.by_id[message.id] = prompt
        if prompt.is_heard:
            self._unheard.add(message.id)

    def enter_row(self, request: Request) -> None:
        self._rows[request.row] = request
        positions = self.by_id[request.id].positions
        if positions is not None:
            self._shifts[request.row] = positions.shift

    def piece_budget(self, budget: StepBudget | None) -> EncoderBudget:
        settings = self._settings
        self._step_budget = budget
        self._pass = EncoderBudget(
            self.by_id,
            self.cache,
            num_tokens=settings.encoder_tokens,
            page_size=settings.page_size,
            cuts_prompts=settings.piece_len is not None,
            keeps_items_unsplit=settings.keeps_items_unsplit,
            # After a fault, the next step that takes an item drops all items first.
            works_ahead=budget is not None and not self.cache.is_in_doubt,
            unheard=self._unheard,
        )
        return self._pass

    def prepare(self, batch: Batch, columns: Columns, step: StepInputs) -> None:
        if self._rows:
            self._add_inputs(batch, step)
        if self._pass is not None and self._pass.ahead:
            step.ahead = self._ahead(self._pass)
        self._pass = None

    def _add_inputs(self, batch: Batch, step: StepInputs) -> None:
        pieces = list(self._pieces(batch))
        if self._rules is not None and self._rules.heard_len:
            heard = [one for one in pieces if one.request.id in self._unheard]
            if heard:
                step.inputs.append(self._hear(heard))
            return
        taken = list(_taken(pieces))
        if taken:
            step.inputs.append(self._vectors(taken))
        self._add_positions(batch, pieces, taken, step)

    def commit(self, batch: Batch, columns: Columns, result: Result, effects: StepEffects) -> None:
        effects.notes += self._notes
        self._notes = []
        self.cache.busy_s += result.encoder_s
        ahead = batch.plan.ahead
        if ahead is not None:
            pinned = self._pinned({})
            for one in ahead.encode:
                if one.digest in result.encoded:
                    self.cache.encoded_ahead(one, ahead.generation, pinned)
        for digest, why in result.not_encoded:
            self.cache.forget(digest)
            for row in self._concerned(digest, batch, columns):
                effects.ends.append(End(row, "error", message=why))

    def release(self, request: Request) -> None:
        self._rows.pop(request.row, None)
        if request.id in self.by_id and self.by_id[request.id].is_heard:
            self._unheard.add(request.id)  # another row has nothing to attend to
        self._taken.pop(request.id, None)
        self._shifts[request.row] = 0

    def end(self, request: Request, reason: FinishReason, now: float, kv: KvMemory) -> None:
        self.by_id.pop(request.id, None)
        self._unheard.discard(request.id)

    def forget_device(self) -> None:
        self.cache.forget_all()

    # Inside

    def _ahead(self, last_pass: EncoderBudget) -> EncodeAhead:
        """The items to encode after this step, for as long as running requests can wait."""
        seconds = LONGEST_AHEAD_S
        if self._step_budget is not None:
            seconds = min(max(self._step_budget.left_s, 0.0), seconds)
        return EncodeAhead(tuple(last_pass.ahead.values()), seconds, self.cache.generation)

    def _pieces(self, batch: Batch) -> Iterator[PromptPiece]:
        """The pieces of prompts with media that a step computes."""
        token_index = 0
        lens = zip(batch.prefills, batch.starts.tolist(), batch.lens.tolist(), strict=False)
        for request, start, length in lens:
            prompt = self.by_id.get(request.id)
            if prompt is not None:
                yield PromptPiece(request, prompt, start, start + length, token_index)
            token_index += length

    def _hear(self, pieces: list[PromptPiece]) -> HeardMedia:
        """The items that the step writes for rows, encodes and drops."""
        wanted: dict[bytes, EncoderInput] = {}
        for one in pieces:
            for item in one.prompt.items:
                wanted.setdefault(item.input.digest, item.input)
        work = self.cache.take(list(wanted.values()), ())
        encoded = {one.digest for one in work.encode}
        items: list[bytes] = []
        for one in pieces:
            (item,) = one.prompt.items
            items.append(item.input.digest)
            taken = TakenItem(one.request, item, item.start, item.end, one.token_index)
            self._note(one.request.id, [taken], encoded)
            self._unheard.discard(one.request.id)
        return HeardMedia(
            drops_all=work.drops_all,
            drop=work.drop,
            encode=work.encode,
            items=tuple(items),
            rows=np.array([one.request.row for one in pieces], dtype=np.int32),
        )

    def _vectors(self, taken: list[TakenItem]) -> MediaVectors:
        """The items that the step takes, encodes and drops."""
        wanted: dict[bytes, EncoderInput] = {}
        by_request: dict[int, list[TakenItem]] = {}
        for one in taken:
            wanted.setdefault(one.item.input.digest, one.item.input)
            by_request.setdefault(one.request.id, []).append(one)
        work = self.cache.take(list(wanted.values()), self._pinned(by_request))
        encoded = {one.digest for one in work.encode}
        for id, items in by_request.items():
            self._taken[id] = {one.item.input.digest for one in items}
            self._note(id, items, encoded)
        digests = tuple(wanted)
        numbers = {digest: number for number, digest in enumerate(digests)}
        index: list[IntArray] = []
        item: list[IntArray] = []
        row: list[IntArray] = []
        for one in taken:
            token_indices, rows = one.item.vectors(one.start, one.end)
            index.append(token_indices + np.int32(one.token_index))
            item.append(np.full(len(rows), numbers[one.item.input.digest], dtype=np.int32))
            row.append(rows)
        return MediaVectors(
            drops_all=work.drops_all,
            drop=work.drop,
            encode=work.encode,
            items=digests,
            index=np.concatenate(index),
            item=np.concatenate(item),
            row=np.concatenate(row),
        )

    def _pinned(self, taking: dict[int, list[TakenItem]]) -> set[bytes]:
        """The items that partly computed prompts need, if these prompts are not in this step."""
        pinned: set[bytes] = set()
        for request in self._rows.values():
            is_open = request.state is RequestState.PREFILLING
            if is_open and request.id not in taking:
                pinned |= self._taken.get(request.id, set())
        return pinned

    def _note(self, id: int, items: list[TakenItem], encoded: set[bytes]) -> None:
        """Note in the request's history which items the step encodes for it."""
        num_encoded = 0
        num_tokens = 0
        num_found = 0
        for one in items:
            begins = one.start == one.item.start
            if one.item.input.digest in encoded:
                num_encoded += 1
                num_tokens += one.item.input.length
                encoded.discard(one.item.input.digest)  # an item is noted for one request only
            elif begins and self.cache.first_taken(one.item.input.digest):
                num_encoded += 1
                num_tokens += one.item.input.length
            elif begins:
                num_found += 1
        self.cache.num_reused += num_found
        self.cache.num_missed += num_encoded
        if num_encoded or num_found:
            detail = f"{num_encoded:,} encoded ({num_tokens:,} tokens), {num_found:,} found encoded"
            self._notes.append(Note(id, detail))

    def _add_positions(
        self, batch: Batch, pieces: list[PromptPiece], taken: list[TakenItem], step: StepInputs
    ) -> None:
        rules = self._rules
        assert rules is not None, "a request that was refused"
        if rules.has_three_positions:
            step.rotation = self._rotation(batch, pieces)
        if rules.sees_both_ways and taken:
            sees_to = consecutive(batch.starts, batch.lens) + np.int32(1)
            for one in taken:
                if one.item.input.kind in rules.kinds_in_order:
                    continue
                span = slice(one.token_index, one.token_index + one.end - one.start)
                sees_to[span] = one.item.end
            step.sees_to = sees_to

    def _rotation(self, batch: Batch, pieces: list[PromptPiece]) -> IntArray | None:
        """[3, T]; None if the position of every token is its index in the sequence."""
        shifts = self._shifts[batch.rows]
        if not pieces and not shifts.any():
            return None
        shifted = consecutive(batch.starts, batch.lens) + np.repeat(shifts, batch.lens)
        rotation = np.tile(shifted.astype(np.int32), (3, 1))
        for piece in pieces:
            positions = piece.prompt.positions
            assert positions is not None, "the model has three positions a token"
            # After a retraction, tokens of the output follow those of the prompt.
            own = positions.prompt[:, piece.start : piece.end]
            rotation[:, piece.token_index : piece.token_index + own.shape[1]] = own
        return rotation

    def _concerned(self, digest: bytes, batch: Batch, columns: Columns) -> list[int]:
        """The rows whose K and V depend on an item that could not be encoded: rows that took its
        vectors in this step, and rows that have found their K and V in the cache since."""
        took: set[int] = set()
        is_live = (columns.epoch[batch.rows] == batch.epochs).tolist()
        ends = (batch.starts + batch.lens).tolist()
        starts = batch.starts.tolist()
        for number, row in enumerate(batch.rows.tolist()):
            request = self._rows.get(row)
            if request is not None and is_live[number]:
                items = self.by_id[request.id].within(starts[number], ends[number])
                if any(one.input.digest == digest for one in items):
                    took.add(row)
        found: list[int] = []
        for row, request in self._rows.items():
            has_it = any(one.input.digest == digest for one in self.by_id[request.id].items)
            # A request with output has computed its prompt in earlier steps.
            if row in took or (has_it and columns.num_output(row) == 0):
                found.append(row)
        return found


def _taken(pieces: list[PromptPiece]) -> Iterator[TakenItem]:
    for request, prompt, start, end, token_index in pieces:
        for item in prompt.within(start, end):
            first = max(item.start, start)
            last = min(item.end, end)
            yield TakenItem(request, item, first, last, token_index + first - start)
