"""Splits a message with several requests into messages for several engines."""

from __future__ import annotations

from collections.abc import Sequence

from weft.messages.requests import BatchGenerate


def split_batch(
    batch: BatchGenerate,
    ranks: Sequence[int | None],
) -> dict[int, BatchGenerate]:
    """The parts of `batch`, by the rank of their engine.

    `ranks`: [n] the engine of each request; None omits the request. Each prompt is in a part only
    once, even if several requests have it.
    """
    parts: dict[int, BatchGenerate] = {}
    prompts: dict[int, dict[int, int]] = {}  # by rank: index in the batch -> index in the part
    for request, index, rank in zip(
        batch.requests,
        batch.prompt_of,
        ranks,
        strict=True,
    ):
        if rank is None:
            continue
        if rank not in parts:
            parts[rank] = BatchGenerate(
                prompts=[],
                requests=[],
                prompt_of=[],
                vectors={},
                media={},
            )
            prompts[rank] = {}
        part = parts[rank]
        known = prompts[rank]
        if index not in known:
            known[index] = len(part.prompts)
            _add_prompt(part, batch, index)
        part.requests.append(request)
        part.prompt_of.append(known[index])
    return parts


def _add_prompt(
    part: BatchGenerate,
    batch: BatchGenerate,
    index: int,
) -> None:
    here = len(part.prompts)
    part.prompts.append(batch.prompts[index])
    if index in batch.vectors:
        part.vectors[here] = batch.vectors[index]
    if index in batch.media:
        part.media[here] = batch.media[index]
