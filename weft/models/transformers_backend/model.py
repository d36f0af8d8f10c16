"""The `DecoderModel` of an architecture by the code of transformers: its modules compute;
attention, matrices, pages, scheduling and sampling are weft's.

A step of weft, with the tokens of many requests, is one sequence for the library's code: positions
are an input, and only attention decides which tokens attend to which.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.config.model import BadCheckpoint, ModelConfig
from weft.models.layers.attention import Heads, PagedAttention
from weft.models.layers.weight import Weight, Weights
from weft.models.transformers_backend.attention import NAME, AttentionCall, listening, register
from weft.models.transformers_backend.library import causal_class, library_config, text_values
from weft.models.transformers_backend.packed import (
    PackedEmbedding,
    PackedExperts,
    PackedLinear,
    PackedModule,
    Packing,
    Products,
    TiedLinear,
)
from weft.models.transformers_backend.translate.emit import Matrices
from weft.models.transformers_backend.translate.graph import Leaves, Untranslatable
from weft.models.transformers_backend.translate.translation import Translation

# Names of tensors in a checkpoint with more than the text part -> names in the text part.
NAMES_OF_THE_TEXT = {
    r"^model\.language_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}


class PagedListener:
    """Answers modules' calls of attention with attention over pages."""

    def __init__(
        self,
        config: ModelConfig,
        attention: PagedAttention,
        device: torch.device,
    ) -> None:
        self._config = config
        self._attention = attention
        self._heads: list[Heads] = []
        for layer in range(config.num_layers):
            spec = config.decoder.layer(layer).attention
            heads = Heads(None, None, None, spec.scale, spec.score_cap)
            if spec.sinks:
                # Separate memory, which stays at its address when weights change.
                heads = heads._replace(sinks=torch.zeros(config.num_heads, device=device))
            self._heads.append(heads)

    def attend(self, call: AttentionCall) -> Tensor:
        value_size = call.value.shape[-1]
        value = call.value
        _, head_dim = self._config.kv_shape(call.layer)
        if value_size < head_dim:
            # Latent attention has longer keys than values, but a slot has one size.
            value = F.pad(value, (0, head_dim - value_size))
        by_head = [tensor[0].transpose(0, 1) for tensor in (call.query, call.key, value)]
        qkv = torch.cat(by_head, dim=1).flatten(1)
        heads = self._heads[call.layer]
        if heads.sinks is not None and call.sinks is not None:
            heads.sinks.copy_(call.sinks.flatten())
        out = self._attention.forward(qkv, heads, call.layer)
        return out.view(len(qkv), -1, head_dim)[..., :value_size]


class TransformersModel:
    """Hidden states here are those after the final norm, because the library's decoder contains
    it."""

    def __init__(
        self, config: ModelConfig, products: Products, *, translates: bool = False
    ) -> None:
        """`translates`: the caller will compute `translation`, if there is one; then the modules
        are never called."""
        self._config = config
        like = products.vector(0)
        self._device = like.device
        self._dtype = like.dtype
        self._stored: torch.dtype = getattr(torch, config.dtype)
        values = json.loads(config.library_config)
        self._cls = causal_class(values)
        self._library_config = library_config(self._cls, values)
        # A checkpoint that also reads pictures or sounds has other names for its text part.
        is_part = text_values(self._cls, values) is not values
        self._renamed = NAMES_OF_THE_TEXT if is_part else None
        self._packing = Packing(products, self._dtype, self._stored, config.vocab_size)
        self._listener: PagedListener | None = None
        self._attention: PagedAttention | None = None
        register()
        # The class of the decoder's last output, which the head needs.
        self._output: Any = None
        module = self._empty()
        self._packing.pack(module)
        self._use(module)
        # The work of the modules in terms of `Ops`; None: it cannot be translated, or need not be.
        self.translation: Translation | None = None
        self.untranslated = ""  # why there is no translation although it was requested
        if translates:
            self._translate()
        groups = self.translation.groups if self.translation else ()
        self._packing.allocate(groups)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: PagedAttention,
        vectors: Tensor | None = None,
    ) -> Tensor:
        if attention is not self._attention or self._listener is None:
            self._attention = attention
            self._listener = PagedListener(self._config, attention, self._device)
        inputs = {"input_ids": tokens[None]}
        if vectors is not None:
            inputs = {"inputs_embeds": self._embedded(tokens, vectors)[None]}
        with listening(self._listener):
            output = self._decoder(
                **inputs, position_ids=positions[None], use_cache=False, return_dict=True
            )
        self._output = type(output)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def normed(self, hidden: Tensor) -> Tensor:
        return hidden

    def logits(self, hidden: Tensor, places: Tensor | None = None) -> Tensor:
        """Call the forward method of the class, with a decoder that returns `hidden`: so every
        factor and cap of logits is right."""
        if places is not None:
            hidden = hidden[places]
        output = self._output(last_hidden_state=hidden[None])
        with _giving(self._decoder, output):
            ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
            logits = self._module(input_ids=ids, use_cache=False).logits
        widened: Tensor = logits[0].float()
        return widened

    def weights(self) -> Weights:
        """The weights, with the names in the library's modules."""
        for name, module in self._module.named_modules():
            if isinstance(module, PackedModule):
                yield from module.weights(name)
        for name, values in self._loose_tensors():
            yield self._loose(name, values)

    def load(self, folder: Path) -> None:
        """Load the weights in a folder. Raises `BadCheckpoint`; then nothing has changed."""
        self.adopt(self.read(folder))

    def adopt(self, module: nn.Module) -> None:
        """Use the content of `module`, a result of `read`. Its matrices are packed and dropped one
        by one."""
        self._packing.fill(module)
        for name, values in self._loose_tensors():
            values.copy_(operator.attrgetter(name)(module).data)
        self._refresh()

    def read(self, folder: Path) -> Any:
        """Read a checkpoint with the library, which renames and merges tensors. Raises
        `BadCheckpoint`."""
        try:
            module, info = self._cls.from_pretrained(
                folder,
                config=self._library_config,
                dtype=self._stored,
                attn_implementation=NAME,
                use_safetensors=True,
                key_mapping=self._renamed,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except Exception as exc:  # its checks may raise any exception
            reason = next(iter(str(exc).strip().splitlines()), type(exc).__name__)
            raise BadCheckpoint(
                f"transformers cannot read the weights in {folder}: {reason[:300]}"
            ) from exc
        for problem in ("missing_keys", "mismatched_keys"):
            names = sorted(str(name) for name in info[problem])
            if names:
                raise BadCheckpoint(
                    f"the weights in {folder} do not fit its config.json ({len(names)} "
                    f"{problem.partition('_')[0]}: {', '.join(names[:5])})"
                )
        return module

    def _loose_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a checkpoint that stay in the library's modules, each once."""
        seen: set[int] = set()
        for name, module in self._module.named_modules():
            if isinstance(module, PackedModule):
                continue
            for key in _stored_tensors(module):
                values = getattr(module, key)
                if id(values) not in seen:
                    seen.add(id(values))
                    yield (f"{name}.{key}" if name else key), values.data

    def _loose(self, name: str, values: Tensor) -> Weight:
        def put(content: Tensor, start: int = 0, scales: Tensor | None = None) -> None:
            assert scales is None
            values[start : start + len(content)].copy_(content)
            self._refresh()

        def get(start: int = 0, stop: int | None = None) -> Tensor:
            return values[start:stop].clone()

        return Weight(name, tuple(values.shape), put, get)

    def _refresh(self) -> None:
        if self.translation is not None:
            self.translation.refresh()

    def _translate(self) -> None:
        context_length = self._config.context_length or self._config.max_position
        try:
            self.translation = Translation(
                self._module, self._leaves(), self._body_run, self._head_run, context_length
            )
        except Exception as exc:
            # If the library's code cannot be traced for any reason, it can still be run.
            self.untranslated = f"{type(exc).__name__}: {exc}"[:200]

    def _leaves(self) -> Leaves:
        found: dict[type, dict[str, nn.Module]] = {}
        for name, module in self._packing.modules.items():
            if isinstance(module, TiedLinear) and module.bias is not None:
                raise Untranslatable("its head is its table with a bias")
            kind = PackedLinear if isinstance(module, TiedLinear) else type(module)
            found.setdefault(kind, {})[name] = module
        return Leaves(
            matrices=found.get(PackedLinear, {}),
            tables=found.get(PackedEmbedding, {}),
            experts=found.get(PackedExperts, {}),
        )

    def _body_run(self, num_tokens: int) -> tuple[tuple[Tensor, ...], Callable[[], Tensor]]:
        ids = torch.zeros(1, num_tokens, dtype=torch.long)
        positions = torch.zeros(1, num_tokens, dtype=torch.long)

        def compute() -> Tensor:
            output = self._decoder(
                input_ids=ids, position_ids=positions, use_cache=False, return_dict=True
            )
            self._output = type(output)
            hidden: Tensor = output.last_hidden_state
            return hidden

        return (ids, positions), compute

    def _head_run(self, num_tokens: int) -> tuple[tuple[Tensor, ...], Callable[[], Tensor]]:
        hidden = torch.zeros(1, num_tokens, self._config.hidden_size, dtype=self._dtype)
        ids = torch.zeros(1, num_tokens, dtype=torch.long)

        def compute() -> Tensor:
            with _giving(self._decoder, self._output(last_hidden_state=hidden)):
                logits: Tensor = self._module(input_ids=ids, use_cache=False).logits
            return logits.float()

        return (hidden,), compute

    def _empty(self) -> Any:
        """The model on the CPU. Its parameters have no content, and take no memory until they are
        written; its tables of angles are right."""
        from transformers.initialization import no_init_weights

        with no_init_weights():
            module = self._cls._from_config(
                self._library_config, dtype=self._stored, attn_implementation=NAME
            )
        module.tie_weights()
        return module

    @property
    def matrices(self) -> Matrices:
        """The weights, by the names in `translation`."""
        return self._packing

    def _use(self, module: nn.Module) -> None:
        """Use a packed model for computation, with its remaining tensors in the dtype and on the
        device of the others."""
        for parameter in module.parameters():
            parameter.requires_grad_(False)
            if parameter.dtype == self._stored:
                parameter.data = parameter.data.to(self._dtype)
        freeze_rotation(module, self._config.context_length or self._config.max_position)
        self._module: Any = module.to(self._device).eval()
        self._decoder = decoder_of(self._module)

    def _embedded(self, tokens: Tensor, vectors: Tensor) -> Tensor:
        """Rows of the table, or of `vectors` where the token is below 0: [T, hidden]"""
        table: Any = self._module.get_input_embeddings()
        rows: Tensor = table(tokens.clamp(min=0))
        index = (-1 - tokens).clamp(min=0)
        return torch.where((tokens < 0)[:, None], vectors[index].to(rows.dtype), rows)


def decoder_of(module: Any) -> Any:
    """The part of a library model that returns hidden states."""
    from transformers import PreTrainedModel

    decoder = module.get_decoder()
    if decoder is module or not isinstance(decoder, PreTrainedModel):
        return module.base_model
    return decoder


def freeze_rotation(module: nn.Module, context_length: int) -> None:
    """Make rotations that depend on the longest position of a call depend on the longest served
    position: otherwise cached K and V would be wrong, and requests in one step would disagree."""
    longest = torch.full((1, 1), context_length - 1)
    modules: Iterator[Any] = module.modules()
    for each in modules:
        kind = getattr(each, "rope_type", None)
        if isinstance(kind, str) and _follows_length(kind):
            each(torch.empty(0), longest)
            each.rope_type = "frozen"
        elif isinstance(kind, dict):
            for layer_type, name in kind.items():
                if _follows_length(name):
                    each(torch.empty(0), longest, layer_type=layer_type)
                    kind[layer_type] = "frozen"


def _follows_length(rope_type: str) -> bool:
    return rope_type == "longrope" or "dynamic" in rope_type


def _stored_tensors(module: nn.Module) -> Iterator[str]:
    """The names of a module's own tensors that are in a checkpoint."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name


@contextmanager
def _giving(decoder: Any, output: Any) -> Iterator[None]:
    """Make the decoder return `output` instead of computing."""
    calls: list[int] = []

    def give(*_: Any, **__: Any) -> Any:
        calls.append(1)
        return output

    decoder.forward = give  # shadows the method
    try:
        yield
        assert len(calls) == 1, "the head does not begin where the decoder ends"
    finally:
        del decoder.forward
