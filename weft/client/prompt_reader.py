"""Prompts and conversations of a program become token ids and media, by the model's tokenizer, its
chat template, and its reader of pictures, videos and sounds.

It knows no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.client.media import split_messages, split_prompt
from weft.config.options import SettingsError
from weft.json_types import JsonObject
from weft.messages.media import MediaItem
from weft.messages.sampling import InvalidParam
from weft.text.media.errors import MediaError
from weft.text.media.loader import MediaLoader, MediaRefusal
from weft.text.media.placing import NAMES
from weft.text.media.sources import MediaSource
from weft.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from weft.text.templates.chat_template import ChatTemplate


class WithMedia(NamedTuple):
    """A prompt as ids, with all placeholders."""

    ids: list[int]
    media: tuple[MediaItem, ...] = ()


class PromptReader:
    """`name`: of the model, for errors. `template`: None, if it has none; `media`: None for a model
    of texts alone."""

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        media: MediaLoader | None,
    ) -> None:
        self._name = name
        self._tokenizer = tokenizer
        self._template = template
        self._media = media

    def conversation(self, messages: Iterable[JsonObject]) -> WithMedia:
        """What a conversation becomes by the model's chat template. Raises SettingsError without a
        template, and InvalidParam."""
        if self._template is None:
            raise SettingsError(f"{self._name} has no chat template; it can only complete texts")
        rendered, sources = split_messages(messages)
        if not sources:
            text = self._template.render(rendered)
            return WithMedia(self._tokenizer.encode(text, add_special_tokens=False))
        loader = self._require_media(sources)
        text = self._template.render(rendered, marks=loader.marks)
        return self._placed(loader, text, sources, add_special_tokens=False)

    def parts(self, prompt: Mapping[str, Any], *, may_be_cut: bool = False) -> Any:
        """What a prompt in parts becomes: its `prompt` as it is, if it names no media, else a
        `WithMedia`. Raises InvalidParam, also for media if it `may_be_cut`."""
        text, sources = split_prompt(prompt)
        if not sources:
            return text
        if may_be_cut:
            message = "a prompt with pictures cannot be cut: that may be inside of one"
            raise InvalidParam("truncate", message)
        return self._placed(self._require_media(sources), text, sources)

    def _require_media(self, sources: Sequence[MediaSource]) -> MediaLoader:
        if self._media is None:
            [first, *_] = sources
            message = f"{first.where}: {self._name} takes no {NAMES[first.kind][1]}"
            raise InvalidParam(first.where, message)
        return self._media

    def _placed(
        self,
        loader: MediaLoader,
        prompt: Any,
        sources: Sequence[MediaSource],
        *,
        add_special_tokens: bool = True,
    ) -> WithMedia:
        """A text with marks, or ids with placeholders. Raises InvalidParam."""
        try:
            media = loader.load(sources)
            ids = prompt
            if isinstance(prompt, str):
                text, media = loader.in_text(prompt, media)
                ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return WithMedia(list(ids), loader.in_tokens(ids, media))
        except MediaRefusal as exc:
            raise InvalidParam(exc.source.where, str(exc)) from exc
        except MediaError as exc:
            raise InvalidParam("prompts", str(exc)) from exc
