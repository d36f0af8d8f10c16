"""The parts of a head that the builds of all devices share: its spec, its states, its weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from weft.config.heads import MTP, HeadSpec
from weft.config.model import BadCheckpoint
from weft.executor.assembly import RunnerSpec, make_kv_pool
from weft.executor.heads.states import HiddenPool
from weft.executor.kv_pool import KVPool
from weft.models.decoder import Decoder
from weft.models.heads.eagle3 import Eagle3
from weft.models.heads.mtp import Mtp
from weft.models.heads.protocol import HeadModel, Spread
from weft.ops.protocol import Ops
from weft.weights.fetch import weight_files
from weft.weights.load import load_weights, randomize

# Tensors that a head's checkpoint may have and no head reads: the embedding is the model's, and the
# other two list the tokens that it can guess.
UNREAD = ("embed_tokens.", "t2d", "d2t")
OFFSETS = "d2t"  # of the ids of these tokens from their places in the list


class HeadMemory(NamedTuple):
    """The memory of a head: its K and V in slots of their own numbers, and what it reads."""

    spec: RunnerSpec  # as that of a model of its own
    pool: KVPool
    states: HiddenPool

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.pool.tensors, *self.states.tensors]


def make_head_memory(spec: RunnerSpec, device: torch.device) -> HeadMemory | None:
    """The memory of the head that guesses for this model; None without one."""
    if spec.draft is None or spec.draft.model.head is None:
        return None
    # Only the K and V of the model are shared with other processes.
    ranks = None if spec.ranks is None else replace(spec.ranks, pool=None)
    own = replace(
        spec,
        engine=spec.draft.engine,
        model=spec.draft.model,
        folder=spec.draft.folder,
        kv_tokens=spec.kv_tokens + spec.max_rows * spec.engine.max_draft,
        window_tokens=0,
        num_state_slots=0,
        processors=None,
        draft=None,
        ranks=ranks,
    )
    assert own.model.head is not None
    states = HiddenPool(
        own.model.head,
        own.model.hidden_size,
        num_slots=own.kv_tokens,
        max_rows=spec.max_rows,
        device=device,
    )
    return HeadMemory(own, make_kv_pool(own, device), states)


def make_head(
    spec: RunnerSpec, ops: Ops, model: Decoder, spread: Spread, device: torch.device
) -> HeadModel:
    """The head of this spec with its weights, for a model with filled weights. Raises
    ModelError."""
    config = spec.model
    assert config.head is not None
    head: HeadModel
    if config.head.kind == MTP:
        head = Mtp(config, ops, model)
        unread: tuple[str, ...] = ("",)  # all tensors of the model itself
    else:
        ids = guessable_ids(spec.folder, config.head, config.vocab_size, is_dummy=spec.is_dummy)
        there = None if ids is None else ids.to(device)
        head = Eagle3(config, ops, model.embedding, there, spread)
        unread = UNREAD
    if spec.is_dummy:
        randomize(head.weights(), device)
    else:
        load_weights(head.weights(), spec.folder, unread)
    return head


def guessable_ids(
    folder: Path, spec: HeadSpec, vocab_size: int, *, is_dummy: bool
) -> Tensor | None:
    """The tokens that a head can guess, [num_logits] int64; None: all. Raises BadCheckpoint."""
    if spec.num_logits == vocab_size:
        return None
    places = torch.arange(spec.num_logits)
    if is_dummy:
        return places
    offsets = _tensor(folder, OFFSETS)
    if offsets.shape != places.shape or offsets.is_floating_point():
        raise BadCheckpoint(
            f"{OFFSETS} in {folder} is {offsets.dtype} {list(offsets.shape)}; "
            f"{spec.num_logits:,} integers are expected"
        )
    ids = places + offsets.long()
    is_rising = bool((ids[1:] > ids[:-1]).all())
    if not is_rising or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise BadCheckpoint(
            f"{OFFSETS} in {folder} does not list tokens of 0 to {vocab_size - 1:,}, each once "
            "and in their order"
        )
    return ids


def _tensor(folder: Path, name: str) -> Tensor:
    for path in weight_files(folder):
        if path.suffix != ".safetensors":
            continue
        with safe_open(path, "pt") as file:
            if name in file.keys():  # noqa: SIM118 - the file is no mapping
                tensor: Tensor = file.get_tensor(name)
                return tensor
    raise BadCheckpoint(f"{folder} has no tensor {name}, which lists the tokens of its lm_head")
