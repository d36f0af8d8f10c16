"""Reads how the files of a model's processor say that pictures, videos and sounds are prepared."""

from __future__ import annotations

from pathlib import Path

from weft.config.config_json import said, section
from weft.config.model import read_json_if_there
from weft.json_types import JsonObject


def read_settings(folder: Path) -> JsonObject:
    """The settings for pictures."""
    return read_part(folder, "image_processor")


def read_extractor(folder: Path) -> JsonObject:
    """The settings for sounds. A file of their own may also have settings for pictures, whose keys
    are others."""
    return read_part(folder, "feature_extractor")


def read_part(folder: Path, part: str, file: str = "preprocessor_config.json") -> JsonObject:
    """The settings of a part of the processor. Newer checkpoints have all parts in one file, and
    others a `file` for each."""
    processor = read_json_if_there(folder / "processor_config.json")
    return section(processor, part) or said(read_json_if_there(folder / file))
