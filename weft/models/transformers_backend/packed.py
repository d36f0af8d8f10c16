"""Modules that replace the matrices of a transformers model: weft computes their products, so that
weights may be stored in fewer bits, and our kernels are used.

Everything else in the model remains the library's own code. If a `Translation` of that code says
so, several matrices of the model are stored as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from weft.models.layers.linear import stacked, stacked_bias
from weft.models.layers.weight import RowRun, Weight, Weights, vector
from weft.models.transformers_backend.translate.meaning import Group
from weft.ops.protocol import Matrix


class Products(Protocol):
    """The part of `Ops` that is used here; its results are computed tensors."""

    def vector(self, size: int, *, exact: bool = False) -> Tensor: ...

    def matrix(
        self,
        in_size: int,
        sizes: tuple[int, ...],
        *,
        bias: bool = False,
        gated: bool = False,
        precise: bool = False,
    ) -> Matrix: ...

    def linear(self, x: Tensor, weight: Matrix) -> Tensor: ...

    def embed(
        self,
        tokens: Tensor,
        table: Matrix,
        vectors: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor: ...

    def computed(self, x: Tensor) -> Tensor: ...


class PackedModule(nn.Module):
    """Holds matrices that are not parameters."""

    def allocate(self) -> None:
        """Allocate memory for the content, unless the content is in another module's matrix."""

    def weights(self, prefix: str) -> Weights:
        raise NotImplementedError

    def take(self, module: nn.Module) -> None:
        """Take the content of the module that this one replaces."""
        raise NotImplementedError


class LinearShape(NamedTuple):
    in_size: int
    out_size: int
    has_bias: bool
    is_transposed: bool  # the weight is stored as [in, out]
    is_precise: bool  # see `Ops.matrix`


class PackedLinear(PackedModule):
    """y = W x + b, for a `Linear`; or for a `Conv1D`, whose weight is stored as [in, out].

    It has its own matrix, or some rows of a matrix that several modules share; a shared matrix is
    computed as a whole, and then this module is never called.
    """

    def __init__(self, products: Products, shape: LinearShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        self.in_features = shape.in_size
        self.out_features = shape.out_size
        # Code that asks for the dtype or the device of the weight gets an answer; code that
        # computes with it gets an error.
        self.weight = torch.empty(0, dtype=dtype)
        self._matrix: Matrix | None = None
        # Maps its rows to rows of the matrix.
        self._runs = [RowRun(0, 0, 0, shape.out_size)]
        self._products = products
        self._dtype = dtype
        self._buffered = torch.empty(0)

    @property
    def matrix(self) -> Matrix:
        assert self._matrix is not None, "there is no room for its content yet"
        return self._matrix

    def allocate(self) -> None:
        if self._matrix is None:
            shape = self.shape
            self._matrix = self._products.matrix(
                shape.in_size,
                (shape.out_size,),
                bias=shape.has_bias,
                precise=shape.is_precise,
            )

    def lie_in(self, matrix: Matrix, runs: list[RowRun]) -> None:
        """Store its content in these rows of a shared matrix."""
        self._matrix = matrix
        self._runs = runs

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).to(self._dtype)
        y = self._products.computed(self._products.linear(rows, self.matrix))
        return y.view(*x.shape[:-1], -1).to(x.dtype)

    def take(self, module: nn.Module) -> None:
        content = module.get_parameter("weight").data
        if self.shape.is_transposed:
            content = content.T
        self._rows("weight").put(content)
        if self.shape.has_bias:
            self._bias("bias").put(module.get_parameter("bias").data)

    def weights(self, prefix: str) -> Weights:
        shape = self.shape
        name = f"{prefix}.weight"
        if shape.is_transposed:
            by_column = (shape.in_size, shape.out_size)
            yield Weight(name, by_column, self._put_columns, self._get_columns)
        else:
            yield self._rows(name)
        if shape.has_bias:
            yield self._bias(f"{prefix}.bias")

    def _rows(self, name: str) -> Weight:
        return stacked(name, self.matrix, self.in_features, self._runs)

    def _bias(self, name: str) -> Weight:
        return stacked_bias(name, self.matrix, self._runs)

    def _put_columns(self, content: Tensor, start: int = 0, scales: Tensor | None = None) -> None:
        """Collect the pieces, because they are rows of inputs, and a matrix needs rows of
        outputs."""
        assert scales is None
        if start == 0:
            shape = (self.in_features, self.out_features)
            self._buffered = torch.empty(shape, dtype=content.dtype, device=content.device)
        end = start + len(content)
        self._buffered[start:end].copy_(content)
        if end == self.in_features:
            self._rows("weight").put(self._buffered.T)
            self._buffered = torch.empty(0)

    def _get_columns(self, start: int = 0, stop: int | None = None) -> Tensor:
        return self._rows("weight").get().T[start:stop].contiguous()


class PackedEmbedding(PackedModule):
    """Rows of a table, times `scale`."""

    def __init__(
        self,
        products: Products,
        size: tuple[int, int],
        dtype: torch.dtype,
        scale: float,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = size
        self.weight = torch.empty(0, dtype=dtype)
        self.scale = scale
        self._matrix: Matrix | None = None
        self._products = products
        self._dtype = dtype

    @property
    def matrix(self) -> Matrix:
        assert self._matrix is not None, "there is no room for its content yet"
        return self._matrix

    def allocate(self) -> None:
        if self._matrix is None:
            self._matrix = self._products.matrix(
                self.embedding_dim, (self.num_embeddings,), precise=True
            )

    def forward(self, tokens: Tensor) -> Tensor:
        products = self._products
        rows = products.embed(tokens.reshape(-1), self.matrix, None, self.scale)
        return products.computed(rows).view(*tokens.shape, -1).to(self._dtype)

    def take(self, module: nn.Module) -> None:
        self.matrix.put(0, module.get_parameter("weight").data)

    def weights(self, prefix: str) -> Weights:
        yield Weight(
            f"{prefix}.weight",
            (self.num_embeddings, self.embedding_dim),
            partial(self.matrix.put, 0),
            partial(self.matrix.get, 0),
            partial(self.matrix.keep_as, 0),
            partial(self.matrix.put_codes, 0),
        )


class TiedLinear(PackedModule):
    """A head that is the embedding table: its content comes with the table; a bias is its own."""

    def __init__(
        self,
        products: Products,
        table: PackedEmbedding,
        dtype: torch.dtype,
        bias: Tensor | None,
    ) -> None:
        """`bias` [out] has no content yet."""
        super().__init__()
        # In a list, so that the table does not become a submodule.
        self._table = [table]
        self.bias = bias
        self.out_features = table.num_embeddings
        self.weight = torch.empty(0, dtype=dtype)
        self._products = products
        self._dtype = dtype

    @property
    def matrix(self) -> Matrix:
        (table,) = self._table
        return table.matrix

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).to(self._dtype)
        y = self._products.computed(self._products.linear(rows, self.matrix))
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], -1).to(x.dtype)

    def take(self, module: nn.Module) -> None:
        if self.bias is not None:
            self.bias.copy_(module.get_parameter("bias").data)

    def weights(self, prefix: str) -> Weights:
        if self.bias is not None:
            yield vector(f"{prefix}.bias", self.bias)


class PackedExperts(PackedModule):
    """The experts of a layer. Each token is computed by the experts that its router chose, in
    ascending order, so that its sum does not depend on the other tokens."""

    def __init__(self, products: Products, experts: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self._products = products
        self._dtype = dtype
        # In a list, so that the emptied module does not become a submodule.
        self._experts = [experts]
        self._up_name = "gate_up_proj" if experts.has_gate else "up_proj"
        self._shapes: dict[str, torch.Size] = {}
        self._matrices: dict[str, list[Matrix]] = {}
        for name in (self._up_name, "down_proj"):
            shape = experts.get_parameter(name).shape
            num_experts, out_size, in_size = shape
            if experts.is_transposed:
                in_size, out_size = out_size, in_size
            self._shapes[name] = shape
            self._matrices[name] = []
            for _ in range(num_experts):
                matrix = products.matrix(in_size, (out_size,), bias=experts.has_bias)
                self._matrices[name].append(matrix)
        for name in list(experts._parameters):
            experts._parameters[name] = None

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """x [T, H], experts and their shares [T, k] -> [T, H]"""
        total = torch.zeros_like(x)
        for expert in sorted(set(chosen.flatten().tolist())):
            tokens, places = torch.where(chosen == expert)
            y = self._computed(expert, x[tokens].to(self._dtype))
            y = y * shares[tokens, places, None]
            total.index_add_(0, tokens, y.to(total.dtype))
        return total

    def _computed(self, expert: int, x: Tensor) -> Tensor:
        (module,) = self._experts
        inner = self._product(self._up_name, expert, x)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        y = self._product("down_proj", expert, inner)
        if module.has_post_expert_norm:
            y = module.post_expert_norm(y)
        return y

    def _product(self, name: str, expert: int, x: Tensor) -> Tensor:
        y = self._products.linear(x.contiguous(), self._matrices[name][expert])
        return self._products.computed(y)

    def take(self, module: nn.Module) -> None:
        for name in self._matrices:
            self._put(name, module.get_parameter(name).data)
            if self._has_bias:
                self._put_bias(name, module.get_parameter(f"{name}_bias").data)

    @property
    def _has_bias(self) -> bool:
        (module,) = self._experts
        return bool(module.has_bias)

    def weights(self, prefix: str) -> Weights:
        for name, shape in self._shapes.items():
            put = partial(self._put, name)
            yield Weight(f"{prefix}.{name}", tuple(shape), put, partial(self._get, name))
            if self._has_bias:
                matrices = self._matrices[name]
                bias_shape = (len(matrices), sum(matrices[0].sizes))
                put = partial(self._put_bias, name)
                get = partial(self._get_bias, name)
                yield Weight(f"{prefix}.{name}_bias", bias_shape, put, get)

    def _put(
        self, name: str, content: Tensor, start: int = 0, scales: Tensor | None = None
    ) -> None:
        # Only two-dimensional tensors come in pieces, and only they may be in eight bits.
        assert start == 0
        assert scales is None
        (module,) = self._experts
        for matrix, rows in zip(self._matrices[name], content, strict=True):
            matrix.put(0, rows.T if module.is_transposed else rows)

    def _get(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        (module,) = self._experts
        found = [matrix.get(0) for matrix in self._matrices[name][start:stop]]
        content = torch.stack(found)
        return content.mT if module.is_transposed else content

    def _put_bias(
        self, name: str, content: Tensor, start: int = 0, scales: Tensor | None = None
    ) -> None:
        assert scales is None
        matrices = self._matrices[name][start : start + len(content)]
        for matrix, values in zip(matrices, content, strict=True):
            matrix.put_bias(0, values)

    def _get_bias(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        return torch.stack([matrix.get_bias(0) for matrix in self._matrices[name][start:stop]])


def is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether it is the linear layer of GPT-2, whose weight is [in, out]."""
    return type(module).__name__ == "Conv1D"


def is_table(module: nn.Module, vocab_size: int) -> bool:
    """Whether it is an embedding table with a row per token, optionally times a factor."""
    if not isinstance(module, nn.Embedding) or module.num_embeddings < vocab_size:
        return False
    return type(module) is nn.Embedding or "ScaledWordEmbedding" in type(module).__name__


def is_experts(module: nn.Module) -> bool:
    """Whether it holds the weights of all experts in one tensor each, the layout of the library's
    own kernels for experts."""
    return hasattr(module, "is_transposed") and "down_proj" in module._parameters


class Packing:
    """The packed modules of a library model. First they are empty, then they get matrices, which
    may be shared, then content; later content may replace it."""

    def __init__(
        self, products: Products, dtype: torch.dtype, stored: torch.dtype, vocab_size: int
    ) -> None:
        """`dtype` is used for computation; `stored` is the dtype of the trained weights."""
        self._products = products
        self._dtype = dtype
        self._stored = stored
        self._vocab_size = vocab_size
        self.modules: dict[str, PackedModule] = {}  # by their names in the model
        self._together: dict[Group, Matrix] = {}

    def pack(self, root: nn.Module) -> None:
        """Replace the matrices of `root` with modules that have no memory for content yet."""
        tables: dict[int, PackedEmbedding] = {}  # by id() of the parameter
        for name, module in list(root.named_modules()):
            packed = self._packed(module, tables)
            if packed is not None:
                self.modules[name] = packed
        for name, packed in self.modules.items():
            _put(root, name, packed)

    def allocate(self, groups: Sequence[Group] = ()) -> None:
        """Allocate memory for all content; each group shares one matrix."""
        for group in groups:
            members: dict[str, PackedLinear] = {}
            for name in group.runs:
                member = self.modules[name]
                assert isinstance(member, PackedLinear)
                members[name] = member
            shapes = [member.shape for member in members.values()]
            matrix = self._products.matrix(
                shapes[0].in_size,
                group.sizes,
                bias=any(shape.has_bias for shape in shapes),
                gated=group.is_gated,
            )
            self._together[group] = matrix
            for name, runs in group.runs.items():
                members[name].lie_in(matrix, runs)
        for packed in self.modules.values():
            packed.allocate()

    def fill(self, root: nn.Module) -> None:
        """Take the content of `root`, module by module, and remove it there."""
        for name, packed in self.modules.items():
            packed.take(root.get_submodule(name))
            _put(root, name, nn.Identity())

    # The interface `Matrices` of a translation

    def matrix(self, name: str) -> Matrix:
        module = self.modules[name]
        assert isinstance(module, PackedLinear | PackedEmbedding | TiedLinear)
        return module.matrix

    def scale(self, name: str) -> float:
        module = self.modules[name]
        assert isinstance(module, PackedEmbedding)
        return module.scale

    def together(self, group: Group) -> Matrix:
        return self._together[group]

    def call(self, name: str, *args: Any) -> Tensor:
        result: Tensor = self.modules[name](*args)
        return result

    def _packed(self, module: nn.Module, tables: dict[int, PackedEmbedding]) -> PackedModule | None:
        if is_table(module, self._vocab_size):
            return self._table(module, tables)
        if is_linear(module):
            return self._linear(module, tables)
        if is_experts(module):
            return PackedExperts(self._products, module, self._dtype)
        return None

    def _table(self, module: nn.Module, tables: dict[int, PackedEmbedding]) -> PackedModule:
        weight = module.get_parameter("weight")
        num_rows, size = weight.shape
        # Models are trained with this factor rounded to their dtype.
        factor = torch.tensor(float(getattr(module, "embed_scale", 1.0)), dtype=self._stored)
        table = PackedEmbedding(self._products, (num_rows, size), self._dtype, float(factor))
        tables[id(weight)] = table
        return table

    def _linear(self, module: nn.Module, tables: dict[int, PackedEmbedding]) -> PackedModule:
        weight = module.get_parameter("weight")
        out_size, in_size = weight.shape
        if is_transposed(module):
            in_size, out_size = out_size, in_size
        has_bias = getattr(module, "bias", None) is not None
        if id(weight) in tables:
            bias = self._products.vector(out_size) if has_bias else None
            return TiedLinear(self._products, tables[id(weight)], self._dtype, bias)
        shape = LinearShape(
            in_size,
            out_size,
            has_bias,
            is_transposed(module),
            is_precise=out_size >= self._vocab_size,
        )
        return PackedLinear(self._products, shape, self._dtype)


def _put(root: nn.Module, name: str, packed: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    owner: Any = root.get_submodule(parent)
    setattr(owner, last, packed)
