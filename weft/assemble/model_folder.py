"""Makes every model a folder: the metadata of a GGUF file is written to the files that all other
code reads.

    ~/.cache/weft/gguf/3f2a.../SmolLM2-135M-Instruct.Q4_1/
        config.json  generation_config.json  tokenizer.json  tokenizer_config.json
        SmolLM2-135M-Instruct.Q4_1.gguf -> the file, or one link for each of its parts

The folder is made once for each state of a file, and takes a few MB. This module reads no weights.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from weft.config.engine import EngineConfig
from weft.config.generation import FILE
from weft.config.gguf import GgufModel, hf_config, hf_sampling
from weft.config.model import BadCheckpoint, ModelConfig, ModelError, ModelNotFound
from weft.config.options import SettingsError
from weft.config.pooling import KINDS
from weft.config.vision.clip import ClipKeys
from weft.config.vision.mmproj import projector_of, with_encoder
from weft.json_types import JsonMapping
from weft.observe.log import EventLog
from weft.weights.fetch import local_folder, local_path
from weft.weights.gguf import files
from weft.weights.gguf.encoder import EncoderContent
from weft.weights.gguf.names import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS
from weft.weights.gguf.reader import GgufFile
from weft.weights.known import SAMPLING, SMOLLM2, known_name, missing_default
from weft.weights.pull.choose import DESCRIPTIONS

log = EventLog("serve")

# The sources that determine the content of a folder: if one changes, new folders are made.
WEFT = Path(__file__).parents[1]
SOURCES = (
    "config/gguf.py",
    "config/families/*.py",
    "config/vision/clip.py",
    "config/vision/*_file.py",
    "config/vision/mmproj.py",
    "text/gguf_tokenizer.py",
    "assemble/model_folder.py",
    "weights/known.py",
)
TOKENIZER = "tokenizer.json"
# Files that may describe a tokenizer. A file beside the GGUF file has priority over its metadata.
TOKENIZER_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
MAX_ROPE_FACTORS = 4_096
POOLING_FOLDER = "1_Pooling"


def model_folder(config: EngineConfig) -> Path:
    """The folder of the model that the settings name. Raises ModelError and SettingsError."""
    if not config.model and missing_default():
        log.warning(missing_default())
    path = local_path(config.model, config.revision)
    if config.load_format == "gguf" and path.is_dir():
        path = files.only_model(path)
    if config.load_format == "safetensors" and not path.is_dir():
        raise SettingsError(f"--load-format is safetensors, but {path} is a GGUF file")
    if path.is_dir():
        if config.tokenizer:
            raise SettingsError(
                "--tokenizer is for GGUF files; a model folder brings its tokenizer"
            )
        if config.mmproj:
            raise SettingsError("--mmproj is for GGUF files; a model folder brings its encoder")
        return path
    source = path.parent
    if config.tokenizer:
        source = tokenizer_folder(config.tokenizer)
    return described(path, source, encoder_file(config, path))


def encoder_file(config: EngineConfig, path: Path) -> Path | None:
    """The file with the encoder of a GGUF file's model: the one that --mmproj names, else the one
    beside the model, if weft can use it. Raises ModelError."""
    if config.mmproj:
        named = Path(config.mmproj).expanduser()
        if not named.is_file():
            raise SettingsError(f"--mmproj: there is no file {named}")
        return named
    beside = files.encoder_beside(path, path.parent.iterdir())
    if beside is None:
        return None
    try:
        with GgufFile(path) as file:
            metadata = file.header.metadata
            size = metadata.get(f"{metadata.get('general.architecture')}.embedding_length")
            found = {"architectures": [""], "hidden_size": size}
            _with_encoder(beside, found, metadata)
    except ModelError as exc:
        log.warning("encoder_not_used", file=beside.name, reason=exc)
        return None
    return beside


def model_name(config: EngineConfig, folder: Path) -> str:
    """The name of the model: for a model that weft knows, its own spelling; else the last part of
    the user's name for it; for a GGUF file, the name without the ending."""
    known = known_name(folder)
    if known:
        return known
    name = Path(config.model).name
    if not name or name.endswith(files.SUFFIX) or name.lower() == folder.name.lower():
        return folder.name
    return name


def tokenizer_folder(name: str) -> Path:
    """The folder that --tokenizer names. Raises SettingsError."""
    try:
        folder = local_folder(name, patterns=DESCRIPTIONS)
    except ModelNotFound as exc:
        raise SettingsError(f"--tokenizer: {exc}") from exc
    if not (folder / TOKENIZER).is_file():
        raise SettingsError(f"--tokenizer: {folder} has no {TOKENIZER}")
    return folder


def described(path: Path, source: Path, encoder: Path | None = None) -> Path:
    """The folder that describes the model of a GGUF file. `source`: a folder that may have the
    tokenizer's files. `encoder`: the file with its encoder of pictures.

    Raises ModelError.
    """
    parts = {part.name: part.absolute() for part in files.parts(path)}
    if encoder is not None:
        parts[files.ENCODER + files.SUFFIX] = encoder.absolute()
    beside = [source / name for name in TOKENIZER_FILES if (source / name).is_file()]
    name = known_name(path) or files.stem(path)
    folder = _cache() / _digest([*parts.values(), *beside]) / name
    if (folder / "config.json").is_file():
        return folder
    content = dict(_description(path, beside, encoder))
    if name == SMOLLM2.name:
        content.setdefault(FILE, SAMPLING)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _beside(folder) as made:
            _write(made, content, parts)
            # If another process has made the folder meanwhile, that folder stays.
            with contextlib.suppress(OSError):
                made.rename(folder)
        return folder
    except OSError:  # the cache cannot be written: use a private folder of this process
        private = Path(tempfile.mkdtemp(prefix="weft-gguf-"))
        atexit.register(shutil.rmtree, private, ignore_errors=True)
        folder = private / name
        _write(folder, content, parts)
        return folder


def _description(
    path: Path, beside: Sequence[Path], encoder: Path | None
) -> Iterator[tuple[str, bytes | JsonMapping]]:
    """The files of the folder: names and contents. Raises ModelError."""
    first, *others = files.parts(path)
    with GgufFile(first) as file:
        metadata = file.header.metadata
        tensors = dict(file.header.tensors)
        for part in others:
            with GgufFile(part) as other:
                tensors |= other.header.tensors
        factors = [_factors(file, name) for name in (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS)]
        model = GgufModel(str(path), metadata, tensors, *factors)
        config: JsonMapping = hf_config(model)
        if encoder is not None:
            config, settings = _with_encoder(encoder, config, metadata)
            yield "preprocessor_config.json", settings
        # Check that a model of these sizes is possible before any file is written.
        ModelConfig.from_hf(config, path.name)
        yield "config.json", config
        sampling = hf_sampling(metadata)
        if sampling:
            yield FILE, sampling
        pooling = config.get("pooling")
        if pooling:
            yield from _sentence_layout(str(pooling))
        yield from _tokenizer(metadata, str(path), config["vocab_size"], beside)


def _sentence_layout(pooling: str) -> Iterator[tuple[str, bytes | JsonMapping]]:
    """The files that say how hidden states become a vector. A GGUF file does not say whether it is
    normalized; llama.cpp does so."""
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [{"type": f"models.{kind}", "path": ""} for kind in kinds]
    modules[1]["path"] = POOLING_FOLDER
    keys = [key for key in KINDS if key.startswith(f"pooling_mode_{pooling}")]
    yield "modules.json", json.dumps(modules).encode()
    yield f"{POOLING_FOLDER}/config.json", dict.fromkeys(keys, True)


def _with_encoder(
    encoder: Path, config: JsonMapping, metadata: JsonMapping
) -> tuple[JsonMapping, JsonMapping]:
    """The model's `config.json` with the encoder of a file, and its `preprocessor_config.json`.
    Raises ModelError."""
    with EncoderContent(encoder) as file:
        said = file.header.metadata
        shapes = {name: entry.shape for name, entry in file.header.tensors.items()}
        keys = ClipKeys(str(encoder), said, shapes)
        config_json = with_encoder(keys, said, metadata, config)
        return config_json, projector_of(keys.label, said).settings(keys)


def _tokenizer(
    metadata: JsonMapping, label: str, vocab_size: int, beside: Sequence[Path]
) -> Iterator[tuple[str, bytes | JsonMapping]]:
    """The files of the tokenizer: those beside the model, else made from its metadata."""
    from weft.text.gguf_tokenizer import tokenizer_config, tokenizer_files
    from weft.text.tokenizer import TokenizerError

    found: dict[str, bytes | JsonMapping] = {one.name: one.read_bytes() for one in beside}
    try:
        if TOKENIZER not in found:
            made = tokenizer_files(metadata, label)
            num_tokens = len(made[TOKENIZER]["model"]["vocab"])
            if num_tokens > vocab_size:
                raise BadCheckpoint(
                    f"{label}: its tokenizer has {num_tokens:,} tokens, its embedding "
                    f"{vocab_size:,}"
                )
            found = {**made, **found}
        elif "tokenizer_config.json" not in found:
            found["tokenizer_config.json"] = tokenizer_config(metadata, label)
    except TokenizerError as exc:
        raise BadCheckpoint(str(exc)) from exc
    yield from found.items()


def _factors(file: GgufFile, name: str) -> list[float]:
    """The divisors of the rotary frequencies; empty if the file has no such tensor. Raises
    BadCheckpoint."""
    entry = file.header.tensors.get(name)
    if entry is None:
        return []
    if entry.dtype != "F32" or entry.num_bytes > 4 * MAX_ROPE_FACTORS:
        raise BadCheckpoint(
            f"{file.label}: {name} is {entry.dtype} {list(entry.shape)}; F32 with at most "
            f"{MAX_ROPE_FACTORS:,} values is expected"
        )
    data = bytearray(entry.num_bytes)
    file.read_into(entry.start, memoryview(data))
    values = np.frombuffer(data, dtype="<f4")
    if not (np.isfinite(values) & (values > 0)).all():
        raise BadCheckpoint(f"{file.label}: {name} has values that are not finite or not above 0")
    return [float(value) for value in values]


def _write(
    folder: Path, content: Mapping[str, bytes | JsonMapping], parts: Mapping[str, Path]
) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name, part in parts.items():
        (folder / name).symlink_to(part)
    for name, values in content.items():
        data = values
        if not isinstance(data, bytes):
            data = json.dumps(values, ensure_ascii=False).encode()
        path = folder / name
        path.parent.mkdir(exist_ok=True, mode=0o700)
        path.write_bytes(data)


@contextlib.contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    """A temporary folder to be renamed to `folder`; it is removed at the end if it was not."""
    made = Path(tempfile.mkdtemp(prefix=f".{os.getpid()}-", dir=folder.parent))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _cache() -> Path:
    base = os.environ.get("WEFT_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "weft" / "gguf"


def _digest(paths: Sequence[Path]) -> str:
    """A digest of the names, sizes and times of files, and of the sources that read them."""
    digest = hashlib.sha256()
    for source in SOURCES:
        for file in sorted(WEFT.glob(source)):
            digest.update(file.read_bytes())
    for path in paths:
        status = path.stat()
        digest.update(repr((str(path), status.st_size, status.st_mtime_ns)).encode())
    return digest.hexdigest()[:16]
