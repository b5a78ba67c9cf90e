"""RMS norm, with or without the residual addition before it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x``: [tokens, hidden], rows contiguous; returns a new tensor of its shape and dtype."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, x, weight, out, out, eps, add=False)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of ``x + residual``, and the sum itself; both new, [tokens, hidden]."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out)
    _launch(x, residual, weight, out, total, eps, add=True)
    return out, total


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor,
    eps: float,
    *,
    add: bool,
) -> None:
    tokens, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    tensors = (x, residual, weight, out, total)
    strides = (x.stride(0), residual.stride(0))
    warps = min(16, max(1, block // 512))
    _rms_norm[(tokens,)](*tensors, *strides, hidden, eps, ADD=add, BLOCK=block, num_warps=warps)


@triton.jit
def _rms_norm(
    x,
    residual,
    weight,
    out,
    total,
    x_stride,
    residual_stride,
    hidden,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row per program; it rounds where the torch twin does."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < hidden
    values = tl.load(x + row * x_stride + at, mask=inside, other=0.0)
    dtype = values.dtype
    wide = values.to(tl.float32)
    if ADD:
        wide += tl.load(residual + row * residual_stride + at, mask=inside, other=0.0).to(
            tl.float32
        )
        rounded = wide.to(dtype)
        tl.store(total + row * hidden + at, rounded, mask=inside)
        wide = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / hidden + eps)
    normed = (wide * scale).to(dtype).to(tl.float32)
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + at, (normed * gain).to(dtype), mask=inside)
