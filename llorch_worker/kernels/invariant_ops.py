"""The operations in plain torch, with results that do not depend on the rest of the batch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from llorch_worker.kernels.interface import (
    AttentionRoom,
    CausalMask,
    PagedAttention,
    PagedSequences,
)
from llorch_worker.kernels.tiled_attention import TiledAttention, tiled_bytes
from llorch_worker.kernels.torch_ops import TorchOps

ONE_THREAD_ELEMENTS = 16384
"""torch gives elementwise work of this size to one thread."""


class InvariantOps(TorchOps):
    """See ``Ops``. A row's result has the same bits in every batch, in decode and in prefill.

    The operations that are not overridden work row by row or with exact arithmetic.
    """

    reads_mask = False

    def attention_bytes(self, room: AttentionRoom) -> int:
        return tiled_bytes(room)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return _in_one_thread(super().silu_and_mul, gate_up)

    def gelu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return _in_one_thread(super().gelu_and_mul, gate_up)

    def paged_decode(self, sequences: PagedSequences) -> PagedAttention:
        return TiledAttention(sequences)

    def paged_prefill(self, sequences: PagedSequences, mask: CausalMask) -> PagedAttention:  # noqa: ARG002 - positions imply the mask
        return TiledAttention(sequences)


def _in_one_thread(
    gated: Callable[[torch.Tensor], torch.Tensor], gate_up: torch.Tensor
) -> torch.Tensor:
    """torch divides larger work between threads anywhere in a row, and computes the exponential of
    what does not fill a vector in another way."""
    rows = max(1, 2 * ONE_THREAD_ELEMENTS // gate_up.shape[1])
    return torch.cat([gated(piece) for piece in gate_up.split(rows)])
