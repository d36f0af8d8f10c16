"""Access to the package transformers, if it is installed: the class and the configuration of a
model, and the models that its `config.json` already shows cannot be served.

A checkpoint's own code (`auto_map`) is never run. This module knows no weights.
"""

from __future__ import annotations

import importlib.util
from importlib import metadata
from typing import Any

from weft.config.config_json import get
from weft.config.families.table import FAMILIES
from weft.config.model import UnsupportedModel
from weft.json_types import JsonMapping

PACKAGE = "transformers"
LEAST_VERSION = (5, 23)
NEXT_VERSION = 6
INSTALL = "pip install 'transformers>=5.23,<6'"
# Types of layers whose tokens attend to K and V in pages.
LAYER_TYPES = ("full_attention", "sliding_attention")
# Keys of a `config.json` that do not describe the model.
NO_DESCRIPTION = (
    *("transformers_version", "_name_or_path", "auto_map", "use_cache"),
    *("dtype", "torch_dtype", "eos_token_id"),
)


# Tables of the library → what their models are. A class in several is named by the first.
KINDS = {
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": "a model with an encoder and a decoder",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "an encoder that fills in masked tokens",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "a classifier of texts",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": "a classifier of tokens",
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES": "a model that marks answers in a text",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES": "a model of pictures and texts",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES": "a model of speech with an encoder and a decoder",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": "a classifier of pictures",
    "MODEL_MAPPING_NAMES": "a model without a head for the next token, as encoders are",
}


class NotByLibrary(UnsupportedModel):
    """The code of transformers cannot compute the model on weft's pages. The message gives the
    reason."""


def require_library() -> None:
    """Raise `NotByLibrary` unless a supported version of the package is installed. Imports
    nothing."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise NotByLibrary(f"the package transformers is not installed: {INSTALL}")
    version = metadata.version(PACKAGE)
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if not LEAST_VERSION <= numbers < (NEXT_VERSION,):
        least = ".".join(map(str, LEAST_VERSION))
        raise NotByLibrary(
            f"transformers is {version}; {least} or later, below {NEXT_VERSION}, is needed: "
            f"{INSTALL}"
        )


def causal_class(config: JsonMapping) -> Any:
    """The library's class for a `config.json`. Raises `NotByLibrary`."""
    require_library()
    import transformers
    from transformers.models.auto import modeling_auto

    # Its hints and progress bars are meant for direct users of the library.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    known = set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    architectures = get(config, "architectures", list)
    for architecture in architectures:
        if architecture in known:
            return _of_the_text(getattr(transformers, architecture), config)
    version = transformers.__version__
    for architecture in architectures:
        if isinstance(getattr(transformers, str(architecture), None), type):
            raise NotByLibrary(
                f"in transformers {version} it is {_kind_of(str(architecture))}, and weft runs the "
                "library's code of causal language models only; the encoders that weft has are "
                f"{', '.join(name for name, family in FAMILIES.items() if family.is_encoder)}"
            )
    code = ""
    if config.get("auto_map"):
        code = ", and the code that the checkpoint brings (auto_map) is never run"
    raise NotByLibrary(f"transformers {version} has no such class of causal models{code}")


def _kind_of(architecture: str) -> str:
    """What a class of the library is that is no causal language model, in words."""
    from transformers.models.auto import modeling_auto

    for table, kind in KINDS.items():
        if architecture in getattr(modeling_auto, table).values():
            return kind
    return "no causal language model"


def _of_the_text(cls: Any, config: JsonMapping) -> Any:
    """The class of the text part, if `cls` also reads pictures or sounds; else `cls`."""
    from transformers.models.auto import modeling_auto

    kind = getattr(cls.config_class, "sub_configs", {}).get("text_config")
    if kind is None or not config.get("text_config"):
        return cls
    name = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind.model_type)
    if name is None:
        return cls
    import transformers

    return getattr(transformers, name)


def text_values(cls: Any, config: JsonMapping) -> JsonMapping:
    """The part of a `config.json` that describes `cls`, a result of `causal_class`."""
    if "text_config" in getattr(cls.config_class, "sub_configs", {}):
        return config
    return get(config, "text_config", dict, {}) or config


def library_config(cls: Any, config: JsonMapping) -> Any:
    """The library's configuration from a `config.json`. Raises `NotByLibrary` if the library cannot
    read it, and for models that keep a state, or whose tokens attend outside of a causal window."""
    try:
        # Its files have infinities as objects.
        values = cls.config_class._decode_special_floats(dict(text_values(cls, config)))
        found = cls.config_class.from_dict(values)
    except Exception as exc:  # its checks may raise any exception
        reason = next(iter(str(exc).strip().splitlines()), type(exc).__name__)
        raise NotByLibrary(f"transformers cannot read its config.json: {reason[:200]}") from exc
    text = found.get_text_config()
    if config.get("quantization_config"):
        method = get(config, "quantization_config", dict).get("quant_method", "unknown")
        raise NotByLibrary(
            f"its weights are quantised ({str(method)[:40]}), which is not supported for such "
            "models"
        )
    kinds = getattr(text, "layer_types", None) or ()
    # In some classes, only models with other types of layers keep a state.
    if getattr(cls, "_is_stateful", False) and not kinds:
        raise NotByLibrary(f"{cls.__name__} keeps a state, which pages of K and V cannot hold")
    others = sorted({str(kind) for kind in kinds if kind not in LAYER_TYPES})
    if others:
        raise NotByLibrary(
            f"it has layers of the kind {others[0][:40]}, which keep a state or have masks of "
            f"their own; only {' and '.join(LAYER_TYPES)} run on pages"
        )
    if getattr(text, "is_causal", True) is False or getattr(
        text, "use_bidirectional_attention", False
    ):
        raise NotByLibrary("its tokens see those after them")
    return found


def describing(config: JsonMapping) -> dict[str, Any]:
    """The keys of a `config.json` that describe the model: equal for equal models."""
    return {key: config[key] for key in sorted(config) if key not in NO_DESCRIPTION}
