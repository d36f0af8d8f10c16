"""The media processor of each model architecture.

Each function of the table takes the folder of a model and its config.json, reads the other files
that it needs, and returns a `MediaProcessor`, or None for a model without an encoder. It raises
ValueError for unsupported settings.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import msgspec

from weft.json_types import JsonObject
from weft.text.media.adjusted import adjusted
from weft.text.media.processor import MediaProcessor

Make: TypeAlias = Callable[[Path, Mapping[str, Any]], MediaProcessor | None]

# By the architecture that config.json names: "module:function".
PROCESSORS: dict[str, str] = {
    "Gemma3ForConditionalGeneration": "weft.text.media.gemma3:make",
    "Gemma3nForConditionalGeneration": "weft.text.media.gemma3n:make",
    "Gemma4ForConditionalGeneration": "weft.text.media.gemma4:make",
    "Gemma4UnifiedForConditionalGeneration": "weft.text.media.gemma4:make_unified",
    "Idefics3ForConditionalGeneration": "weft.text.media.idefics3:make",
    "Llama4ForConditionalGeneration": "weft.text.media.llama4:make",
    "LlavaForConditionalGeneration": "weft.text.media.clip:make",
    "Mistral3ForConditionalGeneration": "weft.text.media.pixtral:make",
    "SmolVLMForConditionalGeneration": "weft.text.media.idefics3:make",
    "Qwen2VLForConditionalGeneration": "weft.text.media.qwen:make_qwen2_vl",
    "Qwen2_5_VLForConditionalGeneration": "weft.text.media.qwen:make_qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "weft.text.media.qwen:make_qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "weft.text.media.qwen:make_qwen3_vl",
    "Qwen3_5ForConditionalGeneration": "weft.text.media.qwen:make_qwen3_vl",
    "Qwen3_5MoeForConditionalGeneration": "weft.text.media.qwen:make_qwen3_vl",
    "Qwen2AudioForConditionalGeneration": "weft.text.media.qwen2_audio:make",
    "VoxtralForConditionalGeneration": "weft.text.media.voxtral:make",
    "WhisperForConditionalGeneration": "weft.text.media.whisper:make",
}


# The files of a model that these functions read.
FILES = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
)


class ProcessorRecipe(msgspec.Struct, frozen=True):
    """All that is needed to make a processor again, in another process and at another time: the
    files of the model may have changed."""

    function: str  # "module:function" of a `Make`
    files: dict[str, str] = {}  # the texts of `FILES`, as far as they are there
    changes: JsonObject = {}  # the operator's, as for `adjusted`

    def make(self) -> MediaProcessor:
        """Raises ValueError if the files do not make a processor."""
        module, _, function = self.function.partition(":")
        make: Make = getattr(importlib.import_module(module), function)
        with TemporaryDirectory(prefix="weft-") as name:
            folder = Path(name)
            for file, text in self.files.items():
                (folder / file).write_text(text, "utf-8")
            processor = make(folder, json.loads(self.files.get("config.json", "{}")))
        if processor is None:
            raise ValueError("the model has no encoder of media")
        if not self.changes:
            return processor
        return adjusted(processor, self.changes)


def read_recipe(folder: Path, changes: JsonObject) -> ProcessorRecipe | None:
    """The recipe of the model in `folder`; None if the model takes only text."""
    paths = {name: folder / name for name in FILES}
    files = {name: path.read_text("utf-8") for name, path in paths.items() if path.is_file()}
    for architecture in json.loads(files["config.json"]).get("architectures") or ():
        if architecture in PROCESSORS:
            return ProcessorRecipe(PROCESSORS[architecture], files, changes)
    return None


def make_processor(folder: Path, config_json: Mapping[str, Any]) -> MediaProcessor | None:
    """The processor of the model in `folder`; None if the model takes only text.

    Raises ValueError for settings that the processor of its family does not support.
    """
    for architecture in config_json.get("architectures") or ():
        if architecture in PROCESSORS:
            module, _, function = PROCESSORS[architecture].partition(":")
            make: Make = getattr(importlib.import_module(module), function)
            return make(folder, config_json)
    return None
