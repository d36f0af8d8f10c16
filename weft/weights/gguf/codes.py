"""Converts the blocks of GGUF to the codes that matrices load (`ops/codes.py`).

Converted to float32, a weight has the same bits as by the definition of its format.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.ops.codes import E2M1_TWICE, IQ4_NL, CodeFormat, Codes, Scales
from weft.weights.gguf.blocks import BLOCKS, BlockParts

F16 = torch.float16
EIGHTH = 0.125
# A magnitude, and its negative with a further bit; in IQ2 and IQ1 no code has both lower bits.
IQ1_M = (-7, 1, 9, 0, -9, -1, 7, 0)
IQ2 = (8, 25, 43, 0, -8, -25, -43, 0)
IQ3_XXS = (4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62)
IQ3_S = (1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15)
FORMATS = {
    "Q4_0": CodeFormat(bits=4, group=32, offset=8, scale_type=F16),
    "Q4_1": CodeFormat(bits=4, group=32, has_mins=True, scale_type=F16),
    "Q5_0": CodeFormat(bits=6, group=32, offset=16, scale_type=F16),
    "Q5_1": CodeFormat(bits=6, group=32, has_mins=True, scale_type=F16),
    "Q8_0": CodeFormat(bits=8, group=32, offset=128, scale_type=F16),
    "Q2_K": CodeFormat(bits=2, group=16, has_mins=True, is_coarse=True),
    "Q3_K": CodeFormat(bits=3, group=16, offset=4, is_coarse=True),
    "Q4_K": CodeFormat(bits=4, group=32, has_mins=True, is_coarse=True),
    "Q5_K": CodeFormat(bits=6, group=32, has_mins=True, is_coarse=True),
    "Q6_K": CodeFormat(bits=6, group=16, offset=32, is_coarse=True),
    "IQ1_S": CodeFormat(bits=2, group=32, offset=1, has_mins=True, is_coarse=True, unit=EIGHTH),
    "IQ1_M": CodeFormat(bits=3, group=16, table=IQ1_M, is_coarse=True, unit=EIGHTH),
    "IQ2_XXS": CodeFormat(bits=3, group=32, table=IQ2, is_coarse=True, unit=EIGHTH),
    "IQ2_XS": CodeFormat(bits=3, group=16, table=IQ2, is_coarse=True, unit=EIGHTH),
    "IQ2_S": CodeFormat(bits=3, group=16, table=IQ2, is_coarse=True, unit=EIGHTH),
    "IQ3_XXS": CodeFormat(bits=4, group=32, table=IQ3_XXS, is_coarse=True, unit=0.25),
    "IQ3_S": CodeFormat(bits=4, group=32, table=IQ3_S, is_coarse=True),
    "IQ4_NL": CodeFormat(bits=4, group=32, table=IQ4_NL, scale_type=F16),
    "IQ4_XS": CodeFormat(bits=4, group=32, table=IQ4_NL, is_coarse=True),
    "MXFP4": CodeFormat(bits=4, group=32, table=E2M1_TWICE),
    "TQ1_0": CodeFormat(bits=2, group=256, offset=1, scale_type=F16),
    "TQ2_0": CodeFormat(bits=2, group=256, offset=1, scale_type=F16),
}


class BadScales(ValueError):
    """Scales are infinite or NaN."""


def codes_of(kind: str, rows: NDArray[np.uint8]) -> Codes:
    """Rows of bytes [n, bytes], each of full blocks of this kind -> codes [n, in].

    Raises BadScales.
    """
    parts = BLOCKS[kind].parts(rows)
    if not parts.is_finite:
        raise BadScales(kind)
    return as_codes(kind, parts)


def as_codes(kind: str, parts: BlockParts) -> Codes:
    """The content of rows of this kind, as codes."""
    mins = None
    if parts.fine_mins is not None:
        mins = Scales(torch.from_numpy(parts.fine_mins), _tensor(parts.coarse_mins))
    scales = Scales(torch.from_numpy(parts.fine), _tensor(parts.coarse))
    return Codes(FORMATS[kind], torch.from_numpy(parts.values), scales, mins)


def _tensor(array: NDArray[np.float16] | None) -> Tensor | None:
    if array is None:
        return None
    return torch.from_numpy(array)
