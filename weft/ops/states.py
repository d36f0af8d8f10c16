"""The update of a state by one token, in torch: the specification of the kernels. Knows no slots.

A is the number of requests that get a token. All tensors are float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

DELTA_EPS = 1e-6  # added to the squared length of a query or key


def conv_step(
    past: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """A convolution of each channel over its last tokens.

    past [A, taps - 1, C], the oldest first; x [A, C]; weight [taps, C]. Returns the past of the
    next token, and y [A, C].
    """
    seen = torch.cat((past, x[:, None]), 1)
    y = (seen * weight).sum(1)
    if bias is not None:
        y = y + bias
    return seen[:, 1:], y


def delta_step(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    rate: Tensor,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule: the value that the decayed state has for a key moves towards v.

    state [A, heads, K, V]; q and k [A, heads, K], not normalised: this function divides them by
    their lengths, and q by sqrt(K); v [A, heads, V]; decay and rate [A, heads]. Returns the next
    state, and its output [A, heads, V] for the query. Source: arXiv:2412.06464.
    """
    key = _of_length_one(k)
    query = _of_length_one(q) * q.shape[-1] ** -0.5
    state = state * decay[..., None, None]
    known = (state * key[..., None]).sum(-2)
    change = rate[..., None] * (v - known)
    state = state + key[..., None] * change[..., None, :]
    return state, (state * query[..., None]).sum(-2)


def _of_length_one(x: Tensor) -> Tensor:
    squares = x.square().sum(-1, keepdim=True)
    return x * torch.rsqrt(squares + DELTA_EPS)


def scan_step(
    state: Tensor,
    x: Tensor,
    into: Tensor,
    out_of: Tensor,
    decay: Tensor,
    step: Tensor,
) -> tuple[Tensor, Tensor]:
    """Mamba 2: the state decays, and the outer product of `into` and step * x is added to it.

    state [A, heads, N, V]; x [A, heads, V]; into and out_of [A, heads, N] (B and C of the paper);
    decay and step [A, heads]. Returns the next state, and its output [A, heads, V] for `out_of`.
    Source: arXiv:2405.21060.
    """
    value = step[..., None] * x
    taken_in = into[..., None] * value[..., None, :]
    state = state * decay[..., None, None] + taken_in
    return state, (state * out_of[..., None]).sum(-2)


def selective_step(
    state: Tensor,
    x: Tensor,
    into: Tensor,
    out_of: Tensor,
    step: Tensor,
    decay_log: Tensor,
) -> tuple[Tensor, Tensor]:
    """Mamba 1: every number of a channel's state decays at its own rate, and step * x * `into` is
    added to the state.

    state [A, N, C]; x and step [A, C]; into and out_of [A, N] (B and C of the paper); decay_log
    [N, C]. Returns the next state, and its output [A, C] for `out_of`. Source: arXiv:2312.00752.
    """
    decay = torch.exp(-torch.exp(decay_log) * step[:, None])
    taken_in = into[..., None] * (step * x)[:, None]
    state = state * decay + taken_in
    return state, (state * out_of[..., None]).sum(1)


def lightning_step(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
) -> tuple[Tensor, Tensor]:
    """Lightning attention: the state decays, and the outer product of k and v is added to it.

    state [A, heads, K, V]; q and k [A, heads, K]; v [A, heads, V]; decay [heads]. Returns the next
    state, and its output [A, heads, V] for the query. Source: arXiv:2501.08313.
    """
    state = state * decay[:, None, None] + k[..., None] * v[..., None, :]
    return state, (state * q[..., None]).sum(-2)


def delta_decay(rates: Tensor, decay_log: Tensor, decay_bias: Tensor) -> Tensor:
    """rates [.., heads] -> the factor by which a state decays, [.., heads]"""
    return torch.exp(-torch.exp(decay_log) * F.softplus(rates + decay_bias))


def norm_and_gate(
    out: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
) -> Tensor:
    """out and gate [.., V] -> out / rms(out) · weight · silu(gate)"""
    normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + eps)
    return normed * weight * F.silu(gate)


def gate_and_norm(
    out: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
) -> Tensor:
    """out, gate and weight [.., V] -> out · silu(gate) / rms(out · silu(gate)) · weight"""
    gated = out * F.silu(gate)
    return gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + eps) * weight
