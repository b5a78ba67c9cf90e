"""``silu(gate) * up`` of SwiGLU, gate and up side by side in one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``gate_up``: [tokens, 2 * inner], gate first; returns [tokens, inner] in its dtype."""
    tokens, width = gate_up.shape
    inner = width // 2
    out = torch.empty(tokens, inner, dtype=gate_up.dtype, device=gate_up.device)
    _silu_and_mul[(tokens, triton.cdiv(inner, _BLOCK))](
        gate_up, out, gate_up.stride(0), inner, BLOCK=_BLOCK
    )
    return out


@triton.jit
def _silu_and_mul(gate_up, out, stride, inner, BLOCK: tl.constexpr):
    """One piece of a row per program; it rounds where the torch twin does."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inner
    gate = tl.load(gate_up + row * stride + at, mask=inside, other=0.0)
    up = tl.load(gate_up + row * stride + inner + at, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide * tl.sigmoid(wide)).to(gate.dtype)
    product = silu.to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * inner + at, product.to(gate.dtype), mask=inside)
