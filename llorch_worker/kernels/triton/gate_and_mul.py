"""``silu(gate) * up`` of SwiGLU and ``gelu(gate) * up`` of GeGLU, both side by side in one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``gate_up``: [tokens, 2 * inner], gate first; returns [tokens, inner] in its dtype."""
    return _launch(gate_up, gelu=False)


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As ``silu_and_mul``, with GELU in its approximation by tanh."""
    return _launch(gate_up, gelu=True)


def _launch(gate_up: torch.Tensor, *, gelu: bool) -> torch.Tensor:
    tokens, width = gate_up.shape
    inner = width // 2
    out = torch.empty(tokens, inner, dtype=gate_up.dtype, device=gate_up.device)
    _gate_and_mul[(tokens, triton.cdiv(inner, _BLOCK))](
        gate_up, out, gate_up.stride(0), inner, GELU=gelu, BLOCK=_BLOCK
    )
    return out


@triton.jit
def _gate_and_mul(gate_up, out, stride, inner, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """One piece of a row per program; it rounds where the torch twin does."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inner
    gate = tl.load(gate_up + row * stride + at, mask=inside, other=0.0)
    up = tl.load(gate_up + row * stride + inner + at, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    slope = wide
    if GELU:  # (1 + tanh(x)) / 2 is sigmoid(2 x)
        slope = 1.595769122 * wide * (1.0 + 0.044715 * wide * wide)
    gated = (wide * tl.sigmoid(slope)).to(gate.dtype)
    product = gated.to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * inner + at, product.to(gate.dtype), mask=inside)
