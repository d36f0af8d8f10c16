"""Videos in containers: which frames are kept, how they stand, and what is refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from tests.text.films import HEIGHT, WIDTH, av, film
from weft.text.media.errors import MediaError, MediaTooLarge
from weft.text.media.limits import MediaLimits
from weft.text.media.video import container_of, decode_video

LIMITS = MediaLimits(max_video_frames=768, max_video_pixels=64_000_000)


def greys(data: bytes, limits: MediaLimits = LIMITS) -> tuple[list[int], float]:
    frames, frames_per_s = decode_video(data, container_of(data), limits)
    return [round(np.asarray(frame)[8:40, 8:24].mean() / 4) for frame in frames], frames_per_s


@pytest.mark.parametrize(
    ("format", "codec"),
    [("mp4", "mpeg4"), ("mp4", "libx264"), ("webm", "libvpx"), ("matroska", "mpeg4")],
)
def test_two_frames_a_second_are_kept_evenly_over_the_time(format: str, codec: str) -> None:
    if codec not in av.codecs_available:
        pytest.skip(f"this FFmpeg does not write {codec}")
    seen, frames_per_s = greys(film(format, codec))
    assert np.abs(np.subtract(seen, [0, 20, 39, 59])).max() <= 2
    assert frames_per_s == pytest.approx(2, rel=0.01)


def test_a_short_video_keeps_at_least_four_frames_or_all() -> None:
    assert len(greys(film(num_frames=10))[0]) == 4
    seen, frames_per_s = greys(film(num_frames=3))
    assert len(seen) == 3
    assert frames_per_s == pytest.approx(30, rel=0.1)
    assert greys(film(num_frames=1)) == ([0], 2.0)


def test_texts_in_a_video_need_not_be_utf_8() -> None:
    data = film(num_frames=3)
    assert b"VideoHandler" in data
    assert len(greys(data.replace(b"VideoHandler", b"\xe9ideoHandler"))[0]) == 3


def test_fewer_frames_are_kept_where_more_are_not_allowed() -> None:
    data = film(num_frames=60, frames_per_s=6)
    assert len(greys(data)[0]) == 20
    seen, frames_per_s = greys(
        data, LIMITS._replace(max_video_frames=5, max_video_pixels=64_000_000)
    )
    assert np.abs(np.subtract(seen, [0, 14, 29, 44, 59])).max() <= 2
    assert frames_per_s == pytest.approx(0.5)
    assert len(greys(data, LIMITS._replace(max_video_pixels=8 * WIDTH * HEIGHT))[0]) == 8


def test_a_camera_that_was_held_upright_gives_upright_frames() -> None:
    data = film()
    matrix = data.find(b"tkhd") + 44
    turned = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)
    data = data[:matrix] + turned + data[matrix + len(turned) :]
    frames, _ = decode_video(data, container_of(data), LIMITS)
    last = np.asarray(frames[-1])
    assert last.shape == (WIDTH, HEIGHT, 3)
    top = last[: WIDTH // 2]
    bottom = last[WIDTH // 2 :]
    assert np.ptp(top.mean((0, 1))) < 10  # grey
    assert bottom[4:, :, 0].mean() > 150 > 50 > bottom[4:, :, 1].mean()  # red


def test_a_video_beyond_the_limits_is_refused_by_its_size() -> None:
    data = film()
    for limits, words in [
        (
            LIMITS._replace(max_video_pixels=3 * WIDTH * HEIGHT),
            "frames of 64 x 48 pixels are too large",
        ),
        (LIMITS._replace(max_video_pixels=4 * WIDTH * HEIGHT), ""),
    ]:
        if not words:
            assert len(greys(data, limits)[0]) == 4
            continue
        with pytest.raises(MediaTooLarge, match=words) as refused:
            greys(data, limits)
        assert refused.value.limit == "max_video_pixels"
    long = film(num_frames=300)
    with pytest.raises(MediaTooLarge, match="its 300 frames of 64 x 48 pixels have 921,600 pixels"):
        greys(long, LIMITS._replace(max_video_pixels=4 * WIDTH * HEIGHT))


def test_a_truncated_or_damaged_video_is_refused_or_has_all_its_frames() -> None:
    whole = film(format="webm", codec="libvpx") if "libvpx" in av.codecs_available else film()
    rng = np.random.default_rng(5)
    refused = 0
    for _ in range(40):
        data = bytearray(whole[: rng.integers(8, len(whole) + 1)])
        for at in rng.integers(8, len(data), 4):
            data[at] ^= int(rng.integers(1, 256))
        try:
            frames, frames_per_s = decode_video(bytes(data), container_of(whole), LIMITS)
        except MediaError:
            refused += 1
            continue
        assert frames
        assert frames_per_s > 0
    assert refused > 10


def test_other_files_have_no_video_container() -> None:
    for data in (b"", b"GIF89a", b"\0\0\0\x20ftypheic" + bytes(20), b"\0\0\0\x20ftypavif"):
        assert container_of(data) == ""
    assert container_of(film()) == "mov"
    for data in (b"\0\0\0\x20ftypmp42" + bytes(99), b"\x1a\x45\xdf\xa3" + bytes(99)):
        with pytest.raises(MediaError, match="cannot be decoded as a video"):
            decode_video(data, container_of(data), LIMITS)
