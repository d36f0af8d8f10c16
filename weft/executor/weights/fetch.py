"""From what the user calls a model to files: a folder, an id on the Hugging Face hub, or the
bundled model."""

from __future__ import annotations

import json
from pathlib import Path

from weft.config.model import BadCheckpoint, ModelNotFound
from weft.config.quantized import READ

BUNDLED = Path(__file__).parents[2] / "bundled" / "weft-nano"
# Files that are fetched from the hub: neither code nor pickles.
HUB_FILES = (
    "*.safetensors",
    "*.json",
    "*.jinja",
    "*.txt",
    "tokenizer.model",
)
INDEX = "model.safetensors.index.json"
NO_GGUF = f"GGUF is not read; read are weights in float32, bfloat16 and float16, {READ}"


def local_folder(model: str, revision: str = "") -> Path:
    """The folder of a model; one on the hub is downloaded first. Raises `ModelNotFound`."""
    if not model:
        return BUNDLED
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        hint = f". {NO_GGUF}" if path.suffix == ".gguf" else ""
        raise ModelNotFound(
            f"{model} is a file; a model is a folder with config.json and *.safetensors{hint}"
        )
    if model.startswith(("/", ".", "~")) or model.count("/") != 1:
        raise ModelNotFound(f"there is no folder {model}")
    return _download(model, revision)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model: those of its index, or all there are. Raises
    `ModelNotFound`."""
    if (folder / INDEX).exists():
        try:
            shards = set(
                json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
            )
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as exc:
            raise BadCheckpoint(f"{folder / INDEX} is damaged: {exc!r}") from exc
        files = [folder / Path(str(name)).name for name in sorted(shards)]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [path.name for path in files if not path.exists()]
    if missing:
        raise ModelNotFound(
            f"{folder} lacks {len(missing)} of its {len(files)} weight files: "
            f"{', '.join(missing[:5])}"
        )
    if not files:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        hint = ", only pickled ones, which can run code and are never read" if pickled else ""
        if any(folder.glob("*.gguf")):
            hint = f". {NO_GGUF}"
        raise ModelNotFound(f"{folder} has no weights in *.safetensors{hint}")
    return files


def _download(model: str, revision: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(
            snapshot_download(model, revision=revision or None, allow_patterns=list(HUB_FILES))
        )
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as exc:
        reason = next(iter(str(exc).strip().splitlines()), type(exc).__name__)
        raise ModelNotFound(
            f"{model} is no folder here, and could not be fetched from the hub: {reason}"
        ) from exc
