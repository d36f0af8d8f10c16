"""The head of steps that take the likeliest token of each request, without most of its products.

A head of floats is the widest matrix of a model: of a small one, a third of what a step reads. A
copy of it in 8 bits is read in half or a quarter of the time, and says which few tokens can be the
likeliest. Only their logits are computed exactly, with the bits that they have in any other step
(`ops/cpp/screen.h`). So the tokens are the same, always.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.ops.cpp import abi
from weft.ops.cpp.abi import Epilogue, OpKind, StepArgs, WeightFormat
from weft.ops.cpp.content import bytes_of
from weft.ops.cpp.library import Library
from weft.ops.cpp.matrices import PackedMatrix
from weft.ops.cpp.program import Program

MIN_WEIGHTS = 1 << 22  # below, a head is in the cache, and nothing is gained


def screenable(head: Program) -> abi.LinearArgs | None:
    """The product of the head, if another program can take its place: it is all that the program
    does, with weights of floats, and adapters cannot change it."""
    if len(head.args) != 1:
        return None
    (exact,) = head.args
    if not isinstance(exact, abi.LinearArgs):
        return None
    if exact.lora or exact.bias or exact.epilogue != Epilogue.STORE:
        return None
    weight = abi.PackedWeight.from_address(exact.weight)
    if weight.format not in (WeightFormat.F32, WeightFormat.BF16):
        return None
    if weight.order or weight.in_size * weight.out_size < MIN_WEIGHTS:
        return None
    return exact


class HeadCopy:
    """A copy of the weight of a head in 8 bits, and how much it differs from the weight."""

    def __init__(self, library: Library, exact: abi.LinearArgs) -> None:
        self._library = library
        self._address = exact.weight
        weight = abi.PackedWeight.from_address(exact.weight)
        self._copy = PackedMatrix(
            library,
            weight.in_size,
            (weight.out_size,),
            False,
            False,
            WeightFormat.I8,
        )
        padded_out = -(-weight.out_size // abi.PANEL) * abi.PANEL
        self._errors = torch.zeros(padded_out)
        self._sizes = torch.zeros(padded_out)
        self.is_sound = False  # whether all weights are finite

    @property
    def tensors(self) -> Sequence[Tensor]:
        return self._copy.tensors

    def fill(self) -> None:
        """Copy the weight as it is now."""
        (panels,) = self._copy.pieces
        args = abi.CopyHeadArgs(
            exact=self._address,
            copy=panels.address,
            errors=self._errors.data_ptr(),
            sizes=self._sizes.data_ptr(),
        )
        self._library.run_one(args, StepArgs(), OpKind.COPY_HEAD)
        self._check()

    def _check(self) -> None:
        self.is_sound = bool(torch.isfinite(self._errors + self._sizes).all())

    def blocks(self) -> list[NDArray[np.uint8]]:
        """The copy as blocks of bytes."""
        (panels,) = self._copy.pieces
        return [bytes_of(one) for one in (panels.memory, self._errors, self._sizes)]

    def adopt(self, blocks: Sequence[NDArray[np.uint8]]) -> None:
        """Use the copy that these blocks of an equal weight are, in their memory."""
        (panels,) = self._copy.pieces
        copied, errors, sizes = blocks
        panels.adopt(torch.from_numpy(copied))
        bytes_of(self._errors)[:] = errors
        bytes_of(self._sizes)[:] = sizes
        self._check()

    def program(self, exact: abi.LinearArgs, argmax: abi.ArgmaxArgs) -> Program:
        """What `exact` and then `argmax` compute."""
        (panels,) = self._copy.pieces
        quick = abi.LinearArgs.from_buffer_copy(exact)
        quick.weight = panels.address
        args = abi.ScreenedHeadArgs(
            exact=ctypes.addressof(exact),
            quick=ctypes.addressof(quick),
            argmax=ctypes.addressof(argmax),
            errors=self._errors.data_ptr(),
            sizes=self._sizes.data_ptr(),
        )
        return Program([args], [exact, quick, argmax, self])
