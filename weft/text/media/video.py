"""Decodes video files: MP4, MOV, WebM and Matroska, with the package av (PyAV, FFmpeg's decoders),
if it is installed.

A first pass over a file reads the times of its frames without decoding; the number and size of the
frames are checked against the limits. A second pass decodes the file and keeps frames at even
distances in time.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from weft.text.media.errors import MediaError, MediaTooLarge
from weft.text.media.limits import PACKETS_PER_FRAME, MediaLimits

if TYPE_CHECKING:
    from PIL.Image import Image

FRAMES_PER_S = 2.0  # frames per second to keep, like Qwen's own tools
MIN_FRAMES = 4
# Most pixels to decode, as a multiple of the pixels that may be kept: about a minute of 1080p.
DECODED_PER_KEPT = 64
MARGIN_PIXELS = 1 << 20  # for the borders that FFmpeg adds to a frame and counts
# FFmpeg has hundreds of formats and decoders; only these ever read a byte.
CODECS = "h264,hevc,mpeg4,vp8,libvpx,vp9,libvpx-vp9,av1,libdav1d,mjpeg"
PICTURE_BRANDS = (b"heic", b"heix", b"mif1", b"msf1", b"avif", b"avis")
ALLOWED = "MP4, MOV, WebM and Matroska videos, and GIF, WebP and PNG animations are allowed"
EBML = b"\x1a\x45\xdf\xa3"

Times: TypeAlias = NDArray[np.float64]


def container_of(data: bytes) -> str:
    """FFmpeg's name of the container, from the first bytes; "" if it is not a video."""
    if data[4:8] == b"ftyp" and data[8:12] not in PICTURE_BRANDS:
        return "mov"
    if data.startswith(EBML):
        return "matroska"
    return ""


def decode_video(
    data: bytes,
    format: str,
    limits: MediaLimits,
) -> tuple[list[Image], float]:
    """The kept frames of a file, in RGB and upright, and their number per second.

    `format`: from `container_of`. Two frames per second are kept, at least 4 if the file has them,
    and at most those that `limits` allow. Raises `MediaError` for a damaged or too large file, and
    for one that no allowed decoder reads.
    """
    try:
        import av
    except (ImportError, OSError):  # OSError: a C library is missing
        raise MediaError(
            "it is an MP4, MOV, WebM or Matroska video, and this server reads only animations "
            "and frames: the package av is not installed (pip install av)"
        ) from None
    try:
        times = _times(av, data, format, limits)
        with _opened(av, data, format, limits) as container:
            stream = container.streams.video[0]
            size = (stream.codec_context.width, stream.codec_context.height)
            wanted, frames_per_s = _wanted(times, size, limits)
            return _decoded(container, stream, size, wanted), frames_per_s
    except av.FFmpegError as exc:
        raise MediaError(f"it cannot be decoded as a video: {exc.strerror}") from exc


def _opened(
    av: Any,
    data: bytes,
    format: str,
    limits: MediaLimits,
) -> Any:
    """Open a file for decoding on one core, so that the others can serve.

    FFmpeg opens nothing outside of `data`. It allocates no frame larger than the limit of all
    frames together: it decodes some frames when it opens a file. Raises `MediaError`.
    """
    largest = {"max_pixels": str(limits.max_video_pixels + MARGIN_PIXELS)}
    options = {"codec_whitelist": CODECS, "enable_drefs": "0", "use_absolute_path": "0", **largest}
    container = av.open(io.BytesIO(data), format=format, options=options, **_any_texts(av))
    # A codec that is not known has no context from version 19 on.
    contexts = [stream.codec_context for stream in container.streams.video]
    if not contexts or contexts[0] is None:
        container.close()
        raise MediaError("it has no pictures: it is no video")
    context = contexts[0]
    context.options = largest
    context.thread_type = "NONE"
    context.thread_count = 1
    return container


def _any_texts(av: Any) -> dict[str, str]:
    """The arguments by which texts in a file need not be UTF-8. From version 19 on there are
    none: it replaces what it cannot read."""
    if int(av.__version__.partition(".")[0]) >= 19:
        return {}
    return {"metadata_errors": "ignore"}


def _times(
    av: Any,
    data: bytes,
    format: str,
    limits: MediaLimits,
) -> Times:
    """The sorted times of all frames, in seconds. Nothing is decoded."""
    with _opened(av, data, format, limits) as container:
        found: list[float] = []
        for packet in container.demux(container.streams.video[0]):
            if packet.size and packet.pts is not None:
                found.append(float(packet.pts * packet.time_base))
            if len(found) > limits.max_packets:
                raise MediaTooLarge(
                    "max_video_frames",
                    f"it has more than {limits.max_packets:,} frames, {PACKETS_PER_FRAME} for each "
                    f"of the {limits.max_video_frames:,} that are kept at most",
                )
    times = np.sort(np.asarray(found, np.float64))
    if not len(times):
        raise MediaError("it has no frames")
    return times


def _wanted(
    times: Times,
    size: tuple[int, int],
    limits: MediaLimits,
) -> tuple[NDArray[np.intp], float]:
    """The frames to keep, as ascending indices into `times`, and their number per second. Indices
    repeat if the file shows a frame for a long time."""
    width, height = size
    if width < 1 or height < 1:
        raise MediaError(f"its frames are {width} x {height} pixels large")
    num_pixels = width * height
    if num_pixels * min(len(times), MIN_FRAMES) > limits.max_video_pixels:
        message = (
            f"its frames of {width:,} x {height:,} pixels are too large: "
            f"{limits.max_video_pixels:,} pixels are allowed in all that are kept, "
            f"at least {MIN_FRAMES}"
        )
        raise MediaTooLarge("max_video_pixels", message)
    if num_pixels * len(times) > DECODED_PER_KEPT * limits.max_video_pixels:
        message = (
            f"its {len(times):,} frames of {width:,} x {height:,} pixels have "
            f"{num_pixels * len(times):,} pixels; "
            f"{DECODED_PER_KEPT * limits.max_video_pixels:,} are allowed: "
            "cut it, or make it smaller"
        )
        raise MediaTooLarge("max_video_pixels", message)
    if len(times) == 1:
        return np.zeros(1, np.intp), FRAMES_PER_S
    # The duration of the last frame is taken as the mean of the others.
    duration_s = (times[-1] - times[0]) * len(times) / (len(times) - 1)
    if duration_s <= 0:
        raise MediaError("its frames are all shown at the same time")
    most = min(len(times), limits.max_video_frames, limits.max_video_pixels // num_pixels)
    num_frames = int(min(max(round(duration_s * FRAMES_PER_S), MIN_FRAMES), most))
    at = np.linspace(times[0], times[-1], num_frames)
    wanted = np.searchsorted(times, at + 1e-6, side="right") - 1
    return wanted, num_frames / float(duration_s)


def _decoded(
    container: Any,
    stream: Any,
    size: tuple[int, int],
    wanted: NDArray[np.intp],
) -> list[Image]:
    """The decoded frames at the ascending indices `wanted`."""
    found: list[Image] = []
    for index, frame in enumerate(container.decode(stream)):
        if (frame.width, frame.height) != size:
            raise MediaError(f"its frame {index} has another size than the first")
        repeats = int(np.count_nonzero(wanted == index))
        if repeats:
            found += [_upright(frame.to_image(), int(frame.rotation))] * repeats
        if len(found) == len(wanted):
            return found
    raise MediaError(
        f"it is cut off or damaged: of the {len(wanted):,} frames that are looked at, "
        f"{len(found):,} can be decoded"
    )


def _upright(image: Image, degrees: int) -> Image:
    """The frame rotated counter-clockwise by a multiple of 90 degrees, as a phone recorded it."""
    from PIL.Image import Transpose

    rotations = {90: Transpose.ROTATE_90, 180: Transpose.ROTATE_180, 270: Transpose.ROTATE_270}
    rotation = rotations.get(degrees % 360)
    return image if rotation is None else image.transpose(rotation)
