from __future__ import annotations

import base64
import subprocess
import sys
from typing import Any

import pytest

from tests.text.media_fakes import FakeProcessor, animation, picture, png_of_size, saved
from weft.text.media.errors import MediaError, MediaTooLarge
from weft.text.media.families import make_processor
from weft.text.media.fetch import Fetcher, MediaAccess
from weft.text.media.limits import MediaLimits
from weft.text.media.loader import MediaLoader, MediaRefusal, token_ids
from weft.text.media.sources import PIECE_LEN, MediaSource, Raw, read_inline, text_source

PNG = saved(picture())
TEXT = base64.b64encode(PNG).decode()


def loader(cache_bytes: int = 0, **limits: Any) -> tuple[MediaLoader, FakeProcessor]:
    processor = FakeProcessor()
    ids = token_ids(processor, lambda text: [7])
    access = Fetcher(MediaAccess())
    return MediaLoader(processor, ids, access, MediaLimits(**limits), cache_bytes), processor


def image(**fields: Any) -> MediaSource:
    return MediaSource("image", "content[0]", **fields)


@pytest.mark.parametrize(
    "source",
    [
        image(data=PNG),
        image(base64=TEXT),
        image(base64="\r\n".join([TEXT[:5], TEXT[5:], ""])),
        image(url=f"data:image/png;base64,{base64.encodebytes(PNG).decode()}"),
        image(url=f"data:image/png;base64,{TEXT}"),
        image(url=f"DATA:;base64,{TEXT}"),
        image(url=f"data:text/html;charset=utf-8;base64,{TEXT}"),
        text_source("image", "x", TEXT),
        text_source("image", "x", f"data:image/svg+xml;base64,{TEXT}"),
    ],
)
def test_all_forms_of_a_picture_are_the_same(source: MediaSource) -> None:
    loads, _ = loader()
    [made] = loads.load([source])
    assert made.text == "<<pad><pad>>"
    [item] = made.items
    assert item.kind == "image"
    assert item.length == 2
    assert item.grid == (1, 1, 2)
    assert item.shape == (3,)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (image(base64="AAA#"), r"not base64: its character 4 is '#'; A to Z.* are allowed"),
        (image(base64="AA\nA-A_AA"), "not base64: its character 4 is '-'"),
        (image(base64="AAA"), "its length is 3; a multiple of 4"),
        (image(base64="AA==AAAA"), "not base64: its character 3 is '='"),
        (image(base64="ÄÄÄÄ"), "not base64: its character 1 is 'Ä'"),
        (image(base64="A" * PIECE_LEN + "A AA"), "not base64: its character 1,048,578 is ' '"),
        (image(base64=""), "it is empty"),
        (image(url="data:"), "without a comma"),
        (image(url="data:image/png,abc"), "not base64"),
        (image(url="data:" + "x" * 2_000 + ";base64,AAAA"), "without a comma"),
        (image(url="data:image/png;base64,aGk="), "like no known format"),
        (image(url="file:///etc/passwd"), "--allowed-local-media-path"),
        (image(url="http://example.com/a.png"), "--allowed-media-domains"),
        (image(url="ftp://example.com/a.png"), "of the kind 'ftp://example.co'"),
        (image(url="javascript:alert(1)"), "of the kind"),
        (image(data=saved(picture(1, 1))), "too narrow for this model"),
        (MediaSource("audio", "content[0]", data=b"RIFF"), "takes no sounds"),
    ],
)
def test_unavailable_media_are_refused_with_their_field(source: MediaSource, words: str) -> None:
    loads, processor = loader()
    with pytest.raises(MediaRefusal, match=words) as caught:
        loads.load([image(data=PNG), source])
    assert str(caught.value).startswith("content[0]: ")
    assert len(processor.seen) < 3


def test_more_bytes_than_allowed_are_not_decoded() -> None:
    loads, processor = loader(max_bytes=len(PNG) + 10)
    loads.load([image(base64=TEXT)])
    with pytest.raises(MediaRefusal, match=r"MB are allowed \(--max-media-mb\)$") as caught:
        loads.load([image(base64=TEXT), image(base64=TEXT)])
    assert caught.value.limit == "max_media_mb"
    huge = MediaSource("image", "x", base64="A" * 4_000_000)
    with pytest.raises(MediaTooLarge):
        read_inline(huge, 1_000_000)
    assert len(processor.seen) == 2


def test_base64_is_decoded_in_pieces() -> None:
    data = bytes(range(256)) * 20_000
    text = base64.b64encode(data + b"x").decode()
    assert read_inline(image(base64=text), 10_000_000) == Raw((data + b"x",))


def test_the_number_of_each_kind_is_limited() -> None:
    loads, processor = loader(per_prompt={"image": 2})
    with pytest.raises(MediaRefusal, match=r"3 images; 2 are allowed \(--limit-mm-per-prompt\)"):
        loads.load([image(data=PNG)] * 3)
    with pytest.raises(MediaRefusal, match="1 video; 0 are allowed"):
        loads.load([MediaSource("video", "v", data=PNG)])
    assert not processor.seen


def test_a_picture_that_was_there_is_not_decoded_again() -> None:
    loads, processor = loader(cache_bytes=10_000)
    first, second = loads.load([image(data=PNG), image(base64=TEXT)])
    assert first is second
    assert len(processor.seen) == 1
    loads.load([image(data=PNG + b"more")])  # the same picture in another file
    assert len(processor.seen) == 2
    loads.load([MediaSource("video", "v", data=PNG)])  # the same file as another thing
    assert len(processor.seen) == 3


def test_the_cache_forgets_what_was_used_least_recently() -> None:
    files = [saved(picture(8, 8, (value, 0, 0))) for value in range(4)]
    sources = [image(data=file) for file in files]
    loads, processor = loader()
    [made] = loads.load(sources[:1])
    loads, processor = loader(cache_bytes=2 * made.num_bytes)
    loads.load([sources[0], sources[1], sources[0], sources[2]])
    assert len(processor.seen) == 3
    loads.load([sources[0]])
    assert len(processor.seen) == 3
    loads.load([sources[1]])
    assert len(processor.seen) == 4


def test_a_video_comes_as_an_animation_or_as_pictures() -> None:
    loads, processor = loader()
    [made] = loads.load([MediaSource("video", "v", data=animation(3))])
    assert made.text == "0.0s<pad><pad> 0.2s<pad><pad> 0.5s<pad><pad>"
    assert [item.kind for item in made.items] == ["video"] * 3
    url = f"data:video/jpeg;base64,{TEXT},{TEXT}"
    assert loads.load([MediaSource("video", "v", url=url)])[0].text.startswith(
        "0.0s<pad><pad> 0.5s"
    )
    url = f"data:video/jpeg;fps=4;base64,{TEXT},{TEXT}"
    assert loads.load([MediaSource("video", "v", url=url)])[0].text.startswith(
        "0.0s<pad><pad> 0.2s"
    )
    assert len(processor.seen) == 7


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (f"data:video/jpeg;fps=0;base64,{TEXT}", "its fps are '0'"),
        (f"data:video/jpeg;fps=nan;base64,{TEXT}", "its fps are 'nan'"),
        (f"data:video/jpeg;base64,{TEXT},", "its frame 1 is empty"),
        ("data:video/mp4;base64,aGVsbG8=", "no known format; MP4, MOV, WebM and Matroska"),
        ("data:video/jpeg;base64,aGVsbG8=,aGVsbG8=", "no known format; PNG, JPEG"),
        (
            f"data:video/jpeg;base64,{TEXT},{base64.b64encode(saved(picture(4, 4))).decode()}",
            "size",
        ),
        ("data:video/jpeg;base64," + ",".join([TEXT] * 5), "5 frames; 4 are allowed"),
        ("data:video/mp4;base64,AAAAIGZ0eXBpc29t", "cannot be decoded as a video"),
    ],
)
def test_a_video_that_is_none_is_refused(url: str, words: str) -> None:
    loads, _ = loader(max_video_frames=4)
    with pytest.raises(MediaRefusal, match=words):
        loads.load([MediaSource("video", "v", url=url)])


def test_large_pictures_are_long_work() -> None:
    loads, _ = loader(cache_bytes=10_000)
    assert not loads.look(image(data=PNG), Raw((PNG,))).is_long
    large = png_of_size(2_000, 2_000)
    assert loads.look(image(data=large), Raw((large,))).is_long
    nothing = b"no head"
    assert loads.look(image(data=nothing), Raw((nothing,))).is_long


def test_a_placeholder_that_the_tokenizer_does_not_know_is_an_error() -> None:
    with pytest.raises(ValueError, match="no token '<pad>', which stands for images"):
        token_ids(FakeProcessor(), lambda text: [1, 2])


def test_a_model_of_texts_has_no_processor_and_imports_no_pillow() -> None:
    from pathlib import Path

    assert make_processor(Path("none"), {"architectures": ["LlamaForCausalLM"]}) is None
    assert make_processor(Path("none"), {}) is None
    code = "import sys, weft.text.media.loader, weft.server.app; print('PIL' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_errors_of_media_are_errors_of_values() -> None:
    assert issubclass(MediaError, ValueError)
