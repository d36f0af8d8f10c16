"""What a file of a client may cost: shapes that multiply (sides, scans, frames, chunks, rates), and
processes that take too long, too much, or crash. All is counted; no clock is read."""

from __future__ import annotations

import asyncio
import io
import struct
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from tests.seeds import chosen, slow
from tests.text.media_fakes import (
    CRASHING,
    FAULTY,
    GREEDY,
    LATE,
    SEEING,
    TROUBLED,
    animation,
    picture,
    png_chunk,
    png_of_size,
    saved,
)
from tests.text.picture_headers import bmp_of_size, gif_of_size, jpeg_of_size, webp_of_size
from tests.text.recipes import RECIPES
from tests.text.scanned_pictures import scanned
from weft.text.media import heads, reader_helper, resample, sound
from weft.text.media.errors import MediaError, MediaTooLarge
from weft.text.media.heads import gif_frames, num_scans, size_in_head
from weft.text.media.limits import MAX_RATIO, MAX_SCANS, MAX_SIDE, MediaLimits
from weft.text.media.pictures import decode_frames, decode_picture, open_picture
from weft.text.media.reader import read_media
from weft.text.media.reader_helper import MediaReaders, ReaderFault
from weft.text.media.sound import SoundLimit
from weft.text.media.sources import Raw
from weft.text.media.wav import MAX_CHUNKS

LIMITS = MediaLimits()
MOST = LIMITS.max_image_pixels


def go(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main())


@pytest.fixture
def nothing_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: Any) -> None:
        raise AssertionError("a pixel is decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)


# ---- sides


SIZED = {
    "png": png_of_size,
    "bmp": bmp_of_size,
    "gif": gif_of_size,
    "jpeg": jpeg_of_size,
    "webp": webp_of_size,
}


@pytest.mark.parametrize(
    ("sides", "words"),
    [
        ((MOST, 1), "36,000,000 x 1 pixels large; one side may have at most 32,768"),
        ((1_000_000, 1), "1,000,000 x 1 pixels large; one side may have at most 32,768"),
        ((MAX_SIDE + 1, 1_000), "32,769 x 1,000 pixels large; one side may have at most 32,768"),
        ((MAX_RATIO + 1, 1), "201 x 1 pixels large; one side may be at most 200 times as long"),
        ((16_000, 79), "16,000 x 79 pixels large; one side may be at most 200 times as long"),
    ],
)
@pytest.mark.parametrize("format", SIZED)
@pytest.mark.usefixtures("nothing_is_decoded")
def test_a_side_and_the_ratio_of_sides_are_bounded_in_every_format(
    format: str, sides: tuple[int, int], words: str
) -> None:
    most = {"gif": 65_535, "jpeg": 65_500, "webp": 16_384}
    if max(sides) > most.get(format, 1 << 30):
        pytest.skip("the format has no such sides")
    make = SIZED[format]
    with pytest.raises(MediaError, match=words):
        open_picture(make(*sides), MOST)
    width, height = sides
    with pytest.raises(MediaError, match=r"one side may"):
        open_picture(make(height, width), MOST)


@pytest.mark.parametrize("format", SIZED)
def test_the_size_in_a_head_is_that_of_the_picture(format: str) -> None:
    """By it a picture is long work or not, before a process reads it."""
    assert size_in_head(SIZED[format](1_500, 900)) == (1_500, 900) or format == "gif"
    name = format.upper()
    real = saved(Image.effect_noise((70, 30), 50).convert("RGB"), name)
    assert size_in_head(real) == (70, 30)
    for length in range(0, 40, 3):
        size_in_head(real[:length])  # says something, or nothing


# Of two recipes with the same processor, that with more to do.
USUAL = ("gemma 3 in pieces", "smolvlm", "llava that pads", "mistral 3", "qwen3-vl")


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_helper, "NUM_PROCESSES", 1)


@pytest.mark.parametrize("name", chosen(USUAL, RECIPES))
@pytest.mark.usefixtures("one_process")
def test_no_picture_within_the_bounds_takes_more_than_its_memory_and_time(name: str) -> None:
    """Read in a real process, by the processor of each family, at the ends of the bounds: what
    multiplies within them must not multiply beyond them."""
    limits = MediaLimits(max_image_pixels=3_200 * 16)
    recipe = RECIPES[name]
    pictures = {
        sides: saved(Image.effect_noise(sides, 50).convert("RGB"))
        for sides in [(3_200, 16), (16, 3_200), (225, 225), (1, 200), (1, 1)]
    }

    async def outcome(readers: MediaReaders, data: bytes) -> list[bytes] | str:
        try:
            made = await readers.read("image", Raw((data,)), {}, is_long=False)
            return [item.values for item in made.items]
        except ValueError as exc:
            return str(exc)

    async def main() -> None:
        readers = MediaReaders(recipe, limits)
        for sides, data in pictures.items():
            found = await outcome(readers, data)
            if isinstance(found, str):
                assert "one side may be at most" in found, (sides, found)
                continue
            here = read_media(recipe.make(), limits, "image", [data], 0.0)
            values = [np.asarray(part.values, "<f4").tobytes() for part in here.parts]
            assert found == values, sides
        readers.close()

    go(main)


def test_a_picture_that_is_padded_to_a_square_has_bounded_sides() -> None:
    padding = RECIPES["llava that pads"].make()
    with pytest.raises(ValueError, match="8193 x 50 pixels, and this model pads pictures"):
        padding.image(picture(8_193, 50))


# ---- scans, and JPEGs that are reduced


@pytest.mark.usefixtures("nothing_is_decoded")
def test_scans_are_counted_before_any_is_decoded_and_no_further_than_needed() -> None:
    few = num_scans(scanned(0), MAX_SCANS)
    assert 5 < few < 20
    assert num_scans(scanned(7), MAX_SCANS) == few + 7
    assert num_scans(scanned(20_000), MAX_SCANS) == MAX_SCANS + 1
    open_picture(scanned(MAX_SCANS - few), MOST)
    with pytest.raises(MediaError, match="more than 100 scans; 100 are allowed"):
        open_picture(scanned(MAX_SCANS - few + 1), MOST)


def test_scans_of_a_thumbnail_or_behind_the_end_are_not_those_of_the_picture() -> None:
    plain = saved(picture(64, 64), "JPEG")
    inside = scanned(300)[:60_000]
    segment = b"\xff\xe1" + struct.pack(">H", 2 + len(inside)) + inside
    data = plain[:2] + segment + plain[2:] + scanned(300)
    assert num_scans(data, MAX_SCANS) == num_scans(plain, MAX_SCANS) == 1
    assert decode_picture(open_picture(data, MOST)).size == (64, 64)


def test_a_jpeg_of_segments_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "MAX_PARTS", 1_000)
    plain = saved(picture(), "JPEG")
    many = plain[:2] + b"\xff\xe0\0\x02" * 1_000 + plain[2:]
    with pytest.raises(MediaError, match="more than the 1,000 segments"):
        open_picture(many, MOST)
    assert size_in_head(plain[:2] + b"\xff\xe0\0\x02" * heads.FEW_PARTS + plain[2:]) is None


def test_a_jpeg_beyond_the_pixels_is_reduced_while_it_is_decoded() -> None:
    image = Image.effect_noise((600, 400), 20).convert("RGB")
    data = saved(image, "JPEG", quality=95)
    whole = decode_picture(open_picture(data, 240_000))
    assert whole.tobytes() == Image.open(io.BytesIO(data)).tobytes()
    half = decode_picture(open_picture(data, 239_999))
    assert half.size == (300, 200)
    assert np.abs(np.subtract(half, image.reduce(2), dtype=np.float64)).mean() < 4
    assert decode_picture(open_picture(data, 60_000)).size == (300, 200)
    with pytest.raises(MediaTooLarge, match="239,996 are allowed in a JPEG"):
        open_picture(data, 59_999)
    odd = saved(picture(601, 401), "JPEG")
    assert decode_picture(open_picture(odd, 60_300)).size == (151, 101)


# ---- frames and chunks


def test_frames_of_a_gif_are_counted_without_reading_one() -> None:
    for num in (1, 2, 300):
        assert gif_frames(animation(num)) == num
        assert Image.open(io.BytesIO(animation(num))).n_frames == num
    few = MediaLimits(max_video_frames=8)
    with pytest.raises(MediaTooLarge, match=r"300 frames; 8 are allowed \(--max-video-frames\)$"):
        decode_frames(open_picture(animation(300), MOST), few)


def test_a_gif_of_blocks_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "MAX_PARTS", 100)
    data = animation(2)
    comment = b"!\xfe" + b"\x01a" * 1_001 + b"\0"
    with pytest.raises(MediaError, match="more than the 1,000 blocks"):
        gif_frames(data[:-1] + comment)
    with pytest.raises(MediaError, match="more than the 1,000 blocks"):
        gif_frames(data[:-1] + b"!\xfe\0" * 1_001)
    assert gif_frames(data[:-1] + b"x" * 5_000) == 2
    assert gif_frames(b"GIF89a") == 0


def test_an_animation_that_announces_frames_without_end_is_refused() -> None:
    data = animation(3, format="PNG")
    place = data.index(b"acTL")
    control = data[place + 4 : place + 12]
    more = struct.pack(">I", 2**31 - 1) + control[4:]
    data = data[: place - 4] + png_chunk(b"acTL", more) + data[place + 16 :]
    with pytest.raises(MediaTooLarge, match=r"2,147,483,647 frames|have .* pixels"):
        decode_frames(open_picture(data, MOST), LIMITS)


def test_a_sound_of_chunks_without_end_is_refused() -> None:
    data = b"RIFF\0\0\0\0WAVE" + b"junk\0\0\0\0" * (MAX_CHUNKS + 1)
    with pytest.raises(ValueError, match="more than the 1,000 chunks"):
        sound.decode_sound(data, 16_000)


def test_a_video_of_packets_without_end_is_refused() -> None:
    pytest.importorskip("av", reason="the package av is not installed")
    from tests.text.films import film
    from weft.text.media.video import container_of, decode_video

    data = film(num_frames=129)
    few = MediaLimits(max_video_frames=2)
    with pytest.raises(MediaTooLarge, match="more than 128 frames, 64 for each of the 2"):
        decode_video(data, container_of(data), few)


# ---- sounds


def wav_head(rate: int, channels: int, bits: int = 16, data: bytes = bytes(16)) -> bytes:
    frame = channels * bits // 8 % 65_536
    layout = struct.pack("<HHIIHH", 1, channels, rate, 0, frame, bits)
    chunks = b"fmt " + struct.pack("<I", 16) + layout
    chunks += b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


@pytest.mark.parametrize("rate", [0, 1, 3_999, 192_001, 1_000_000_000, 2**32 - 1])
def test_a_rate_of_a_sound_is_bounded_before_it_is_resampled(
    rate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sound, "resample", None)
    with pytest.raises(ValueError, match=f"{rate} samples a second; from 4000 to 192000"):
        sound.decode_sound(wav_head(rate, 1), 16_000)


@pytest.mark.parametrize("channels", [0, 9, 255, 65_535])
def test_the_channels_of_a_sound_are_bounded(channels: int) -> None:
    data = bytes(channels * 2 * 4)
    with pytest.raises(ValueError, match=r"channels"):
        sound.decode_sound(wav_head(16_000, channels, data=data), 16_000)


@pytest.mark.parametrize("rate", [4_000, 44_100, 191_999, *slow([4_001, 192_000])])
def test_no_rate_multiplies_the_filters_of_a_sound(
    rate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rates without a common divisor have a filter for each sample of a second, and no more."""
    taps: list[int] = []
    products: list[int] = []
    filters = resample._filters
    filtered = resample._filtered

    def counted(fractions: Any, half: int, cutoff: float) -> Any:
        taps.append(len(fractions) * 2 * half)
        return filters(fractions, half, cutoff)

    def counting(windows: Any, own: Any, outputs: Any) -> None:
        products.append(len(outputs) * len(own))
        filtered(windows, own, outputs)

    monkeypatch.setattr(resample, "_filters", counted)
    monkeypatch.setattr(resample, "_filtered", counting)
    wanted = 16_000
    seconds = 2
    found = sound.decode_sound(wav_head(rate, 1, data=bytes(2 * rate * seconds)), wanted)
    assert len(found) == wanted * seconds
    widest = 2 * resample.ZEROS * (192_000 // wanted)
    assert sum(taps) <= wanted * widest
    assert sum(products) <= len(found) * widest


# ---- processes


@pytest.fixture
def troubled() -> Iterator[MediaReaders]:
    readers = MediaReaders(TROUBLED, MediaLimits(max_image_pixels=1_000))
    yield readers
    readers.close()


def read(readers: MediaReaders, colour: tuple[int, int, int], **changes: Any) -> Any:
    data = saved(picture(colour=colour))
    return readers.read("image", Raw((data,)), changes, is_long=False)


@pytest.mark.parametrize(
    ("colour", "words"),
    [
        (LATE, "it takes more than 5.0002 s of a processor to read"),
        (GREEDY, "it takes more than 537 MB of memory to read"),
        (CRASHING, "it takes more than 537 MB of memory to read"),
    ],
)
def test_a_file_that_takes_too_much_ends_its_process_and_the_next_is_read(
    troubled: MediaReaders, colour: tuple[int, int, int], words: str
) -> None:
    async def main() -> None:
        assert (await read(troubled, (255, 0, 0))).num_tokens == 2
        with pytest.raises(MediaError, match=words):
            await read(troubled, colour)
        assert (await read(troubled, (255, 0, 0))).num_tokens == 2

    go(main)


def test_a_fault_of_ours_is_reported_as_such_and_ends_nothing(troubled: MediaReaders) -> None:
    async def main() -> None:
        await read(troubled, (255, 0, 0))
        pids = [one.helper.child.pid for one in troubled.processes if one.helper.child]
        with pytest.raises(ReaderFault, match="ZeroDivisionError: a fault of ours"):
            await read(troubled, FAULTY)
        await read(troubled, (255, 0, 0))
        assert [one.helper.child.pid for one in troubled.processes if one.helper.child] == pids

    go(main)


def test_a_file_that_is_read_leaves_little_memory_in_its_process() -> None:
    """Twelve megapixels take 48 MB as they are decoded; afterwards the process has less than it may
    keep."""

    async def main() -> None:
        readers = MediaReaders(SEEING, LIMITS)
        try:
            small = Raw((saved(picture()),))
            large = Raw((saved(picture(4_000, 3_000)),))
            await readers.read("image", small, {}, is_long=False)
            child = readers.processes[0].helper.child
            assert child is not None
            before = resident(child.pid)
            await readers.read("image", large, {}, is_long=True)
            await readers.read("image", small, {}, is_long=False)
            assert resident(child.pid) - before < 80_000_000
        finally:
            readers.close()

    go(main)


def resident(pid: int) -> int:
    """Bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4_096


def test_changes_and_errors_pass_through_the_process() -> None:
    async def main() -> None:
        readers = MediaReaders(SEEING, MediaLimits(max_image_pixels=100))
        try:
            wide = Raw((saved(picture(20, 4)),))
            assert (await readers.read("image", wide, {}, is_long=False)).num_tokens == 5
            made = await readers.read("image", wide, {"max_width": 8}, is_long=False)
            assert made.num_tokens == 2
            with pytest.raises(MediaTooLarge, match="121; 100 are allowed") as caught:
                await readers.read("image", Raw((saved(picture(11, 11)),)), {}, is_long=False)
            assert caught.value.limit == "max_image_pixels"
            frames = Raw(tuple(saved(picture(4, 4)) for _ in range(3)), 2.0)
            made = await readers.read("video", frames, {}, is_long=True)
            assert [item.length for item in made.items] == [1, 1, 1]
            assert all(len(item.values) == 12 for item in made.items)
        finally:
            readers.close()

    go(main)


def test_a_head_that_promises_short_work_does_not_get_the_last_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A PNG with two heads: the first one is small, and decoders believe the second."""
    large = saved(picture(1_500, 1_400))
    first = png_chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0))
    data = large[:8] + first + large[8:]
    assert size_in_head(data) == (8, 8)
    turns: list[bool] = []

    async def main() -> None:
        readers = MediaReaders(SEEING, LIMITS)
        run = readers._pool.run

        async def counted(work: Any, *, is_long: bool = False) -> Any:
            turns.append(is_long)
            return await run(work, is_long=is_long)

        monkeypatch.setattr(readers._pool, "run", counted)
        try:
            made = await readers.read("image", Raw((data,)), {}, is_long=False)
            assert made.num_tokens == 375
        finally:
            readers.close()

    go(main)
    assert turns == [False, True]


def test_time_and_memory_for_a_file_grow_with_the_limits_of_the_operator() -> None:
    assert LIMITS.work_s("image") == pytest.approx(12.2)
    assert LIMITS.work_s("video") == pytest.approx(69)
    assert LIMITS.work_s("audio") == pytest.approx(15)
    more = LIMITS._replace(max_image_pixels=80_000_000, audio=SoundLimit(600.0))
    for kind in ("image", "audio"):
        assert more.work_s(kind) > LIMITS.work_s(kind)  # type: ignore[arg-type]
        assert more.work_bytes(kind) > LIMITS.work_bytes(kind)  # type: ignore[arg-type]
