"""Attention through the compiled kernel, which reads keys and values in place."""

from __future__ import annotations

import torch

from llorch_worker.engine_options import KvDtype
from llorch_worker.kernels.interface import AttentionForm, PagedSequences
from llorch_worker.kernels.layer_kv import LayerKV
from llorch_worker.kernels.native.library import NativeKernels

KV_FORMS: tuple[KvDtype, ...] = ("auto", "fp8", "int8")
"""In the order of ``kv_form.h``; without a dtype of its own, a cache is in bfloat16."""


def layer_arguments(kv: LayerKV) -> tuple[int | None, ...]:
    """What the kernels take for a layer's cells: keys, values, their scales, their form."""
    return (
        kv.keys.data_ptr(),
        kv.values.data_ptr(),
        None if kv.key_scales is None else kv.key_scales.data_ptr(),
        None if kv.value_scales is None else kv.value_scales.data_ptr(),
        KV_FORMS.index(kv.kv_dtype),
    )


class NativeAttention:
    """Sequences with any number of new tokens each; see ``PagedAttention``."""

    def __init__(self, kernels: NativeKernels, sequences: PagedSequences) -> None:
        self._kernels = kernels
        self.lengths = torch.tensor(
            (sequences.first_rows, sequences.query_lengths, sequences.context_lengths)
        )
        """[3, sequences]: first rows, query lengths, context lengths."""
        self.tables = sequences.block_tables.contiguous()
        self.block_size = sequences.block_size

    def __call__(
        self, qkv: torch.Tensor, kv: LayerKV, out: torch.Tensor, form: AttentionForm
    ) -> None:
        _, all_heads, head_dim = qkv.shape
        kv_heads = kv.keys.shape[2]
        heads = all_heads - 2 * kv_heads
        count = self._kernels.paged_attention_partials(
            self.lengths.data_ptr(), self.lengths.shape[1]
        )
        partials = torch.empty(count * heads * (head_dim + 2))
        failed = self._kernels.paged_attention(
            qkv.data_ptr(),
            *layer_arguments(kv),
            out.data_ptr(),
            self.lengths.data_ptr(),
            self.tables.data_ptr(),
            partials.data_ptr(),
            *self.tables.shape,
            self.block_size,
            heads,
            kv_heads,
            head_dim,
            form.scale_for(head_dim),
            form.window or 0,
            form.softcap or 0.0,
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("not enough memory to plan attention")
