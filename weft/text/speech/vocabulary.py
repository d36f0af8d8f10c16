"""The tokens of a model that writes down speech, and the prompt that they make.

    <|startofprev|> what was said before <|startoftranscript|> <|en|> <|transcribe|>  the answer

Source: Radford et al., arXiv:2212.04356, section 2.3.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weft.config.config_json import get
from weft.config.model_errors import UnsupportedModel
from weft.json_types import JsonMapping
from weft.messages.sampling import SpeechRules

TRANSCRIBE = "transcribe"
TRANSLATE = "translate"
TIME_STEP_S = 0.02  # between two tokens of times, and between two vectors of the encoder
FRAMES_PER_TIME = 2  # frames of the spectrogram
LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")


@dataclass(frozen=True, kw_only=True)
class SpeechTokens:
    begin: int
    end: int  # the end of an answer: all ids below it are text
    previous: int
    no_speech: int
    no_timestamps: int
    tasks: dict[str, int]  # empty: the model knows one language, and only writes it down
    languages: dict[str, int]  # by code
    suppress: tuple[int, ...] = ()
    begin_suppress: tuple[int, ...] = ()
    max_initial: int = -1  # as in `SpeechRules`
    alignment_heads: tuple[tuple[int, int], ...] = ()

    @property
    def first_timestamp(self) -> int:
        return self.no_timestamps + 1

    @property
    def is_multilingual(self) -> bool:
        return bool(self.tasks)

    def prompt(
        self, language: str, task: str, before: Sequence[int], *, with_times: bool
    ) -> list[int]:
        """The prompt for a window. `before`: text before it."""
        found = [self.previous, *before] if before else []
        found.append(self.begin)
        if self.is_multilingual:
            found += [self.languages[language], self.tasks[task]]
        if not with_times:
            found.append(self.no_timestamps)
        return found

    def rules(self, *, with_times: bool) -> SpeechRules:
        return SpeechRules(
            suppress=self.suppress,
            begin_suppress=self.begin_suppress,
            first_timestamp=self.first_timestamp,
            forbids_times=not with_times,
            end=self.end,
            max_initial=self.max_initial,
        )

    def text_of(self, ids: Sequence[int]) -> list[int]:
        """The ids that are text."""
        return [id for id in ids if id < self.end]


def read_tokens(
    generation: JsonMapping,
    config: JsonMapping,
    vocab_size: int,
    id_of: Callable[[str], int | None],
    end: int,
) -> SpeechTokens:
    """The tokens of a checkpoint. `generation`: its `generation_config.json`; `config`: its
    `config.json`; `id_of` gives the id of a name that is one token, or None; `end`: the token that
    ends outputs. Raises UnsupportedModel for a name without a token, and BadConfig."""
    languages = {}
    for name in get(generation, "lang_to_id", dict, {}):
        found = LANGUAGE.fullmatch(str(name))
        id = id_of(str(name))
        if found is not None and id is not None:
            languages[found[1]] = id
    tasks = {}
    if get(generation, "is_multilingual", bool, bool(languages)):
        tasks = {task: _required(id_of, task) for task in (TRANSCRIBE, TRANSLATE)}
        if not languages:
            raise UnsupportedModel(
                "generation_config.json has no lang_to_id: the model's languages are unknown"
            )
    no_timestamps = _required(id_of, "notimestamps")
    no_speech = id_of("<|nospeech|>")
    if no_speech is None:
        no_speech = id_of("<|nocaptions|>")  # its older name
    if no_speech is None:
        no_speech = no_timestamps - 1
    return SpeechTokens(
        begin=_required(id_of, "startoftranscript"),
        end=end,
        previous=_required(id_of, "startofprev"),
        no_speech=no_speech,
        no_timestamps=no_timestamps,
        tasks=tasks,
        languages=languages,
        suppress=_ids(generation, "suppress_tokens", vocab_size),
        begin_suppress=_ids(generation, "begin_suppress_tokens", vocab_size),
        max_initial=get(generation, "max_initial_timestamp_index", int, -1),
        alignment_heads=_heads(generation, config),
    )


def _required(id_of: Callable[[str], int | None], name: str) -> int:
    id = id_of(f"<|{name}|>")
    if id is None:
        raise UnsupportedModel(f"the tokenizer has no token <|{name}|>, which transcripts need")
    return id


def _ids(generation: JsonMapping, key: str, vocab_size: int) -> tuple[int, ...]:
    ids: list[Any] = get(generation, key, list, [])
    return tuple(id for id in ids if isinstance(id, int) and 0 <= id < vocab_size)


def _heads(generation: JsonMapping, config: JsonMapping) -> tuple[tuple[int, int], ...]:
    """The heads whose attention follows the sound; without a list, all heads of the upper half of
    the layers."""
    num_layers = get(config, "decoder_layers", int, 4)
    num_heads = get(config, "decoder_attention_heads", int, 6)
    pairs: list[Any] = get(generation, "alignment_heads", list, [])
    found = []
    for pair in pairs:
        match pair:
            case [int(layer), int(head)] if 0 <= layer < num_layers and 0 <= head < num_heads:
                found.append((layer, head))
            case _:
                raise UnsupportedModel(
                    f"generation_config.json has the alignment head {str(pair)[:40]}; the model "
                    f"has {num_layers} layers of {num_heads} heads"
                )
    if found:
        return tuple(found)
    upper = range(num_layers // 2, num_layers)
    return tuple((layer, head) for layer in upper for head in range(num_heads))
