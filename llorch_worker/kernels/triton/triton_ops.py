"""All of a model's operations but its matrix products, on CUDA."""

from __future__ import annotations

import torch

from llorch_worker.kernels.interface import CausalMask, PagedAttention, PagedSequences
from llorch_worker.kernels.layer_kv import LayerKV
from llorch_worker.kernels.triton.paged_decode import TritonDecode
from llorch_worker.kernels.triton.paged_prefill import TritonPrefill
from llorch_worker.kernels.triton.rms_norm import add_rms_norm, rms_norm
from llorch_worker.kernels.triton.rope_and_write import rope_and_write
from llorch_worker.kernels.triton.silu_and_mul import silu_and_mul


class TritonOps:
    """See ``Ops``."""

    name = "triton"
    recordable = True

    def __init__(self, processors: int) -> None:
        """``processors``: the card's streaming multiprocessors, all of which decode is to fill."""
        self._processors = processors

    @classmethod
    def of(cls, device: torch.device) -> TritonOps:
        """For one CUDA device."""
        return cls(torch.cuda.get_device_properties(device).multi_processor_count)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(x, residual, weight, eps)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(gate_up)

    def rope_and_write(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        kv: LayerKV,
    ) -> None:
        rope_and_write(qkv, cos, sin, slots, kv)

    def paged_decode(self, sequences: PagedSequences) -> PagedAttention:
        tables = sequences.block_tables
        contexts = sequences.device_contexts
        if contexts is None:
            contexts = torch.tensor(sequences.context_lengths, device=tables.device)
        count = len(sequences.first_rows)
        if sequences.first_rows == tuple(range(count)):
            # Made on the device: nothing may be copied there while a graph is recorded.
            rows = torch.arange(count, device=tables.device)
        else:
            rows = torch.tensor(sequences.first_rows, device=tables.device)
        return TritonDecode(
            rows=rows, contexts=contexts, block_tables=tables, processors=self._processors
        )

    def paged_prefill(self, sequences: PagedSequences, mask: CausalMask) -> PagedAttention:  # noqa: ARG002 - causality follows from positions
        device = sequences.block_tables.device
        numbers = torch.tensor(
            (sequences.first_rows, sequences.query_lengths, sequences.context_lengths),
            device=device,
        )
        return TritonPrefill(
            first_rows=numbers[0],
            query_lengths=numbers[1],
            contexts=numbers[2],
            block_tables=sequences.block_tables,
            longest_query=max(sequences.query_lengths),
        )
