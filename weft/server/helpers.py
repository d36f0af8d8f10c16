"""What answers for a model in processes of its own: its chat template, and the reader of pictures,
videos and sounds. Starting them takes a tenth of a second or more."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from weft.config.limits import Limits
from weft.config.server import ServerConfig
from weft.observe.log import EventLog
from weft.server.media import ServedMedia, serve_media
from weft.text.media.families import ProcessorRecipe
from weft.text.templates.chat_template import TemplateError
from weft.text.templates.renderer import Renderer, TakeChild, none_ready
from weft.text.tokenizer import Tokenizer

log = EventLog("serve")


class ModelHelpers(NamedTuple):
    template: Renderer | None  # None: the model has none that can be used
    media: ServedMedia | None  # None: the model takes only text

    def close(self) -> None:
        for one in self:
            if one is not None:
                one.close()


def start_helpers(
    tokenizer: Tokenizer,
    config: ServerConfig,
    limits: Limits,
    processor: ProcessorRecipe | None,
    take_child: TakeChild = none_ready,
) -> ModelHelpers:
    """Start them, and wait until they work. They end with the calling thread. `take_child`: as
    that of `Renderer`.

    Raises `TemplateError` or `OSError` if the chat template of `config` cannot be used, and
    SettingsError or UnsupportedModel if the settings or the model do not allow images.
    """
    template = load_template(tokenizer, config, take_child)
    try:
        media = None
        if processor is not None:
            media = serve_media(processor, tokenizer, config, limits)
    except BaseException:
        ModelHelpers(template, None).close()
        raise
    return ModelHelpers(template, media)


def load_sources(tokenizer: Tokenizer, config: ServerConfig) -> list[str]:
    """The sources of the chat templates in use. Raises `OSError`."""
    if config.chat_template:
        return [Path(config.chat_template).read_text("utf-8-sig")]
    return list(tokenizer.chat_templates.values())


def load_template(
    tokenizer: Tokenizer, config: ServerConfig, take_child: TakeChild = none_ready
) -> Renderer | None:
    """The template of the settings, else the model's own.

    If the model's own template is broken, only chat is unavailable.
    """
    if config.chat_template:
        [source] = load_sources(tokenizer, config)
        return Renderer({"default": source}, tokenizer.special_tokens, take_child)
    if not tokenizer.chat_templates:
        return None
    try:
        return Renderer(tokenizer.chat_templates, tokenizer.special_tokens, take_child)
    except TemplateError as exc:
        log.warning("no_chat_template", reason=exc)
        return None
