"""The towers of Qwen models: transformers over the patches of pictures and videos of any size. A
patch attends to the patches of its frame, or of a window in it."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from weft.arrays import IntArray, LongArray
from weft.config.vision.qwen import QwenTowerSpec
from weft.models.layers.embedding import Embedding
from weft.models.layers.norm import CenteredNorm, RmsNorm
from weft.models.layers.weight import Weights
from weft.models.vision.layer import VIT, LayerShape, TowerLayer, TwoProducts
from weft.models.vision.tower import Pieces, PlaneRotation, TowerBackend, TowerInput
from weft.models.vision.vit import Patches
from weft.ops.encoder import EncoderOps
from weft.ops.plain import PlainMatrix

NORM_EPS = 1e-6
COLOURS = 3
LAYER = VIT._replace(
    attention_norm="norm1", attention="attn", qkv=("qkv",), out="proj", mlp_norm="norm2"
)
MAX_SIDE = 4_096  # patches


class QwenTower:
    def __init__(self, spec: QwenTowerSpec, backend: TowerBackend) -> None:
        ops = backend.ops
        self._spec = spec
        self._backend = backend
        self._ops = ops
        values = COLOURS * spec.time_size * spec.patch_size**2
        self.patches = Patches(values, spec.hidden_size, spec.patch_bias, ops)
        self.positions: Embedding | None = None
        if spec.position_side:
            self.positions = Embedding(spec.position_side**2, spec.hidden_size, ops)
        rotation = PlaneRotation(spec.head_dim, spec.theta, MAX_SIDE)
        self._attention = backend.make_attention(spec.num_heads, spec.head_dim, rotation)
        self.layers = [self._layer() for _ in range(spec.num_layers)]
        self.norm = _norm(spec, spec.hidden_size, ops)
        self.merger = Merger(spec, ops)
        self.deep_mergers = [DeepMerger(spec, ops) for _ in spec.deepstack]
        # Of the current input.
        self._lens: dict[bool, list[int]] = {}
        self._deep: list[Tensor] = []

    def encode(self, input: TowerInput) -> Pieces:
        """`input.values` [P, colours * frames * side * side]: the patches of a token are adjacent.
        The frames are those of a patch in time, or one frame that is used for all of them."""
        spec = self._spec
        layout = self._layout(input)
        patches = self._patches(input)
        order = torch.from_numpy(layout.order).to(patches.device)
        by_token = patches.view(input.length, spec.square, -1)
        patches = by_token[order].flatten(0, 1)
        first = layout.lens_of_frames
        if spec.window:
            self._lens = {False: layout.lens_of_windows, True: first}
            first = self._lens[0 in spec.full_layers]
        self._attention.prepare(first, layout.places)
        self._deep = []
        run = self._backend.run_in_pieces
        if self.positions is None:
            hidden = yield from run(self._layers, patches)
        else:
            learnt = self._learnt(layout)
            hidden = yield from run(self._layers_after_positions, patches, learnt)
        merged = self._merged(hidden)
        last = self._backend.run(self.merger.rows, merged)
        vectors = torch.cat((last, *self._deep), dim=1)
        in_place = torch.empty_like(vectors)
        in_place[order] = vectors
        return in_place

    def _layer(self) -> TowerLayer:
        spec = self._spec
        shape = LayerShape(spec.hidden_size, spec.inner_size, spec.activation, has_bias=True)
        names = LAYER._replace(up=spec.mlp.up, down=spec.mlp.down)
        norms = (
            _norm(spec, spec.hidden_size, self._ops),
            _norm(spec, spec.hidden_size, self._ops),
        )
        return TowerLayer(shape, names, norms, self._ops, self._attention)

    def _layout(self, input: TowerInput) -> PatchLayout:
        spec = self._spec
        assert input.grid is not None, "pictures and videos have a grid"
        num_frames, rows, columns = input.grid
        side = spec.merge_size * max(rows, columns)
        if side > MAX_SIDE:
            raise ValueError(f"a picture has {side} patches of a side; at most are {MAX_SIDE}")
        return lay_out(num_frames, rows, columns, spec.merge_size, spec.window)

    def _patches(self, input: TowerInput) -> Tensor:
        """[P, all values of a patch]"""
        spec = self._spec
        size = COLOURS * spec.patch_size**2
        num = input.length * spec.square
        values = input.values
        if values.shape == (num, size):
            by_colour = values.view(num, COLOURS, 1, -1)
            return by_colour.expand(-1, -1, spec.time_size, -1).reshape(num, -1)
        if values.shape == (num, spec.time_size * size):
            return values
        raise ValueError(
            f"patches have the shape {list(values.shape)}; this encoder reads {[num, size]} of "
            f"pictures, and {[num, spec.time_size * size]}"
        )

    def _learnt(self, layout: PatchLayout) -> Tensor:
        """[P, hidden] the learnt positions of the patches, interpolated in the table."""
        assert self.positions is not None
        # All kinds of `EncoderOps` store the embeddings of encoders as rows.
        table = cast(PlainMatrix, self.positions.matrix)
        rows, columns, _ = torch.from_numpy(layout.places).to(self._backend.device)
        height, width = layout.num_patches
        total: Tensor | None = None
        for row, row_share in between(rows, height, self._spec.position_side):
            for column, column_share in between(columns, width, self._spec.position_side):
                found = table.rows(row * self._spec.position_side + column).float()
                found = found * (row_share * column_share)[:, None]
                total = found if total is None else total.add_(found)
        assert total is not None
        return total

    def _layers_after_positions(self, patches: Tensor, positions: Tensor) -> Tensor:
        return self._run_layers(positions + self.patches(patches))

    def _layers(self, patches: Tensor) -> Tensor:
        return self._run_layers(self._ops.computed(self.patches(patches)))

    def _run_layers(self, x: Tensor) -> Tensor:
        spec = self._spec
        for index, layer in enumerate(self.layers):
            is_full = index in spec.full_layers
            if spec.window and index and is_full != (index - 1 in spec.full_layers):
                self._backend.pause(x, partial(self._see, is_full))
            x = layer(x)
            if index in spec.deepstack:
                merger = self.deep_mergers[spec.deepstack.index(index)]
                self._backend.pause(x, partial(self._take, merger))
        return self._ops.computed(self.norm(x))

    def _see(self, is_full: bool, x: Tensor) -> None:
        """Make the following layers attend to whole frames, or to windows."""
        self._attention.prepare(self._lens[is_full])

    def _take(self, merger: DeepMerger, x: Tensor) -> None:
        self._deep.append(self._backend.run(merger.rows, self._merged(x)).clone())

    def _merged(self, x: Tensor) -> Tensor:
        """[P, hidden] -> [tokens, patches of a token * hidden]"""
        return x.reshape(-1, self._spec.square * self._spec.hidden_size)

    def weights(self) -> Weights:
        spec = self._spec
        shape = (COLOURS, spec.time_size, spec.patch_size, spec.patch_size)
        yield from self.patches.weights("visual.patch_embed.proj", shape)
        if self.positions is not None:
            yield from self.positions.weights("visual.pos_embed")
        for index, layer in enumerate(self.layers):
            yield from layer.weights(f"visual.blocks.{index}")
        yield from self.norm.weights(f"visual.merger.{spec.merger_norm}")
        yield from self.merger.weights("visual.merger")
        for index, merger in enumerate(self.deep_mergers):
            yield from merger.weights(f"visual.deepstack_merger_list.{index}")


class Merger:
    """Two products on the concatenated patches of a token, which were normed before."""

    def __init__(self, spec: QwenTowerSpec, ops: EncoderOps) -> None:
        merged = spec.square * spec.hidden_size
        self._ops = ops
        sizes = (merged, merged, spec.out_size)
        self.products = TwoProducts(sizes, spec.merger.up, spec.merger.down, "gelu", ops)

    def rows(self, x: Tensor) -> Tensor:
        """[tokens, patches * hidden] -> [tokens, out]"""
        return self._ops.computed(self.products(x))

    def weights(self, prefix: str) -> Weights:
        yield from self.products.weights(prefix)


class DeepMerger:
    """Like `Merger`, with one norm over all patches of a token together."""

    def __init__(self, spec: QwenTowerSpec, ops: EncoderOps) -> None:
        self._name = spec.merger_norm
        self._ops = ops
        self.norm = _norm(spec, spec.square * spec.hidden_size, ops)
        self.merger = Merger(spec, ops)

    def rows(self, x: Tensor) -> Tensor:
        return self.merger.rows(self.norm(x))

    def weights(self, prefix: str) -> Weights:
        yield from self.norm.weights(f"{prefix}.{self._name}")
        yield from self.merger.weights(prefix)


class PatchLayout(NamedTuple):
    """The order of the patches of a picture or video during encoding."""

    order: LongArray  # [tokens] the token at each position
    places: IntArray  # [3, P] row and column of each patch in its frame, and its row again
    num_patches: tuple[int, int]  # per column, and per row, of a frame
    lens_of_frames: list[int]  # patches of each frame
    lens_of_windows: list[int]  # patches of each window


@lru_cache(maxsize=16)
def lay_out(num_frames: int, rows: int, columns: int, merge: int, window: int) -> PatchLayout:
    """The layout of frames of `rows` times `columns` tokens. The tokens of a window are adjacent; a
    window has `window` tokens per side; 0: no windows."""
    token = np.arange(rows * columns)
    row, column = np.divmod(token, columns)
    lens_of_windows = [rows * columns]
    in_frame = token
    if window:
        of_window = row // window * -(-columns // window) + column // window
        in_frame = np.argsort(of_window, kind="stable")
        lens_of_windows = np.bincount(of_window).tolist()
    in_token = np.arange(merge)
    patch_rows = row[in_frame, None, None] * merge + in_token[:, None]
    patch_columns = column[in_frame, None, None] * merge + in_token
    shape = (rows * columns, merge, merge)
    of_patches = [np.broadcast_to(one, shape).ravel() for one in (patch_rows, patch_columns)]
    places = np.stack((*of_patches, of_patches[0])).astype(np.int32)
    frames = np.arange(num_frames)[:, None] * (rows * columns)
    return PatchLayout(
        order=(frames + in_frame).ravel(),
        places=np.ascontiguousarray(np.tile(places, num_frames)),
        num_patches=(rows * merge, columns * merge),
        lens_of_frames=[rows * columns * merge**2] * num_frames,
        lens_of_windows=[num * merge**2 for num in lens_of_windows] * num_frames,
    )


def between(places: Tensor, num: int, side: int) -> list[tuple[Tensor, Tensor]]:
    """Interpolate places 0..num-1, spread over 0..side-1: the integers before and after each, with
    the weight of each."""
    spread = places.float() * (side - 1) / max(num - 1, 1)
    before = spread.floor()
    share = spread - before
    after = (before.long() + 1).clamp(max=side - 1)
    return [(before.long(), 1 - share), (after, share)]


def _norm(spec: QwenTowerSpec, size: int, ops: EncoderOps) -> RmsNorm | CenteredNorm:
    if spec.has_rms_norm:
        return RmsNorm(size, NORM_EPS, ops)
    return CenteredNorm(size, NORM_EPS, ops, has_bias=True)
