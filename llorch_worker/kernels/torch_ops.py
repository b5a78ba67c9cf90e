"""The operations in plain torch, for any device and dtype; all kernels are tested against them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from llorch_worker.kernels.interface import (
    AttentionRoom,
    CausalMask,
    PagedAttention,
    PagedSequences,
    SampledRows,
)
from llorch_worker.kernels.layer_kv import LayerKV
from llorch_worker.kernels.torch_attention import (
    GatheredDecode,
    GatheredPrefill,
    gathered_attention_bytes,
)
from llorch_worker.kernels.uniforms import uniforms


class TorchOps:
    """See ``Ops``."""

    name = "torch"
    recordable = False  # its cost follows from the longest possible context
    reads_mask = True

    def attention_bytes(self, room: AttentionRoom) -> int:
        return gathered_attention_bytes(room)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return (wide * scale).to(x.dtype) * weight

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gelu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up

    def rope_and_write(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        kv: LayerKV,
    ) -> None:
        kv_heads = kv.keys.shape[-2]
        heads = qkv.shape[1] - 2 * kv_heads
        # Q's and K's heads are adjacent, so one call rotates both.
        rotating = qkv[:, : heads + kv_heads]
        rotating.copy_(apply_rope(rotating, cos, sin))
        kv.write(slots, qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :])

    def paged_decode(self, sequences: PagedSequences) -> PagedAttention:
        return GatheredDecode(sequences)

    def paged_prefill(self, sequences: PagedSequences, mask: CausalMask) -> PagedAttention:
        return GatheredPrefill(sequences, mask)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x``: [tokens, heads, head_dim], each head rotated by its token's angle.

    ``cos``, ``sin``: [tokens, head_dim / 2] float32. Computed in float32, returned in ``x``'s
    dtype.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


def sample(logits: torch.Tensor, rows: SampledRows, positions: torch.Tensor) -> torch.Tensor:
    """One token per row: the first whose cumulative probability exceeds the row's uniform number.

    Args:
        logits: [rows, vocab] float32; not changed.
        positions: [rows] int64, index of the token within its choice.

    Returns:
        [rows] int64.
    """
    likeliest = logits.argmax(dim=-1, keepdim=True)
    greedy = (rows.temperatures == 0).unsqueeze(1)
    scaled = logits / rows.temperatures.unsqueeze(1).masked_fill(greedy, 1.0)
    weights = scaled.softmax(dim=-1)
    if rows.truncates:
        truncate_rows(weights, scaled, None, rows.log_min_p, rows.top_k, rows.top_p)
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    targets = uniforms(rows.seeds, positions).unsqueeze(1) * cumulative[:, -1:]
    passed = (cumulative > targets) & (weights > 0)
    drawn = torch.where(
        passed.any(-1, keepdim=True), passed.int().argmax(-1, keepdim=True), likeliest
    )
    return torch.where(greedy, likeliest, drawn).squeeze(1)


def truncate_rows(
    weights: torch.Tensor,
    scaled: torch.Tensor,
    rows: torch.Tensor | None,
    log_min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> None:
    """See ``TruncateRows``; on any device. It sorts the vocabulary, which dominates sampling."""
    if rows is not None:
        truncated = weights[rows]
        truncate_rows(truncated, scaled[rows], None, log_min_p, top_k, top_p)
        weights[rows] = truncated
        return
    falling, order = scaled.sort(dim=-1, descending=True)
    inside = torch.arange(falling.shape[-1], device=falling.device) < top_k.unsqueeze(1)
    # Equivalent to p >= min_p * p_max.
    inside &= falling >= falling[:, :1] + log_min_p.unsqueeze(1)
    # Each of these takes 8 bytes for each logit of the batch: none stays longer than it is read.
    masses = weights.gather(1, order).to(torch.float64).mul_(inside)
    del order
    cumulative = masses.cumsum(dim=-1)
    del masses
    before = cumulative.roll(1, dims=-1)
    before[:, 0] = 0  # the likeliest token always stays
    inside &= before < top_p.unsqueeze(1) * cumulative[:, -1:]
    kept = inside.sum(dim=-1, keepdim=True).clamp_(min=1)
    weights.mul_(scaled >= falling.gather(1, kept - 1))
