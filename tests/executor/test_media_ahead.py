"""What the device keeps of an encoder, and how it works ahead."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from weft.executor.media.store import MediaStore
from weft.models.layers.weight import Weights
from weft.models.vision.tower import Pieces, TowerInput
from weft.plan.inputs import EncodeAhead, EncoderInput, MediaValues, MediaVectors

HIDDEN = 4
NUM_PIECES = 5


class CountingTower:
    """Its vectors are the numbers that it is given; it counts its work."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.num_pieces = 0
        self.num_given_up = 0

    def encode(self, input: TowerInput) -> Pieces:
        self.num_begun += 1
        try:
            for _ in range(NUM_PIECES):
                self.num_pieces += 1
                yield
        except GeneratorExit:
            self.num_given_up += 1
            raise
        if input.values.isnan().any():
            raise ValueError("nothing is to be seen")
        return input.values

    def weights(self) -> Weights:
        yield from ()


def item(number: int, length: int = 3, value: float | None = None) -> EncoderInput:
    whole = np.full((length, HIDDEN), number if value is None else value, np.float32)
    return EncoderInput(b"%d" % number, "image", length, None, MediaValues(whole))


def ahead(*items: EncoderInput, seconds: float = 0.0) -> EncodeAhead:
    return EncodeAhead(items, seconds, 0)


def taking(*items: EncoderInput, encode: bool, drop: tuple[bytes, ...] = ()) -> MediaVectors:
    """The first vector of each."""
    places = np.arange(len(items), dtype=np.int32)
    return MediaVectors(
        drops_all=False,
        drop=drop,
        encode=items if encode else (),
        items=tuple(one.digest for one in items),
        index=places,
        item=places,
        row=np.zeros(len(items), np.int32),
    )


@pytest.fixture
def tower() -> CountingTower:
    return CountingTower()


@pytest.fixture
def store(tower: CountingTower) -> MediaStore:
    return MediaStore(tower, hidden_size=HIDDEN, device=torch.device("cpu"))


def test_without_time_it_does_one_piece_of_the_first(
    store: MediaStore, tower: CountingTower
) -> None:
    for num_done in range(1, NUM_PIECES + 1):
        assert store.work_ahead(ahead(item(1), item(2))) == ()
        assert tower.num_pieces == num_done
    assert store.work_ahead(ahead(item(1), item(2))) == (b"1",)
    assert tower.num_begun == 1
    # What is there is told again, and the next one has its turn.
    assert store.work_ahead(ahead(item(1), item(2))) == (b"1",)
    assert tower.num_begun == 2
    assert store.take_seconds() > 0
    assert store.take_seconds() == 0


def test_with_time_it_encodes_all(store: MediaStore, tower: CountingTower) -> None:
    assert store.work_ahead(ahead(item(1), item(2), seconds=math.inf)) == (b"1", b"2")
    assert store.take(taking(item(2), item(1), encode=False)).tolist() == [[2] * 4, [1] * 4]
    assert tower.num_begun == store.num_runs == 2


def test_a_step_that_takes_it_ends_what_was_begun(store: MediaStore, tower: CountingTower) -> None:
    store.work_ahead(ahead(item(1)))
    assert store.take(taking(item(1), encode=True)).tolist() == [[1] * 4]
    assert tower.num_begun == 1
    assert tower.num_pieces == NUM_PIECES
    # It is there already, which a scheduler that has not seen the result does not know.
    store.take(taking(item(1), encode=True))
    assert tower.num_begun == 1


def test_what_is_not_asked_for_any_more_is_given_up(
    store: MediaStore, tower: CountingTower
) -> None:
    store.work_ahead(ahead(item(1)))
    assert store.work_ahead(ahead(item(2), seconds=math.inf)) == (b"2",)
    assert tower.num_given_up == 1
    store.work_ahead(ahead(item(3)))
    store.clear()
    assert tower.num_given_up == 2
    assert len(store) == 0


def test_what_cannot_be_encoded_is_told_to_those_who_take_it(store: MediaStore) -> None:
    broken = item(1, value=math.nan)
    assert store.work_ahead(ahead(broken, item(2), seconds=math.inf)) == (b"1", b"2")
    assert store.take_errors() == ()
    vectors = store.take(taking(broken, item(2), encode=False))
    assert vectors[0].isnan().all()
    assert vectors[1].tolist() == [2] * 4
    assert store.take_errors() == ((b"1", "the image encoder failed (ValueError)"),)
    # Dropped and encoded anew, it is another try.
    store.take(taking(item(1), encode=True, drop=(b"1",)))
    assert store.take_errors() == ()
