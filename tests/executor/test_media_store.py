"""What the device keeps of pictures, and how it gets into steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from weft.executor.inputs import DeviceRowTable
from weft.executor.media.steps import MediaPass
from weft.executor.media.store import MediaStore
from weft.models.vision.tower import Pieces, TowerInput
from weft.plan.device import DeviceReply, DeviceRequest, GetWeight, ReleaseMemory, UpdateFromDisk
from weft.plan.inputs import EncoderInput, HeardMedia, InputVectors, MediaValues, MediaVectors
from weft.plan.step import ForwardMode, Plan, Result, Sampling

HIDDEN = 3
CPU = torch.device("cpu")


class Doubling:
    """An encoder whose vectors are its values times two, `width` numbers each."""

    def __init__(self, width: int = HIDDEN) -> None:
        self.width = width

    def encode(self, input: TowerInput) -> Pieces:
        yield
        if input.values.min() < 0:
            raise ValueError("values below 0")
        vectors: Tensor = input.values.reshape(input.length, -1) * 2
        return vectors[:, : self.width]

    def weights(self) -> Any:
        return iter(())


def given(name: str, rows: list[list[float]]) -> EncoderInput:
    values = MediaValues(np.array(rows, dtype=np.float32))
    return EncoderInput(name.encode(), "image", len(rows), None, values)


def taking(
    items: list[str],
    rows: list[tuple[int, int]],
    *,
    encode: tuple[EncoderInput, ...] = (),
    drop: tuple[str, ...] = (),
    drops_all: bool = False,
) -> MediaVectors:
    """Tokens 0, 1, ... take these rows: (place of the item, row)."""
    return MediaVectors(
        drops_all=drops_all,
        drop=tuple(name.encode() for name in drop),
        encode=encode,
        items=tuple(name.encode() for name in items),
        index=np.arange(len(rows), dtype=np.int32),
        item=np.array([item for item, _ in rows], dtype=np.int32),
        row=np.array([row for _, row in rows], dtype=np.int32),
    )


def store_of(width: int = HIDDEN) -> MediaStore:
    return MediaStore(Doubling(width), hidden_size=HIDDEN, device=CPU)


A = given("a", [[1, 2, 3], [4, 5, 6]])
B = given("b", [[7, 8, 9]])
BROKEN = given("broken", [[-1, 0, 0]])


def test_rows_are_taken_in_any_order_from_what_is_there() -> None:
    store = store_of()
    op = taking(["a", "b"], [(1, 0), (0, 1), (0, 0)], encode=(A, B))
    assert store.take(op).tolist() == [[14, 16, 18], [8, 10, 12], [2, 4, 6]]
    assert store.take(taking(["b"], [(0, 0)])).tolist() == [[14, 16, 18]]
    assert store.num_runs == 2
    assert len(store) == 2
    store.take(taking(["b"], [(0, 0)], drop=("a", "never there")))
    assert len(store) == 1
    store.take(taking(["a"], [(0, 0)], encode=(A,), drops_all=True))
    assert len(store) == 1


def test_what_cannot_be_encoded_is_not_a_number_and_named_each_time() -> None:
    store = store_of()
    op = taking(["broken", "b"], [(0, 0), (1, 0)], encode=(BROKEN, B))
    rows = store.take(op)
    assert rows[0].isnan().all()
    assert rows[1].tolist() == [14, 16, 18]
    errors = ((b"broken", "the image encoder failed (ValueError)"),)
    assert store.take_errors() == errors
    assert store.take_errors() == ()
    store.take(taking(["broken"], [(0, 0)]))
    assert store.take_errors() == errors


@pytest.mark.parametrize("rows", [[[1.0, 2.0]], [[1.0, 2.0, 3.0, 4.0]]])
def test_vectors_of_another_size_are_no_vectors(rows: list[list[float]]) -> None:
    store = store_of(width=9)
    odd = given("odd", rows)
    assert store.take(taking(["odd"], [(0, 0)], encode=(odd,))).isnan().all()


class Heard:
    """Rows of a decoder that attends to vectors."""

    width = 2

    def __init__(self) -> None:
        self.rows: dict[int, Tensor] = {}

    def write(self, row: int, vectors: Tensor) -> None:
        assert vectors.shape[1] == self.width
        self.rows[row] = vectors.clone()


def test_rows_hear_what_is_encoded_and_an_error_is_not_a_number() -> None:
    heard = Heard()
    store = MediaStore(Doubling(2), hidden_size=1, device=CPU, heard=heard)
    for drop, one in (("", A), ("a", BROKEN), ("broken", B)):
        op = HeardMedia(
            drops_all=False,
            drop=(drop.encode(),),
            encode=(one,),
            items=(one.digest, one.digest),
            rows=np.array([0, 1], np.int32),
        )
        store.hear(op)
        assert heard.rows[1].isnan().all() == (one is BROKEN)
    assert heard.rows[0].tolist() == heard.rows[1].tolist() == [[14, 16]]


class Steps:
    """Takes what its table says, and gives no token."""

    def __init__(self, rows: DeviceRowTable) -> None:
        self.rows = rows
        self.seen: list[tuple[list[int], Tensor | None]] = []

    def run(self, plan: Plan) -> Any:
        inputs = self.rows.apply(plan)
        self.seen.append((inputs.tokens.tolist(), inputs.vectors))
        return self

    def moved(self, move: Any) -> Any:
        return self

    def result(self) -> Result:
        return Result(tokens=np.zeros(0, np.int32))


def plan_of(*inputs: Any) -> Plan:
    none = np.zeros(0, np.float32)
    sampling = Sampling(
        none, none, none.astype(np.int32), none, none.astype(np.int64), none.astype(np.int32)
    )
    return Plan(
        step=0,
        mode=ForwardMode.EXTEND,
        rows=np.zeros(1, np.int32),
        starts=np.zeros(1, np.int32),
        lens=np.full(1, 4, np.int32),
        tokens=np.array([11, 12, 13, 14], np.int32),
        slots=np.arange(4, dtype=np.int32),
        samples=np.zeros(1, np.bool_),
        sampling=sampling,
        inputs=inputs,
    )


def test_pictures_and_vectors_of_prompts_stand_in_one_step() -> None:
    rows = DeviceRowTable(1, 8, CPU)
    media = store_of(width=2 * HIDDEN)
    rows.media = media
    steps = Steps(rows)
    run = partial(MediaPass(media).run, then=steps.run)
    deep = given("deep", [[1, 2, 3, 4, 5, 6]])
    own = InputVectors(np.array([2], np.int32), np.array([[7, 7, 7]], np.float32))
    run(plan_of(taking(["deep"], [(0, 0)], encode=(deep,)), own))
    tokens, vectors = steps.seen[0]
    assert tokens == [-1, 12, -2, 14]
    assert vectors is not None
    assert vectors.tolist() == [[2, 4, 6, 8, 10, 12], [7, 7, 7, 0, 0, 0]]
    assert run(plan_of()) is steps
    assert steps.seen[1] == ([11, 12, 13, 14], None)


def test_a_result_names_what_could_not_be_encoded() -> None:
    rows = DeviceRowTable(1, 8, CPU)
    media = store_of()
    rows.media = media
    run = partial(MediaPass(media).run, then=Steps(rows).run)
    op = taking(["broken"], [(0, 0)], encode=(BROKEN,))
    result = run(plan_of(op)).moved(lambda tensor: tensor).result()
    assert result.not_encoded == ((b"broken", "the image encoder failed (ValueError)"),)


class Store:
    def __init__(self, *, kv_is_stale: bool = False) -> None:
        self.reply = DeviceReply(ok=True, kv_is_stale=kv_is_stale)

    def do(self, request: DeviceRequest) -> DeviceReply:
        return self.reply


@pytest.mark.parametrize(
    ("request_", "is_stale", "num_left"),
    [
        (ReleaseMemory(("kv_cache",)), False, 0),
        (UpdateFromDisk("folder"), True, 0),
        (UpdateFromDisk("wrong"), False, 2),
        (GetWeight("name", 3), False, 2),
    ],
)
def test_new_weights_and_released_memory_take_vectors_along(
    request_: DeviceRequest, is_stale: bool, num_left: int
) -> None:
    media = store_of()
    media.take(taking(["a", "b"], [(0, 0), (1, 0)], encode=(A, B)))
    store = Store(kv_is_stale=is_stale)
    assert MediaPass(media).do(request_, store.do) is store.reply
    assert len(media) == num_left
