"""A model's operations on CUDA, except its matrix products."""

from __future__ import annotations

from llorch_worker.kernels.interface import CausalMask, PagedAttention, PagedSequences
from llorch_worker.kernels.triton.gate_and_mul import gelu_and_mul, silu_and_mul
from llorch_worker.kernels.triton.paged_decode import MOST_SPLITS, TritonDecode
from llorch_worker.kernels.triton.paged_prefill import TritonPrefill
from llorch_worker.kernels.triton.rms_norm import add_rms_norm, rms_norm
from llorch_worker.kernels.triton.rope_and_write import rope_and_write


class TritonOps:
    """See ``Ops``."""

    name = "triton"
    recordable = True
    reads_mask = False
    rms_norm = staticmethod(rms_norm)
    add_rms_norm = staticmethod(add_rms_norm)
    silu_and_mul = staticmethod(silu_and_mul)
    gelu_and_mul = staticmethod(gelu_and_mul)
    rope_and_write = staticmethod(rope_and_write)

    def __init__(self, processors: int, *, batch_invariant: bool = False) -> None:
        """``processors``: the card's streaming multiprocessors, all of which decode should use.

        With ``batch_invariant`` a token's attention has the same bits in every batch, in decode and
        in prefill, at the price of fewer programs.
        """
        self._processors = processors
        self._batch_invariant = batch_invariant

    def paged_decode(self, sequences: PagedSequences) -> PagedAttention:
        most_splits = 1 if self._batch_invariant else MOST_SPLITS
        return TritonDecode(sequences, self._processors, most_splits)

    def paged_prefill(self, sequences: PagedSequences, mask: CausalMask) -> PagedAttention:  # noqa: ARG002 - positions imply the mask
        return TritonPrefill(sequences, like_decode=self._batch_invariant)
