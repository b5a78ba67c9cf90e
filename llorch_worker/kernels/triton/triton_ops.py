"""A model's operations on CUDA, except its matrix products."""

from __future__ import annotations

import torch

from llorch_worker.kernels.interface import (
    AttentionRoom,
    CausalMask,
    PagedAttention,
    PagedSequences,
)
from llorch_worker.kernels.triton.attention_tiles import MOST_ROWS
from llorch_worker.kernels.triton.attention_work import MOST_SLOTS, most_pieces
from llorch_worker.kernels.triton.gate_and_mul import gelu_and_mul, silu_and_mul
from llorch_worker.kernels.triton.paged_attention import Card, TritonAttention
from llorch_worker.kernels.triton.rms_norm import add_rms_norm, rms_norm
from llorch_worker.kernels.triton.rope_and_write import rope_and_write

SMALLEST_SHARED_BYTES = 99 * 1024
"""Of the cards since Ampere; data centre cards have more."""


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

    def __init__(
        self,
        processors: int,
        *,
        shared_bytes: int = SMALLEST_SHARED_BYTES,
        batch_invariant: bool = False,
    ) -> None:
        """``processors``: the card's streaming multiprocessors. ``shared_bytes``: the shared memory
        that a program may have.

        A token's attention has the same bits in every batch of decodes; with ``batch_invariant``
        also in prefill, which then has decode's small tiles.
        """
        self._card = Card(processors, shared_bytes)
        self._batch_invariant = batch_invariant

    @classmethod
    def of_card(cls, device: torch.device, *, batch_invariant: bool) -> TritonOps:
        """For a CUDA ``device`` that torch sees."""
        # Triton's own driver knows it too, but compiles C for that, also where a plan is all.
        card = torch.cuda.get_device_properties(device)
        return cls(
            card.multi_processor_count,
            shared_bytes=card.shared_memory_per_block_optin,  # type: ignore[attr-defined] # it has
            batch_invariant=batch_invariant,
        )

    def attention_bytes(self, room: AttentionRoom) -> int:
        """What is divided waits in float32 for the other parts."""
        pieces = most_pieces(room.max_context)
        divided = min(room.max_sequences * pieces, MOST_SLOTS + room.max_sequences)
        decode = divided * room.heads if pieces > 1 else 0
        # In prefill no more parts than programs that the card runs at once.
        parts = -(-self._card.programs // room.kv_heads) * room.kv_heads
        return max(decode, parts * MOST_ROWS) * (room.head_dim + 2) * torch.float32.itemsize

    def paged_decode(self, sequences: PagedSequences) -> PagedAttention:
        return self._attention(sequences, decodes=True)

    def paged_prefill(self, sequences: PagedSequences, mask: CausalMask) -> PagedAttention:  # noqa: ARG002 - positions imply the mask
        return self._attention(sequences, decodes=False)

    def _attention(self, sequences: PagedSequences, *, decodes: bool) -> PagedAttention:
        return TritonAttention(
            sequences, self._card, decodes=decodes, batch_invariant=self._batch_invariant
        )
