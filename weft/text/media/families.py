"""The media processor of each model architecture.

Each function of the table takes the folder of a model and its config.json, reads the other files
that it needs, and returns a `MediaProcessor`, or None for a model without an encoder. It raises
ValueError for unsupported settings.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from weft.text.media.processor import MediaProcessor

Make: TypeAlias = Callable[[Path, Mapping[str, Any]], MediaProcessor | None]

# By the architecture that config.json names: "module:function".
PROCESSORS: dict[str, str] = {
    "Gemma3ForConditionalGeneration": "weft.text.media.gemma3:make",
    "Idefics3ForConditionalGeneration": "weft.text.media.idefics3:make",
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
}


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
