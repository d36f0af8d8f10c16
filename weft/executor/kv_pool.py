"""The tensors with K and V, and those with the states of layers that keep a state instead. The
owners of slots are tracked elsewhere (`memory/`), in numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from weft.config.model import ModelConfig

POSITION_STEP = 64  # keys and values of an encoder are padded to a multiple of it


class MakeZeros(Protocol):
    def __call__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor: ...


def zeros(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Zeros aligned to 64 bytes, which take no memory until they are written: torch.zeros would
    write them, numpy only asks the system for them."""
    if device.type != "cpu":
        return torch.zeros(
            shape,
            dtype=dtype,
            device=device,
        )
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = torch.from_numpy(np.zeros(num_bytes + 64, dtype=np.uint8))
    start = -memory.data_ptr() % 64
    return memory[start : start + num_bytes].view(dtype).view(shape)


class KVPool:
    """K and V of `num_slots` tokens for every layer, [slots, kv_heads, head_dim]; in int8 with a
    scale for each slot and head, in fp8 divided by `layer_scales`, one for K and one for V (default
    1). A layer that reads the K and V of an earlier layer has the same tensors.

    Layers with windows have `num_window_slots` slots of their own instead; 0: they use the same
    slots as all layers. `make` makes the tensors, in the order of `tensors`. Layers outside of
    `here` have no slots, because another process computes them; None: all layers are computed here.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_slots: int,
        device: torch.device,
        dtype: torch.dtype,
        layer_scales: Sequence[tuple[float, float]] | None = None,
        *,
        num_window_slots: int = 0,
        make: MakeZeros = zeros,
        here: range | None = None,
    ) -> None:
        num_layers = config.num_layers
        self.layer_scales = list(layer_scales or [(1.0, 1.0)] * num_layers)
        self.has_windows = num_window_slots > 0
        lens = [num_slots] * num_layers
        if self.has_windows:
            for layer in range(num_layers):
                if config.window(layer):
                    lens[layer] = num_window_slots
        for layer in range(num_layers):
            attends = config.decoder.layer(layer).attends
            if not attends or (here is not None and layer not in here):
                lens[layer] = 0  # it keeps neither K nor V
        owners = [config.kv_owner(layer) for layer in range(num_layers)]
        for layer, owner in enumerate(owners):
            if owner != layer:
                lens[layer] = 0
        # Each tensor once, in the order of creation: a layer that keeps none has empty ones.
        self.tensors: list[Tensor] = []

        def of_layers(dtype: torch.dtype, num_dims: int, index_dim: int = 0) -> list[Tensor]:
            """The tensor that each layer reads: [slots, kv_heads, head_dim], or the first
            `num_dims` of these dimensions. `index_dim`: that of an indexer's keys."""
            made = []
            for layer, length in enumerate(lens):
                shape = (length, *config.kv_shape(layer))
                if index_dim:
                    shape = (length, 1, index_dim)
                made.append(make(shape[:num_dims], dtype, device))
            self.tensors += made
            return [made[owner] for owner in owners]

        self.k = of_layers(dtype, 3)
        # With latents, the values are the keys.
        self.has_values = config.latent is None
        self.v = self.k
        if self.has_values:
            self.v = of_layers(dtype, 3)
        self.index: list[Tensor] = []  # keys of indexers, [slots, 1, head_dim]
        if config.latent is not None and config.latent.indexer is not None:
            self.index = of_layers(dtype, 3, config.latent.indexer.head_dim)
        self.k_scale: list[Tensor] = []
        self.v_scale: list[Tensor] = []
        # Only int8 has a scale for each slot and head; fp8 has one for each layer.
        if dtype == torch.int8:
            self.k_scale = of_layers(torch.float32, 2)
            self.v_scale = self.k_scale
            if self.has_values:
                self.v_scale = of_layers(torch.float32, 2)


class StatePool:
    """States of `num_slots` requests for every layer that keeps a state, in float32: a tensor
    [slots, *shape] for each of the spec's `state_shapes`."""

    def __init__(self, config: ModelConfig, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.of_layer: dict[int, list[Tensor]] = {}
        for layer in range(config.num_layers):
            state = config.decoder.layer(layer).state
            if state is None:
                continue
            self.of_layer[layer] = [
                zeros((num_slots, *shape), torch.float32, device) for shape in state.state_shapes
            ]

    @property
    def tensors(self) -> list[Tensor]:
        found = []
        for tensors in self.of_layer.values():
            found += tensors
        return found


class EncodedPool:
    """Keys and values of what the encoder has read for each row, in every layer of a decoder that
    attends to it, in float32. The slot of a row has the row's number.

    Keys [rows, heads, head_dim, padded] are columns, values [rows, heads, padded, head_dim] rows;
    what is beyond the encoder's vectors stays zero.
    """

    def __init__(self, config: ModelConfig, num_rows: int, device: torch.device) -> None:
        cross = config.decoder.cross
        assert cross is not None, f"{config.name} attends to no encoder"
        heads = config.num_heads
        head_dim = config.head_dim
        padded = -(-cross.num_positions // POSITION_STEP) * POSITION_STEP
        self.num_positions = cross.num_positions
        self.width = config.num_layers * 2 * heads * head_dim  # numbers of a vector
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for _ in range(config.num_layers):
            # Memory that no row has used is not taken from the system.
            self.keys.append(zeros((num_rows, heads, head_dim, padded), torch.float32, device))
            self.values.append(zeros((num_rows, heads, padded, head_dim), torch.float32, device))

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.keys, *self.values]

    def write(self, row: int, vectors: Tensor) -> None:
        """Write the keys and values of a row: vectors [num_positions, layers * 2 * heads *
        head_dim], as the tower makes them."""
        num = self.num_positions
        _, heads, head_dim, _ = self.keys[0].shape
        parts = vectors.view(num, len(self.keys), 2, heads, head_dim)
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            keys[row, :, :, :num].copy_(parts[:, layer, 0].permute(1, 2, 0))
            values[row, :, :num].copy_(parts[:, layer, 1].transpose(0, 1))
