"""Hidden states of tokens, as the final norm leaves them: what transformers calls
`last_hidden_state`.
"""

from __future__ import annotations

from torch import Tensor

from weft.arrays import FloatArray
from weft.models.registry import DecoderModel
from weft.ops.sampling import on
from weft.plan.outputs import HiddenStatesRequest


def hidden_states(model: DecoderModel, hidden: Tensor, request: HiddenStatesRequest) -> FloatArray:
    """float32 [N, H]. `hidden` [T, H] are those of the step, as the last layer leaves them."""
    states: FloatArray = model.normed(hidden[on(hidden, request.places)]).float().numpy(force=True)
    return states.copy()  # a model may write over its own when it is called again
