"""Input embeddings: numbers are accepted if they are finite in the type that the model computes
in."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from tests.server.fake import READY
from weft.client.prompt import INFINITE_FROM, pack_input_embeds
from weft.messages.sampling import InvalidParam

FLOAT32_MOST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_only_numbers_that_are_finite_in_the_models_type_are_accepted(dtype: str) -> None:
    engine = msgspec.structs.replace(READY, dtype=dtype)
    border = np.float32(INFINITE_FROM.get(dtype, FLOAT32_MOST))
    with np.errstate(over="ignore"):  # what is more than the largest float32 is infinite
        values = [
            np.nextafter(border, np.float32(0)),
            border,
            np.nextafter(border, np.float32(np.inf)),
        ]
    for value in [
        *values,
        np.float32(65_504),
        np.float32(np.inf),
        np.float32(np.nan),
        np.float32(-np.inf),
        -border,
    ]:
        rows = np.array([[0, 0, 1], [0, value, 2]], dtype=np.float32)
        if torch.from_numpy(rows).to(getattr(torch, dtype)).isfinite().all():
            assert pack_input_embeds(rows, engine) == rows.tobytes()
        else:
            with pytest.raises(
                InvalidParam, match=rf"input_embeds\[1\]\[1\] is .*{dtype}.*are allowed"
            ):
                pack_input_embeds(rows, engine)
