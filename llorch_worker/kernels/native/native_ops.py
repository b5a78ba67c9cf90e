"""The model's operations through the compiled kernels, for bfloat16 on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from llorch_worker.kernels.interface import (
    AttentionRoom,
    CausalMask,
    PagedAttention,
    PagedSequences,
)
from llorch_worker.kernels.layer_kv import LayerKV
from llorch_worker.kernels.native.library import NativeKernels
from llorch_worker.kernels.native.paged_attention import NativeAttention, layer_arguments

MAX_HEAD_DIM = 256


class NativeOps:
    """See ``Ops``. Tensors are bfloat16 and contiguous, as the model's are."""

    name = "native"
    recordable = False
    reads_mask = False

    def __init__(self, kernels: NativeKernels) -> None:
        self.kernels = kernels

    @staticmethod
    def refusal(dtype: torch.dtype, head_dim: int) -> str | None:
        """The reason why such a model cannot use the native kernels, or None."""
        if dtype is torch.float32:
            return "float32 is the exact reference"
        if dtype is not torch.bfloat16:
            return f"native kernels need bfloat16, not {str(dtype).removeprefix('torch.')}"
        if head_dim % 32 or head_dim > MAX_HEAD_DIM:
            return f"native kernels need heads of 32, 64 .. {MAX_HEAD_DIM}, not of {head_dim}"
        return None

    def attention_bytes(self, room: AttentionRoom) -> int:
        return room.gathered_bytes

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        threads = torch.get_num_threads()
        self.kernels.rms_norm(
            x.data_ptr(), weight.data_ptr(), out.data_ptr(), *x.shape, eps, threads
        )
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty_like(x)
        threads = torch.get_num_threads()
        pointers = (x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr())
        self.kernels.add_rms_norm(*pointers, *x.shape, eps, threads)
        return out, residual

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return _gated(self.kernels.silu_and_mul, gate_up)

    def gelu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return _gated(self.kernels.gelu_and_mul, gate_up)

    def rope_and_write(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        kv: LayerKV,
    ) -> None:
        tokens, heads, head_dim = qkv.shape
        kv_heads = kv.keys.shape[2]
        self.kernels.rope_and_write(
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            slots.data_ptr(),
            *layer_arguments(kv),
            tokens,
            heads - 2 * kv_heads,
            kv_heads,
            head_dim,
            torch.get_num_threads(),
        )

    def paged_decode(self, sequences: PagedSequences) -> PagedAttention:
        return NativeAttention(self.kernels, sequences)

    def paged_prefill(self, sequences: PagedSequences, mask: CausalMask) -> PagedAttention:  # noqa: ARG002 - positions imply the mask
        return NativeAttention(self.kernels, sequences)


def _gated(kernel: Callable[..., None], gate_up: torch.Tensor) -> torch.Tensor:
    tokens, both = gate_up.shape
    out = gate_up.new_empty(tokens, both // 2)
    kernel(gate_up.data_ptr(), out.data_ptr(), tokens, both // 2, torch.get_num_threads())
    return out
