"""Images, videos and sounds of requests: found in messages, loaded, put into prompts.

    messages ─▶ sources ─▶ fetch (threads) ─▶ decode, prepare (processes) ─▶ media
    template ─▶ text with marks ─▶ text with placeholders ─▶ ids ─▶ media at their positions

Neither the event loop nor another thread of this process decodes a file. `text/media` fetches and
decodes files; each API names its own fields.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any

from weft.config.config_json import size
from weft.config.limits import Limits
from weft.config.media_options import media_options
from weft.config.model_errors import UnsupportedModel
from weft.config.server import ServerConfig
from weft.messages.media import MediaItem, MediaKind
from weft.server.errors import ApiError, over
from weft.server.leaving import while_client_waits
from weft.text.media.adjusted import PARAM
from weft.text.media.errors import MediaError
from weft.text.media.families import ProcessorRecipe
from weft.text.media.fetch import Fetcher, MediaAccess
from weft.text.media.limits import MediaLimits
from weft.text.media.loader import MediaFile, MediaLoader, MediaRefusal, token_ids
from weft.text.media.placing import NAMES, ReadyMedia
from weft.text.media.reader_helper import MediaReaders
from weft.text.media.sound import SoundLimit
from weft.text.media.sources import MediaSource, Raw
from weft.text.media.whisper import Whisper
from weft.text.speech.vocabulary import SpeechTokens, read_tokens
from weft.text.tokenizer import ContextExceeded, Tokenizer
from weft.text.turns import Stoppable, Workers

NUM_FETCHERS = 8  # fetchers mostly wait
NUM_THREADS = 2
LONG_LEN = 1_000_000  # characters of base64 from which reading is long work
SLOW = 1.5  # times a host's time limit; the excess allows for name resolution


class ServedMedia:
    """Loads the media that requests name, for the served model. For one event loop."""

    def __init__(
        self,
        loader: MediaLoader,
        readers: MediaReaders,
        timeout_s: float,
        max_open_bytes: int,
        speech: SpeechTokens | None = None,
    ) -> None:
        """`readers` is closed with this. `timeout_s`: for media from elsewhere; `max_open_bytes`:
        limit on the encoder inputs of open requests; `speech`: the tokens of a model that writes
        down speech."""
        self._loader = loader
        self._readers = readers
        self._timeout_s = timeout_s
        self._max_open_bytes = max_open_bytes
        self.speech = speech
        self._loading: list[_Room] = []
        self._fetchers = Workers(NUM_FETCHERS, "the fetcher of media")
        self._threads = Workers(NUM_THREADS, "the reader of base64")
        self._loads = Stoppable()

    @property
    def marks(self) -> dict[MediaKind, str]:
        """The mark that a template writes for one item, for each kind that the model takes."""
        return dict(self._loader.marks)

    def check(self, sources: Sequence[MediaSource]) -> None:
        """Raise `ApiError` for kinds that the model does not take, for too many items, and for
        addresses that are not allowed."""
        try:
            self._loader.check(sources)
        except MediaRefusal as exc:
            raise _refused(exc) from exc

    def adjusted(self, kwargs: Mapping[str, Any] | None) -> ServedMedia:
        """A copy with the `mm_processor_kwargs` of a request. Raises `ApiError`."""
        if not kwargs:
            return self
        found = copy(self)
        try:
            found._loader = self._loader.adjusted(kwargs)
        except ValueError as exc:
            raise ApiError(400, str(exc), param=PARAM) from exc
        return found

    async def load(
        self,
        sources: Sequence[MediaSource],
        context_len: int,
        bytes_before: int = 0,
    ) -> list[ReadyMedia]:
        """Load all of `sources`, which `check` has accepted. `bytes_before`: bytes of the encoder
        inputs of other prompts of the request.

        Stops at the first source that fails, as soon as the media have more tokens than the
        context, and as soon as there is no room for their encoder inputs. If the caller is
        cancelled, or the client leaves, all work for it ends. Raises `ApiError`, `ContextExceeded`,
        `ClientGone`, or `Busy`.
        """
        work = self._loads.run(self._load(sources, context_len, bytes_before))
        return await while_client_waits(work)

    @contextmanager
    def holding(self, media: ReadyMedia, where: str) -> Iterator[None]:
        """Count the encoder inputs of media that the server itself keeps while it sends them to the
        engine in parts. Raises `ApiError` if there is no room."""
        room = _Room(self._loading, self._max_open_bytes, 0)
        try:
            room.take(value_bytes(media), where)
            yield
        finally:
            room.leave()

    def close(self) -> None:
        """End all that is being loaded, with `Busy`, and the processes that do it. A second call
        does nothing."""
        self._loads.stop()
        self._readers.close()
        self._fetchers.close()
        self._threads.close()

    async def _load(
        self,
        sources: Sequence[MediaSource],
        context_len: int,
        bytes_before: int,
    ) -> list[ReadyMedia]:
        room = _Room(self._loading, self._max_open_bytes, bytes_before)
        try:
            fetched = await self._fetch_all(sources)
            return await self._make_all(sources, fetched, context_len, room)
        except MediaRefusal as exc:
            raise _refused(exc) from exc
        finally:
            room.leave()

    async def _fetch_all(self, sources: Sequence[MediaSource]) -> dict[int, Raw]:
        """The bytes of the sources that are elsewhere, by their index in `sources`."""
        indices = [index for index, source in enumerate(sources) if source.is_elsewhere]
        if not indices:
            return {}
        fetched: dict[int, Raw] = {}

        async def fetch(index: int) -> None:
            left = self._left(fetched.values())
            work = partial(self._loader.read, sources[index], left)
            try:
                async with asyncio.timeout(SLOW * self._timeout_s):
                    fetched[index] = await self._fetchers.run(work)
            except TimeoutError as exc:
                late = MediaError(f"it did not arrive within {self._timeout_s:g} s")
                raise MediaRefusal(sources[index], late) from exc

        try:
            async with asyncio.TaskGroup() as group:
                for index in indices:
                    group.create_task(fetch(index))
        except BaseExceptionGroup as exc:
            raise exc.exceptions[0] from exc
        return fetched

    async def _make_all(
        self,
        sources: Sequence[MediaSource],
        fetched: dict[int, Raw],
        context_len: int,
        room: _Room,
    ) -> list[ReadyMedia]:
        """Decode one source after the other, so that a request takes the memory of one decoded
        image."""
        made: list[ReadyMedia] = []
        left = self._left(fetched.values())
        num_tokens = 0
        for index, source in enumerate(sources):
            raw = fetched.pop(index, None)
            if raw is None:
                work = partial(self._loader.read, source, left)
                is_long = len(source.url) + len(source.base64) > LONG_LEN
                raw = await self._threads.run(work, is_long=is_long)
                left -= raw.num_bytes
            file = await self._threads.run(partial(self._loader.look, source, raw))
            one = file.found or await self._read(source, file)
            made.append(one)
            num_tokens += one.num_tokens
            room.take(value_bytes(one), source.where)
            if num_tokens > context_len:
                raise ContextExceeded(
                    "prompt",
                    f"the prompt's images, videos and sounds (the first {index + 1:,} of "
                    f"{len(sources):,}) have {num_tokens:,} tokens; the context has "
                    f"{context_len:,}",
                )
        return made

    async def _read(self, source: MediaSource, file: MediaFile) -> ReadyMedia:
        loader = self._loader
        try:
            made = await self._readers.read(
                file.kind, file.raw, loader.changes, is_long=file.is_long
            )
        except ValueError as exc:
            raise MediaRefusal(source, exc) from None
        loader.keep(file, made)
        return made

    def _left(self, raws: Iterable[Raw]) -> int:
        """Bytes that the request may still load."""
        return max(self._loader.limits.max_bytes - sum(raw.num_bytes for raw in raws), 0)

    # ---- into a prompt

    def in_text(
        self,
        text: str,
        media: Sequence[ReadyMedia],
        param: str,
    ) -> tuple[str, list[ReadyMedia]]:
        """`placing.in_text`; raises `ApiError`, which names `param`."""
        try:
            return self._loader.in_text(text, media)
        except MediaError as exc:
            raise ApiError(400, f"{param}: {exc}", param=param) from exc

    def in_tokens(
        self,
        ids: Sequence[int],
        media: Sequence[ReadyMedia],
        param: str,
    ) -> tuple[MediaItem, ...]:
        """`placing.in_tokens`; raises `ApiError`, which names `param`."""
        try:
            return self._loader.in_tokens(ids, media)
        except MediaError as exc:
            raise ApiError(400, f"{param}: {exc}", param=param) from exc


class _Room:
    """The memory of one request's encoder inputs, until the engine has them."""

    def __init__(self, all: list[_Room], most: int, num_bytes: int) -> None:
        """`all`: the rooms of all requests that are being loaded; this one is added."""
        self._all = all
        self._most = most
        self.num_bytes = num_bytes
        all.append(self)

    def take(self, num_bytes: int, where: str) -> None:
        """Add bytes. Raises `ApiError` if this request, or all together, then have more than the
        limit."""
        self.num_bytes += num_bytes
        allowed = f"{self._most / 1e6:g} MB are allowed (--max-open-embeds-mb)"
        if self.num_bytes > self._most:
            message = (
                f"the images, videos and sounds up to {where} have {self.num_bytes / 1e6:,.1f} MB "
                f"for the encoder; {allowed}"
            )
            raise over("max_open_embeds_mb", message, param=where)
        of_all = sum(one.num_bytes for one in self._all)
        if of_all > self._most:
            message = (
                "images, videos and sounds of requests that are being read "
                f"have {of_all / 1e6:,.1f} MB for the encoder; {allowed}"
            )
            raise over("max_open_embeds_mb", message, param=where, status=503)

    def leave(self) -> None:
        self._all.remove(self)


def value_bytes(media: ReadyMedia) -> int:
    """Bytes of the encoder inputs."""
    return sum(len(item.values) for item in media.items)


def serve_media(
    recipe: ProcessorRecipe,
    tokenizer: Tokenizer,
    config: ServerConfig,
    limits: Limits,
) -> ServedMedia:
    """The loader of a server's media. Raises SettingsError for invalid settings, and
    UnsupportedModel for a tokenizer that does not know the placeholders."""
    processor = recipe.make()
    options = media_options(config)
    access = MediaAccess(options.hosts, options.folder, timeout_s=config.media_timeout_s)

    encode = partial(tokenizer.encode, add_special_tokens=False)
    try:
        ids_of_placeholders = token_ids(processor, encode)
    except ValueError as exc:
        raise UnsupportedModel(f"the model is not served with pictures: {exc}") from exc
    speech = speech_tokens(recipe, tokenizer) if isinstance(processor, Whisper) else None
    audio = SoundLimit(limits.max_audio_s)
    if speech is not None:
        audio = SoundLimit(limits.max_speech_s, "max_speech_s")
    media_limits = MediaLimits(
        max_bytes=int(limits.max_media_mb * 1_000_000),
        max_image_pixels=limits.max_image_pixels,
        max_video_frames=limits.max_video_frames,
        max_video_pixels=limits.max_video_pixels,
        audio=audio,
        per_prompt=options.per_prompt,
    )
    loader = MediaLoader(
        processor,
        ids_of_placeholders,
        Fetcher(access),
        media_limits,
        int(config.media_cache_mb * 1_000_000),
    )
    readers = MediaReaders(recipe, media_limits)
    max_open_bytes = int(limits.max_open_embeds_mb * 1_000_000)
    return ServedMedia(loader, readers, config.media_timeout_s, max_open_bytes, speech)


def speech_tokens(recipe: ProcessorRecipe, tokenizer: Tokenizer) -> SpeechTokens:
    """The tokens of a model that writes down speech. Raises UnsupportedModel."""

    def id_of(name: str) -> int | None:
        ids = tokenizer.encode(name, add_special_tokens=False)
        return ids[0] if len(ids) == 1 else None

    generation = json.loads(recipe.files.get("generation_config.json", "{}"))
    config = json.loads(recipe.files["config.json"])
    end = generation.get("eos_token_id", tokenizer.eos_token_id)
    if not isinstance(end, int):
        raise UnsupportedModel("generation_config.json has no single eos_token_id")
    vocab_size = size(config, "vocab_size", 51_865)
    return read_tokens(generation, config, vocab_size, id_of, end)


def require_media(
    media: ServedMedia | None,
    sources: Sequence[MediaSource],
    kwargs: Mapping[str, Any] | None = None,
) -> ServedMedia:
    """The loader of `sources`, with the `mm_processor_kwargs` of the request. Raises `ApiError` for
    kinds that the model does not take, for too many items, and for addresses that are not
    allowed."""
    if media is None:
        [first, *_] = sources
        message = f"{first.where}: this model takes no {NAMES[first.kind][1]}"
        raise ApiError(400, message, param=first.where)
    media.check(sources)
    return media.adjusted(kwargs)


def require_uncut(truncate_prompt_tokens: int | None) -> None:
    """Raise `ApiError` if a prompt with media is to be truncated: the cut could be inside an
    item."""
    if truncate_prompt_tokens is not None:
        raise ApiError(
            400,
            "truncate_prompt_tokens and images, videos and sounds exclude each other: "
            "a prompt is never cut inside of one",
            param="truncate_prompt_tokens",
        )


def _refused(exc: MediaRefusal) -> ApiError:
    status = 413 if exc.limit == "max_media_mb" else 400
    return ApiError(status, str(exc), param=exc.source.where, limit=exc.limit)
