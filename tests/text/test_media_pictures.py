from __future__ import annotations

import pytest
from PIL import Image

from tests.text.media_fakes import animation, packed_zeros, picture, png_chunk, png_of_size, saved
from tests.text.picture_headers import bmp_of_size, gif_of_size, jpeg_of_size, webp_of_size
from weft.text.media.errors import MediaError, MediaTooLarge
from weft.text.media.limits import MediaLimits
from weft.text.media.pictures import decode_frames, decode_picture, format_of, open_picture

MOST = 1_000_000
LIMITS = MediaLimits(max_video_frames=8, max_video_pixels=MOST)
SVG = b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"><image href="http://127.0.0.1/"/></svg>'


def decoded(data: bytes, most: int = MOST) -> Image.Image:
    return decode_picture(open_picture(data, most))


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_a_picture_is_what_its_bytes_say(format: str) -> None:
    data = saved(picture(9, 5, (0, 0, 255)), format)
    assert format_of(data) == format
    image = decoded(data)
    assert image.mode == "RGB"
    assert image.size == (9, 5)
    red, green, blue = image.getpixel((4, 2))  # type: ignore[misc]
    assert blue > 250
    assert red + green < 10


@pytest.mark.parametrize(
    ("image", "format"),
    [
        (picture(mode="CMYK", colour=(0, 255, 255, 0)), "JPEG"),
        (picture(mode="RGBA", colour=(255, 0, 0, 0)), "PNG"),
        (picture(mode="L", colour=77), "PNG"),
        (picture(mode="LA", colour=(77, 3)), "PNG"),
        (picture(mode="1", colour=1), "PNG"),
        (picture(mode="P", colour=3), "PNG"),
        (picture(mode="I;16", colour=40_000), "PNG"),
        (picture(mode="RGBA", colour=(255, 0, 0, 9)), "WEBP"),
    ],
    ids=lambda value: getattr(value, "mode", value),
)
def test_any_mode_becomes_rgb_as_pillow_makes_it(image: Image.Image, format: str) -> None:
    data = saved(image, format)
    found = decoded(data)
    import io

    assert found.tobytes() == Image.open(io.BytesIO(data)).convert("RGB").tobytes()


@pytest.mark.parametrize("orientation", range(1, 10))
def test_a_picture_stands_upright(orientation: int) -> None:
    from PIL import ImageOps

    image = Image.effect_noise((6, 4), 80).convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(image, "PNG", exif=exif)
    expected = ImageOps.exif_transpose(open_picture(data, MOST))
    assert decoded(data).tobytes() == expected.tobytes()
    assert decoded(data).size == expected.size


def test_the_first_frame_of_an_animation_is_the_picture() -> None:
    for format in ("GIF", "WEBP", "PNG"):
        assert decoded(animation(3, format=format)).getpixel((0, 0))[0] < 6  # type: ignore[index]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "it is empty"),
        (SVG, "an SVG"),
        (b"  <svg></svg>", "it is an SVG"),
        (b"<!DOCTYPE html><html></html>", "a page of HTML"),
        (b"%PDF-1.7", "it is a PDF"),
        (b"PK\x03\x04....", "a ZIP archive"),
        (b"\0\0\0\x20ftypavif", "MP4, HEIC or AVIF"),
        (b"II*\0....", "a TIFF"),
        (b"RIFF....WAVEfmt ", "a RIFF file of another kind"),
        (b"hello", "like no known format"),
        (b"\x89PNG\r\n\x1a\n", "cannot be read"),
        (b"\xff\xd8\xff", "cannot be read"),
        (b"GIF89a", "cannot be read"),
        (b"BM", "cannot be read"),
        (b"RIFF....WEBP", "cannot be read"),
        (b"RIFF....WEBPVP8 ", "is cut off"),
        (b"RIFF....WEBPVP8L", "is cut off"),
    ],
)
def test_files_that_are_no_pictures_are_refused_by_name(data: bytes, words: str) -> None:
    with pytest.raises(MediaError, match=words):
        open_picture(data, MOST)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (png_of_size(50_000, 50_000), "1,000,000 that are allowed"),
        (webp_of_size(16_383, 16_383), "268,402,689; 500,000 are allowed in a WebP file"),
        (webp_of_size(1 << 24, 1 << 24), "500,000 are allowed in a WebP file"),
        (bmp_of_size(50_000, 50_000), "1,000,000 that are allowed"),
        (jpeg_of_size(50_000, 50_000), "1,000,000 that are allowed"),
        (jpeg_of_size(2_001, 2_000), "4,002,000; 4,000,000 are allowed in a JPEG"),
        (gif_of_size(50_000, 50_000), "1,000,000 that are allowed"),
        (png_of_size(1_001, 1_000), r"1,001,000; 1,000,000 are allowed \(--max-image-pixels\)$"),
    ],
    ids=["png", "webp", "webp24", "bmp", "jpeg", "jpeg_over", "gif", "just_over"],
)
def test_too_many_pixels_are_refused_before_any_is_decoded(data: bytes, words: str) -> None:
    with pytest.raises(MediaTooLarge, match=words) as caught:
        open_picture(data, MOST)
    assert caught.value.limit == "max_image_pixels"


def cut(format: str) -> bytes:
    data = saved(Image.effect_noise((64, 64), 90).convert("RGB"), format)
    return data[: len(data) // 2]


@pytest.mark.parametrize(
    "data",
    [
        *map(cut, ["PNG", "JPEG", "WEBP", "GIF", "BMP"]),
        png_of_size(900, 900),
        png_of_size(100, 100, 10),
        jpeg_of_size(900, 900)[:300],
        bmp_of_size(900, 900),
        webp_of_size(700, 700),
        gif_of_size(900, 900),
        saved(picture(mode="RGB")).replace(b"IDAT", b"IDAX"),
    ],
)
def test_a_damaged_file_is_refused(data: bytes) -> None:
    with pytest.raises(MediaError, match=r"cannot be (decoded|read)"):
        decoded(data)


def test_data_that_no_decoder_asks_for_does_no_harm() -> None:
    """An EXIF block of nonsense, one that refers to itself, and a picture that is a ZIP, too."""
    plain = saved(picture())
    for exif in (b"Exif\0\0nonsense", b"II*\0\x08\0\0\0" + b"\xff" * 60_000, bytes(5)):
        with_exif = plain[:33] + png_chunk(b"eXIf", exif) + plain[33:]
        assert decoded(with_exif).tobytes() == picture().tobytes()
    loop = b"II*\0\x08\0\0\0\x01\0\x69\x87\x04\0\x01\0\0\0\x08\0\0\0\0\0\0\0"
    assert decoded(saved(picture(), "JPEG", exif=b"Exif\0\0" + loop)).size == (8, 8)
    assert decoded(plain + b"PK\x03\x04 and more").tobytes() == picture().tobytes()


def test_a_compressed_text_that_grows_is_not_unpacked() -> None:
    plain = saved(picture())
    bomb = b"a\0\0" + packed_zeros(50_000_000)
    data = plain[:33] + png_chunk(b"zTXt", bomb) + plain[33:]
    with pytest.raises(MediaError):
        decoded(data)


def test_frames_of_an_animation_have_a_rate() -> None:
    for format in ("GIF", "WEBP", "PNG"):
        frames, rate = decode_frames(open_picture(animation(5, format=format), MOST), LIMITS)
        assert len(frames) == 5
        assert rate == pytest.approx(4.0)
        assert [frame.mode for frame in frames] == ["RGB"] * 5
    frames, rate = decode_frames(open_picture(saved(picture()), MOST), LIMITS)
    assert len(frames) == 1
    assert rate == 0.0


def test_too_many_frames_are_refused_before_any_is_decoded() -> None:
    image = open_picture(animation(9), MOST)
    with pytest.raises(MediaTooLarge, match="9 frames; 8 are allowed"):
        decode_frames(image, LIMITS)
    with pytest.raises(MediaTooLarge, match="have 576 pixels; 500 are allowed"):
        decode_frames(image, MediaLimits(max_video_frames=9, max_video_pixels=500))
    broken = animation(4)[:-40]
    with pytest.raises(MediaError, match="frame"):
        decode_frames(open_picture(broken, MOST), LIMITS)
