"""Describes a model of transformers in our terms, by observing its code: two tokens run through the
model without weights, and each call of attention is recorded.

This is also a program: it reads a line with a folder and a name, and writes a line with the
description. So the calling process need not import the library. It knows no weights.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.config.config_json import size, token_ids
from weft.config.decoder import AttentionSpec, DecoderSpec, LayerSpec
from weft.config.model import (
    ModelConfig,
    ModelError,
    ParameterCount,
    read_json,
    read_json_if_there,
    stored_dtype,
)
from weft.config.process import serve
from weft.models.transformers_backend.attention import NAME, AttentionCall, listening, register
from weft.models.transformers_backend.library import (
    NotByLibrary,
    causal_class,
    describing,
    library_config,
)
from weft.models.transformers_backend.model import decoder_of
from weft.models.transformers_backend.packed import (
    is_experts,
    is_linear,
    is_table,
    is_transposed,
)
from weft.models.transformers_backend.wire import to_wire

NUM_TOKENS = 2


class CallRecorder:
    """Records calls of attention, and answers them with zeros."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(self, call: AttentionCall) -> Tensor:
        self.calls.append(call)
        num_heads = call.query.shape[1]
        return torch.zeros(
            call.query.shape[2], num_heads, call.value.shape[-1], device=call.query.device
        )


def described(folder: Path, name: str) -> ModelConfig:
    """Describe the model in a folder, for the library's code. Raises `ModelError`."""
    return from_files(folder, name).completed(folder)


def from_files(folder: Path, name: str) -> ModelConfig:
    """Describe a model from its `config.json` and its code. Raises `ModelError`."""
    values = read_json(folder / "config.json")
    generation = read_json_if_there(folder / "generation_config.json")
    try:
        return describe(values, name, generation)
    except ModelError:
        raise
    except Exception as exc:  # any exception, because the code was not written for such values
        if isinstance(exc, KeyError) and exc.args == (NAME,):
            # It looks up attention in its own table.
            raise NotByLibrary("it has attention of its own, which pages do not reach") from exc
        reason = next(iter(str(exc).strip().splitlines()), "")
        raise NotByLibrary(
            f"transformers failed on it with {type(exc).__name__}: {reason[:200]}"
        ) from exc


def describe(
    values: Mapping[str, Any], name: str, generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Describe a model from a `config.json`. Raises `NotByLibrary` and `UnsupportedModel`."""
    cls = causal_class(values)
    config = library_config(cls, values)
    text = config.get_text_config()
    dtype = stored_dtype({**dict(values.get("text_config") or {}), **values})
    calls, module = _recorded(cls, config)
    _check(calls, cls.__name__, text.num_hidden_layers)
    first = calls[0]
    num_heads = first.query.shape[1]
    eos = token_ids(values, "eos_token_id") + token_ids(generation or {}, "eos_token_id")
    config_values = {
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "num_hidden_layers": text.num_hidden_layers,
        "max_position_embeddings": getattr(text, "max_position_embeddings", None),
    }
    return ModelConfig(
        architecture=cls.__name__,
        name=name,
        vocab_size=size(config_values, "vocab_size"),
        hidden_size=size(config_values, "hidden_size"),
        num_layers=size(config_values, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=first.key.shape[1],
        head_dim=first.key.shape[-1],
        intermediate_size=_widest(module),
        max_position=size(config_values, "max_position_embeddings"),
        norm_eps=1e-6,  # the library's code has its own
        dtype=dtype,
        decoder=DecoderSpec(layers=_layers(calls)),
        bos_token_id=next(iter(token_ids(values, "bos_token_id")), None),
        eos_token_ids=tuple(token for token in dict.fromkeys(eos) if 0 <= token < text.vocab_size),
        library_config=json.dumps(describing(values), sort_keys=True),
        counted=_counted(module, text.vocab_size),
    )


def _recorded(cls: Any, config: Any) -> tuple[list[AttentionCall], Any]:
    """The calls of attention for two tokens, in the order of layers, and the empty model."""
    register()
    _register_experts()
    with torch.device("meta"):
        module = cls._from_config(
            config,
            dtype=torch.float32,
            attn_implementation=NAME,
            experts_implementation=NAME,
        )
    module.tie_weights()
    module.eval()
    try:
        calls = _run(module, "meta")
    except NotByLibrary:
        raise
    except Exception:
        # Code that reads values cannot run without them. Memory that was never written reads as
        # zeros, and occupies nothing.
        with torch.device("cpu"):
            module = module.to_empty(device="cpu")
        calls = _run(module, "cpu")
    _check_products(module)
    calls.sort(key=lambda call: call.layer)
    return calls, module


def _check_products(module: Any) -> None:
    """Raise `NotByLibrary` if code besides a product's own computes with its weights, which weft
    stores in a form of its own (`PackedLinear`)."""
    products = {name: each for name, each in module.named_modules() if is_linear(each)}
    kept = {name: each._parameters["weight"] for name, each in products.items()}
    for name, each in products.items():
        weight = kept[name]
        out_size = weight.shape[1 if is_transposed(each) else 0]
        each._parameters["weight"] = nn.Parameter(weight.new_empty(0), requires_grad=False)
        each.forward = partial(_zeros, out_size)
    try:
        _run(module, next(iter(kept.values())).device.type)
    except RuntimeError as exc:
        reason = str(exc).partition("\n")[0]
        raise NotByLibrary(
            f"{type(module).__name__} computes with weights of its products outside of them, and "
            f"weft stores these weights in its own form ({reason[:200]})"
        ) from exc
    finally:
        for name, each in products.items():
            del each.forward
            each._parameters["weight"] = kept[name]


def _zeros(out_size: int, x: Tensor) -> Tensor:
    return x.new_zeros(*x.shape[:-1], out_size)


def _run(module: Any, device: str) -> list[AttentionCall]:
    decoder = decoder_of(module)
    # Many decoders accept any argument, and ignore unknown ones.
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        raise NotByLibrary(f"{type(decoder).__name__} takes no positions")
    recorder = CallRecorder()
    ids = torch.zeros(1, NUM_TOKENS, dtype=torch.long, device=device)
    positions = torch.arange(NUM_TOKENS, device=device)[None]
    with torch.no_grad(), listening(recorder):
        output = decoder(input_ids=ids, position_ids=positions, use_cache=False, return_dict=True)
        if not hasattr(output, "last_hidden_state"):
            raise NotByLibrary(f"the decoder of {type(module).__name__} gives no hidden states")
    return recorder.calls


def _check(calls: Sequence[AttentionCall], name: str, num_layers: int) -> None:
    """Raise `NotByLibrary` for features that pages, or weft's attention, do not support."""
    if [call.layer for call in calls] != list(range(num_layers)):
        raise NotByLibrary(
            f"{name} does not call the attention that is registered with transformers once in each "
            f"of its {num_layers} layers, but {len(calls)} times: it keeps a state, or has "
            "attention of its own"
        )
    first = calls[0]
    for call in calls:
        if call.problem:
            raise NotByLibrary(f"{name} {call.problem}, which weft's attention cannot do")
        if call.sinks is not None and call.sinks.numel() != call.query.shape[1]:
            raise NotByLibrary(f"{name} has attention sinks that are not one for each head")
        if call.value.shape[-1] > call.key.shape[-1]:
            raise NotByLibrary(f"{name} has values that are longer than its keys")
        if call.value.shape[1] != call.key.shape[1] or call.query.shape[1] % call.key.shape[1]:
            raise NotByLibrary(f"{name} has heads of K and V that do not divide its heads")
        if call.query.shape[1] != first.query.shape[1]:
            raise NotByLibrary(
                f"{name} has {call.query.shape[1]} heads in layer {call.layer}, and "
                f"{first.query.shape[1]} in the first"
            )
        if call.key.shape[-1] % 2:
            raise NotByLibrary(f"{name} has heads of {call.key.shape[-1]}; their size must be even")


def _layers(calls: Sequence[AttentionCall]) -> tuple[LayerSpec, ...]:
    found = []
    first = calls[0].key
    for call in calls:
        spec = AttentionSpec(
            window=call.window,
            rope=None,
            scale=call.scale,
            score_cap=call.cap,
            sinks=call.sinks is not None,
            kv_of=_owner(call, calls),
        )
        if call.key.shape[1] != first.shape[1]:
            spec = replace(spec, kv_heads=call.key.shape[1])
        if call.key.shape[-1] != first.shape[-1]:
            spec = replace(spec, head_dim=call.key.shape[-1])
        found.append(LayerSpec(attention=spec))
    return tuple(found)


def _owner(call: AttentionCall, calls: Sequence[AttentionCall]) -> int | None:
    """The first layer that received the very same K and V; None: this one."""
    for other in calls[: call.layer]:
        is_same = other.key is call.key and other.value is call.value
        if is_same and other.window == call.window:
            return other.layer
    return None


def _widest(module: nn.Module) -> int:
    """The largest output of a matrix besides the head: a step needs memory for it."""
    outputs = sorted({each.out_features for each in module.modules() if type(each) is nn.Linear})
    if len(outputs) > 1:
        return outputs[-2]
    return outputs[-1] if outputs else 1


def _counted(module: nn.Module, vocab_size: int) -> ParameterCount:
    """The number of weights of each kind; a tied head is counted once."""
    kinds: dict[int, str] = {}
    numbers: dict[int, int] = {}
    for each in module.modules():
        kind = "others"
        if is_table(each, vocab_size):
            kind = "embeddings"
        elif is_linear(each) or is_experts(each):
            kind = "matrices"
        for parameter in each.parameters(recurse=False):
            is_matrix = parameter.dim() > 1
            numbers[id(parameter)] = parameter.numel()
            kinds.setdefault(id(parameter), kind if is_matrix else "others")
            if kind == "matrices" and vocab_size in parameter.shape:
                kinds[id(parameter)] = "embeddings"
    totals = dict.fromkeys(("embeddings", "matrices", "others"), 0)
    for key, kind in kinds.items():
        totals[kind] += numbers[key]
    return ParameterCount(**totals)


def _register_experts() -> None:
    """Register experts that compute nothing, because the choice of experts depends on values."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def nothing(_: nn.Module, hidden: Tensor, *__: Any, **___: Any) -> Tensor:
        return torch.zeros_like(hidden)

    ALL_EXPERTS_FUNCTIONS.register(NAME, nothing)


class DescribeWorker:
    """Answers [folder, name] with {"model": ...} or {"error": ...}."""

    def __call__(self, line: bytes) -> bytes:
        folder, name = json.loads(line)
        answer: dict[str, Any]
        try:
            answer = {"model": to_wire(from_files(Path(folder), name))}
        except ModelError as exc:
            answer = {"error": str(exc)}
        return json.dumps(answer).encode()


def main() -> None:
    serve(DescribeWorker())


if __name__ == "__main__":
    main()
