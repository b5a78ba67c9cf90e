"""The operations in plain torch, with results that do not depend on the rest of the batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from llorch_worker.kernels.interface import CausalMask, PagedAttention, PagedSequences
from llorch_worker.kernels.tiled_attention import TiledAttention
from llorch_worker.kernels.torch_ops import TorchOps

ONE_THREAD_ELEMENTS = 32767
"""torch gives elementwise work of this size to one thread."""


class InvariantOps(TorchOps):
    """See ``Ops``. A row's result has the same bits in every batch, in decode and in prefill.

    The operations that are not overridden work row by row or with exact arithmetic.
    """

    reads_mask = False

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        # torch divides larger work between threads anywhere in a row, and computes the exponential
        # of what does not fill a vector in another way.
        gate, up = gate_up.chunk(2, dim=-1)
        rows = max(1, ONE_THREAD_ELEMENTS // gate.shape[1])
        return torch.cat([F.silu(piece) for piece in gate.split(rows)]) * up

    def paged_decode(self, sequences: PagedSequences) -> PagedAttention:
        return TiledAttention(sequences)

    def paged_prefill(self, sequences: PagedSequences, mask: CausalMask) -> PagedAttention:  # noqa: ARG002 - positions imply the mask
        return TiledAttention(sequences)
