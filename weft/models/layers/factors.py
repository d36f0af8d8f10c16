"""Fixed factors of weights, which are multiplied in when a checkpoint is loaded: no step pays for
them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.config.decoder import RowFactor, TensorFactors
from weft.models.layers.weight import Weight, Weights


def with_factors(weights: Weights, prefix: str, factors: Sequence[TensorFactors]) -> Weights:
    """The weights of a layer, whose names begin with `prefix`; those that have factors are
    multiplied by them when they are written, and divided when they are read."""
    of_name = {f"{prefix}.{one.name}": one.rows for one in factors}
    for weight in weights:
        rows = of_name.get(weight.name)
        yield weight if rows is None else _multiplied(weight, rows)


def _multiplied(weight: Weight, rows: Sequence[RowFactor]) -> Weight:
    by_row = _by_row(rows, weight.shape[0])

    def column(like: Tensor, start: int) -> Tensor:
        """The factors of the rows of a tensor that begins with row `start`."""
        found = by_row[start : start + len(like)].to(like.device)
        return found.view(-1, *(1 for _ in like.shape[1:]))

    def put(
        content: Tensor,
        start: int = 0,
        scales: Tensor | None = None,
    ) -> None:
        if scales is None:
            weight.put(content.float() * column(content, start), start)
        else:
            weight.put(content, start, scales * column(scales, start))

    def get(start: int = 0, stop: int | None = None) -> Tensor:
        content = weight.get(start, stop)
        return (content.float() / column(content, start)).to(content.dtype)

    # Codes come as numbers, and adapters, which would need the factors too, are refused.
    return weight._replace(put=put, get=get, keep_as=None, put_codes=None, rows=None)


def _by_row(rows: Sequence[RowFactor], num_rows: int) -> Tensor:
    factors = torch.ones(num_rows)
    begin = 0
    for num, factor in rows:
        end = begin + num if num else num_rows
        factors[begin:end] = factor
        begin = end
    return factors
