"""How far the prompts of one step may go, if the encoding of their items takes time.

    prompt   | text | picture | text | picture | text |
    budget                  -256             does not fit
    piece    |<------------------->|               the rest waits for the next step

The first picture of a step is always encoded, however large it is.

If a bound protects the running requests, a step takes only items that are already encoded: the
encoder works ahead, for a limited time after each step (`EncodeAhead`). A prompt whose items are
not encoded yet waits without an open chunk, so that other prompts can be computed in part.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

from weft.memory.media.borders import Span, border_after, border_before
from weft.plan.inputs import EncoderInput
from weft.scheduler.media.encoder_cache import EncoderCache
from weft.scheduler.media.prompt import MediaPrompt, PlacedInput
from weft.scheduler.request import Request, RequestState


class EncoderBudget:
    """The `PieceBudget` of one pass.

    `prompts` by id of their requests; `unheard`: the ids of those that have yet to read a sound to
    which all of their tokens attend. `cuts_prompts`: if not, each is computed in one step.
    `keeps_items_unsplit`: a step computes all tokens of an item, or none. `works_ahead`: a step
    takes only items that are already encoded."""

    def __init__(
        self,
        prompts: Mapping[int, MediaPrompt],
        cache: EncoderCache,
        *,
        num_tokens: int,
        page_size: int,
        cuts_prompts: bool,
        keeps_items_unsplit: bool,
        works_ahead: bool,
        unheard: Container[int] = (),
    ) -> None:
        self._prompts = prompts
        self._cache = cache
        self._left = num_tokens
        self._page_size = page_size
        self._cuts_prompts = cuts_prompts
        self._keeps_items_unsplit = keeps_items_unsplit
        self._works_ahead = works_ahead
        self._unheard = unheard
        self._promised: set[bytes] = set()  # items that this step encodes
        self._left_ahead = cache.max_ahead
        # Items that prompts wait for, in order; by digest.
        self.ahead: dict[bytes, EncoderInput] = {}

    def limit(self, request: Request, num_tokens: int, *, is_first: bool) -> int:
        prompt = self._prompts.get(request.id)
        if prompt is None:
            return num_tokens
        if not self._cuts_prompts and not self._promised:
            return num_tokens
        start = request.kv_len
        least = self._least_end(request, prompt)
        end = min(start + num_tokens, request.fill_len)
        if self._works_ahead:
            encoded_end = self._encoded_end(request, prompt)
            if encoded_end < min(end, request.fill_len):
                return max(encoded_end - start, 0)
        if end < request.fill_len:
            end = self._border(prompt, end)
        if end <= start and not self._keeps_items_unsplit:
            return num_tokens  # less than a page
        if end <= start:
            if not is_first:
                return 0
            end = least  # an item that is longer than a step
        left = self._left
        needed: set[bytes] = set()
        for item in self._needed(request, prompt, start, end):
            digest = item.input.digest
            if digest in needed or not self._costs(digest):
                continue
            left -= item.input.length
            if left < 0 and (needed or self._promised):
                end = self._border(prompt, item.start)
                break
            needed.add(digest)
        if end > start:
            return end - start
        if self._promised:
            return 0
        return least - start  # several items on one page

    def border(self, request: Request, num_tokens: int) -> int:
        prompt = self._prompts.get(request.id)
        if prompt is None or not self._keeps_items_unsplit:
            return num_tokens
        start = request.kv_len
        return max(self._border(prompt, start + num_tokens) - start, 0)

    def spend(self, request: Request, num_tokens: int) -> None:
        prompt = self._prompts.get(request.id)
        if prompt is None:
            return
        end = request.kv_len + num_tokens
        for item in self._needed(request, prompt, request.kv_len, end):
            if self._costs(item.input.digest):
                self._left -= item.input.length
                self._promised.add(item.input.digest)

    # Inside

    def _encoded_end(self, request: Request, prompt: MediaPrompt) -> int:
        """The end of the part of a prompt whose items are encoded. Asks for the other items, as far
        as there is room for them."""
        start = request.kv_len
        is_open = request.state is RequestState.PREFILLING
        waits_at: int | None = None
        num_seen = 0
        for item in self._needed(request, prompt, start, request.fill_len):
            length = item.input.length
            # The first item of a pass is encoded, however large it is.
            if self._left_ahead < min(length, self._cache.max_ahead):
                if waits_at is None:
                    waits_at = item.start if is_open or num_seen else start
                break
            num_seen += 1
            self._left_ahead -= length
            if item.input.digest in self._cache:
                self._cache.use(item.input.digest)
                continue
            self.ahead.setdefault(item.input.digest, item.input)
            if waits_at is None:
                waits_at = item.start if is_open else start
        if waits_at is None:
            return request.fill_len
        return max(self._border(prompt, waits_at), start)

    def _needed(
        self, request: Request, prompt: MediaPrompt, start: int, end: int
    ) -> Iterator[PlacedInput]:
        """The items that a step needs which computes the tokens from `start` to `end`."""
        if not prompt.is_heard:
            yield from prompt.within(start, end)
        elif request.id in self._unheard:
            yield from prompt.items

    def _costs(self, digest: bytes) -> bool:
        """Whether this step would have to encode the item."""
        return digest not in self._cache and digest not in self._promised

    def _unsplit(self, prompt: MediaPrompt) -> list[Span]:
        if not self._keeps_items_unsplit:
            return []
        return [(item.start, item.end) for item in prompt.items]

    def _border(self, prompt: MediaPrompt, end: int) -> int:
        """The last position up to `end` where a piece may end before the end of the prompt."""
        return border_before(end, self._unsplit(prompt), self._page_size)

    def _least_end(self, request: Request, prompt: MediaPrompt) -> int:
        """The end of the shortest possible piece of the prompt."""
        end = border_after(request.kv_len, self._unsplit(prompt), self._page_size)
        return min(end, request.fill_len)


def longest_piece(spans: list[Span], prompt_len: int, page_size: int) -> int:
    """Length in tokens of the longest unavoidable piece of a prompt, whose `spans` must each be
    computed in one step."""
    longest = 0
    begin = 0
    while begin < prompt_len:
        end = min(border_after(begin, spans, page_size), prompt_len)
        longest = max(longest, end - begin)
        begin = end
    return longest
