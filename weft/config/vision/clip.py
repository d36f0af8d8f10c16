"""The keys of an encoder's GGUF file, and what a kind of such files is (`mmproj.py` has all kinds).

Source: the keys and names of gguf's constants.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

from weft.config.config_json import MAX_SIZE
from weft.config.metadata import metadata_value
from weft.config.model_errors import BadCheckpoint, UnsupportedModel
from weft.json_types import JsonMapping, JsonObject

T = TypeVar("T")

VISION = "clip.vision."
HEARS = "clip.has_audio_encoder"
SOUND_KIND = "clip.audio.projector_type"
# Keys that change how pictures are seen, and the values that change nothing.
CHANGES_NOTHING: dict[str, tuple[object, ...]] = {
    HEARS: (False,),
    "clip.has_minicpmv_projector": (False,),
    "clip.vision.mm_patch_merge_type": ("flat",),
    "clip.vision.image_aspect_ratio": ("square", "pad"),
}
REFUSED = ("clip.vision.image_grid_pinpoints", "clip.vision.feature_layer")
MAX_LAYERS = 1_000


class ClipKeys:
    """Reads the keys of an encoder's file."""

    def __init__(self, label: str, metadata: JsonMapping, shapes: Mapping[str, tuple[int, ...]]):
        """`shapes`: of the tensors, by their names in the file, as in torch."""
        self.label = label
        self._metadata = metadata
        self.shapes = shapes

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """A value below `clip.vision.`. Raises BadCheckpoint."""
        return self.value(VISION + key, kind, default)

    def value(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of a full key. Raises BadCheckpoint."""
        return metadata_value(self.label, self._metadata, key, kind, default)

    def size(self, key: str, default: int | None = None) -> int:
        """An integer from 1 on below `clip.vision.`. Raises BadCheckpoint."""
        value = self.get(key, int, default)
        if not 1 <= value <= MAX_SIZE:
            raise BadCheckpoint(
                f"{self.label}: {VISION}{key} is {value:,}; 1 to {MAX_SIZE:,} are expected"
            )
        return value

    def has(self, key: str) -> bool:
        return self._metadata.get(key) is not None

    def numbers(self, key: str) -> list[Any]:
        """The numbers of an array below `clip.vision.`; empty if there is none."""
        values: Any = self._metadata.get(VISION + key)
        if not hasattr(values, "tolist"):
            return []
        return list(values.tolist())

    def shape(self, name: str, num_dims: int) -> tuple[int, ...]:
        """The shape of a tensor. Raises BadCheckpoint."""
        shape = self.shapes.get(name, ())
        if len(shape) != num_dims:
            raise BadCheckpoint(f"{self.label} has no tensor {name} of {num_dims} dimensions")
        return shape

    def require_sounds(self, kind: str) -> None:
        """Raise UnsupportedModel if the encoder of sounds is of another kind."""
        found = self.value(SOUND_KIND, str)
        if found != kind:
            raise UnsupportedModel(
                f"{self.label}: {SOUND_KIND} is {found[:64]!r}, which is not supported; supported "
                f"beside its pictures is {kind}"
            )

    def require_usual(self, reads: Container[str]) -> None:
        """Raise UnsupportedModel for a key whose value changes the computation; `reads`: other keys
        of which that is known."""
        for key, usual in CHANGES_NOTHING.items():
            if key in reads:
                continue
            value = self._metadata.get(key, usual[0])
            if hasattr(value, "tolist") or value not in usual:
                raise UnsupportedModel(
                    f"{self.label}: {key} is {str(value)[:64]}, which is not supported"
                )
        for key in REFUSED:
            if self.has(key):
                raise UnsupportedModel(f"{self.label} has {key}, which is not supported")

    @property
    def num_layers(self) -> int:
        """Raises BadCheckpoint unless the file has tensors for so many."""
        return self._num_layers(f"{VISION}block_count")

    @property
    def num_sound_layers(self) -> int:
        """The same of the encoder of sounds."""
        return self._num_layers("clip.audio.block_count")

    def _num_layers(self, key: str) -> int:
        num = self.value(key, int)
        if not 0 < num <= min(len(self.shapes), MAX_LAYERS):
            raise BadCheckpoint(
                f"{self.label}: {key} is {num:,}, but it has {len(self.shapes):,} tensors"
            )
        return num

    @property
    def image_size(self) -> int:
        return self.size("image_size")

    @property
    def looks(self) -> JsonObject:
        """The normalization of pixels, as a `preprocessor_config.json` has it."""
        named = {name: self.numbers(name) for name in ("image_mean", "image_std")}
        return {"do_resize": True} | {name: each for name, each in named.items() if each}

    def activation(self, gelu: str) -> str:
        """The activation of layers; `gelu`: the one that the family means by gelu."""
        if self.value("clip.use_silu", bool, False):
            return "silu"
        return gelu if self.value("clip.use_gelu", bool, False) else "quick_gelu"

    def eps(self) -> float:
        return self.get("attention.layer_norm_epsilon", float)


# The keys of a `config.json` that the encoder adds to those of the decoder (`found`).
ReadConfig: TypeAlias = Callable[[ClipKeys, JsonMapping], JsonObject]
# A whole `preprocessor_config.json`.
ReadSettings: TypeAlias = Callable[[ClipKeys], JsonObject]


class LayerGroup(NamedTuple):
    prefix: str  # of the names of layers
    parts: Mapping[str, str] | None  # as in `Projector`


@dataclass(frozen=True, kw_only=True)
class Projector:
    """One kind of file."""

    # The decoder's architecture in its GGUF file → the class of both in a `config.json`.
    models: Mapping[str, str]
    config: ReadConfig
    settings: ReadSettings
    layers: str  # prefix of the names of layers
    # Names in a layer: the file's → the tower's; a key with ".weight" is a whole name. None: they
    # are the same.
    parts: Mapping[str, str] | None
    outside: Mapping[str, str]  # names outside of layers
    has_pairs: bool = False  # rotated pairs of queries and keys are consecutive rows
    merges_qkv: bool = False  # the tower reads queries, keys and values as one tensor
    deep: Mapping[str, str] = field(default_factory=dict)  # names of `v.deepstack.N`
    patches_by_pixel: bool = False  # the tower reads patches pixel by pixel, not colour by colour
    reads: tuple[str, ...] = ()  # keys that change the computation, and that `config` reads
    # Further layers, by the beginning of their names: `a` for `a.blk.N`.
    further: Mapping[str, LayerGroup] = field(default_factory=dict)
    convs: tuple[str, ...] = ()  # endings of matrices [n, m] that the tower reads as [n, 1, m]
    vectors: tuple[str, ...] = ()  # endings of vectors that have further dimensions of 1
    has_vit: bool = True  # its metadata says the sizes of the layers of a vision transformer
    numbers: tuple[str, ...] = ()  # endings of tensors of one number, which have no dimension
