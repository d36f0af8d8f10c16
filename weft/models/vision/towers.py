"""The class that computes each kind of tower.

To add one: a spec in `config/vision/`, a reader of `config.json` in its family (`Family.tower`), a
class here, and a processor in `text/media/`.
"""

from __future__ import annotations

from importlib import import_module
from typing import cast

from weft.config.vision.gemma3n import Gemma3nPictureSpec, Gemma3nSoundSpec
from weft.config.vision.gemma4 import Gemma4TowerSpec
from weft.config.vision.gemma4_sound import Gemma4SoundSpec
from weft.config.vision.gemma4_unified import PatchSpec, WaveSpec
from weft.config.vision.joint import JointSpec
from weft.config.vision.llama4 import Llama4TowerSpec
from weft.config.vision.pictures import PerceptronSpec, PooledSpec, ShuffledSpec
from weft.config.vision.pixtral import PixtralSpec
from weft.config.vision.qwen import QwenTowerSpec
from weft.config.vision.sound import SpeechSpec, WhisperSpec
from weft.config.vision.spec import TowerSpec
from weft.config.vision.stacked import StackedSpec
from weft.models.vision.tower import Tower, TowerBackend

# By type of spec: module and class; the class takes the spec and a backend.
TOWERS: dict[type, str] = {
    Gemma3nPictureSpec: "weft.models.vision.gemma3n:Gemma3nPictureTower",
    Gemma3nSoundSpec: "weft.models.vision.gemma3n:Gemma3nSoundTower",
    PatchSpec: "weft.models.vision.gemma4_unified:PatchTower",
    WaveSpec: "weft.models.vision.gemma4_unified:WaveTower",
    Gemma4SoundSpec: "weft.models.vision.gemma4_sound:Gemma4SoundTower",
    JointSpec: "weft.models.vision.joint:JointTower",
    Gemma4TowerSpec: "weft.models.vision.gemma4:Gemma4Tower",
    Llama4TowerSpec: "weft.models.vision.llama4:Llama4Tower",
    PooledSpec: "weft.models.vision.pictures:PooledTower",
    ShuffledSpec: "weft.models.vision.pictures:ShuffledTower",
    PerceptronSpec: "weft.models.vision.pictures:PerceptronTower",
    PixtralSpec: "weft.models.vision.pixtral:PixtralTower",
    SpeechSpec: "weft.models.vision.whisper:SpeechTower",
    StackedSpec: "weft.models.vision.stacked:StackedTower",
    WhisperSpec: "weft.models.vision.whisper:WhisperTower",
    QwenTowerSpec: "weft.models.vision.qwen:QwenTower",
}


def make_tower(spec: TowerSpec, backend: TowerBackend) -> Tower:
    """Make a tower whose weights are not loaded yet."""
    module, _, name = TOWERS[type(spec)].partition(":")
    return cast(Tower, getattr(import_module(module), name)(spec, backend))
