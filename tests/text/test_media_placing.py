from __future__ import annotations

import hashlib

import numpy as np
import pytest

from weft.messages.media import MediaKind
from weft.text.media.errors import MediaError
from weft.text.media.placing import ReadyMedia, in_text, in_tokens, ready
from weft.text.media.processor import MediaPart, PreparedMedia

MARKS: dict[MediaKind, str] = {"image": "<image>", "video": "<video>", "audio": "<image>!"}
PADS: dict[MediaKind, int] = {"image": 9, "video": 9, "audio": 8}


def made(kind: MediaKind, text: str, *lens: int) -> ReadyMedia:
    parts = tuple(
        MediaPart(kind, length, (1, 1, length), np.full(2, length, dtype=np.float32))
        for length in lens
    )
    return ready(kind, PreparedMedia(text, parts))


def test_each_mark_becomes_what_stands_for_its_picture() -> None:
    one = made("image", "[1]", 1)
    two = made("image", "[2]", 2)
    film = made("video", "(v)", 3)
    text, order = in_text("a<image>b<video>c<image>", MARKS, [one, film, two])
    assert text == "a[1]b(v)c[2]"
    assert order == [one, film, two]
    # Of one kind the order is that of the request; between kinds it is that of the text.
    text, order = in_text("<video><image><image>", MARKS, [one, two, film])
    assert text == "(v)[1][2]"
    assert order == [film, one, two]


def test_a_mark_that_begins_another_is_not_taken_for_it() -> None:
    picture = made("image", "P", 1)
    sound = made("audio", "S", 1)
    assert in_text("<image>!<image>", MARKS, [picture, sound])[0] == "SP"


def test_marks_of_kinds_that_are_not_there_are_text() -> None:
    assert in_text("<video> <image>", MARKS, [made("image", "P", 1)])[0] == "<video> P"
    assert in_text("<video> <image>", MARKS, []) == ("<video> <image>", [])


def test_text_that_replaces_a_mark_is_not_searched_for_marks() -> None:
    tricky = made("image", "<image><image>", 1)
    assert in_text("x<image>y", MARKS, [tricky])[0] == "x<image><image>y"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("say <image>: <image>", r"mark '<image>' 2 times for 1 image"),
        ("nothing", r"mark '<image>' 0 times for 1 image"),
    ],
)
def test_a_mark_of_the_user_is_refused(text: str, words: str) -> None:
    with pytest.raises(MediaError, match=words):
        in_text(text, MARKS, [made("image", "P", 1)])


def test_parts_stand_where_their_placeholders_are() -> None:
    media = [made("image", "", 2, 3), made("audio", "", 1), made("video", "", 2)]
    ids = [5, 9, 9, 9, 9, 9, 8, 5, 9, 9, 5]  # parts may follow each other without a gap
    items = in_tokens(ids, PADS, media)
    assert [(item.kind, item.start, item.length) for item in items] == [
        ("image", 1, 2),
        ("image", 3, 3),
        ("audio", 6, 1),
        ("video", 8, 2),
    ]
    assert [item.grid for item in items] == [(1, 1, 2), (1, 1, 3), (1, 1, 1), (1, 1, 2)]
    assert items[0].shape == (2,)
    assert items[0].values == np.full(2, 2, dtype="<f4").tobytes()


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([9, 9, 9, 5, 9], r"has 4 tokens .* its 1 parts need 3"),
        ([9, 9], r"has 2 tokens"),
        ([], r"has 0 tokens"),
        ([9, 5, 9, 9], r"something among the 3 tokens"),
    ],
)
def test_runs_that_do_not_fit_are_refused(ids: list[int], words: str) -> None:
    with pytest.raises(MediaError, match=words):
        in_tokens(ids, PADS, [made("image", "", 3)])


def test_a_digest_tells_apart_whatever_changes_the_vectors() -> None:
    values = np.arange(4, dtype=np.float32)
    base = MediaPart("image", 4, (1, 2, 2), values)
    others = [
        base,
        base._replace(kind="video"),
        base._replace(length=5),
        base._replace(grid=(1, 4, 1)),
        base._replace(grid=None),
        base._replace(time_step=2),
        base._replace(values=values.reshape(2, 2)),
        base._replace(values=values + np.float32(1e-7)),
    ]
    digests = [ready("image", PreparedMedia("", (one,))).items[0].digest for one in others]
    assert len(set(digests)) == len(others)
    assert all(len(digest) == hashlib.sha256().digest_size for digest in digests)
    again = ready("image", PreparedMedia("x", (base._replace(values=values.copy()),)))
    assert again.items[0].digest == digests[0]
