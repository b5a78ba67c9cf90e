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
        self._attend = kernels.paged_attention
        self._lengths = torch.tensor(
            (sequences.first_rows, sequences.query_lengths, sequences.context_lengths)
        )
        self._tables = sequences.block_tables.contiguous()
        self._block_size = sequences.block_size
        self._partial_count = kernels.paged_attention_partials(
            self._lengths.data_ptr(), len(sequences.first_rows)
        )
        self._partials = torch.empty(0)

    def __call__(
        self, qkv: torch.Tensor, kv: LayerKV, out: torch.Tensor, form: AttentionForm
    ) -> None:
        _, all_heads, head_dim = qkv.shape
        kv_heads = kv.keys.shape[2]
        heads = all_heads - 2 * kv_heads
        room = self._partial_count * heads * (head_dim + 2)
        if self._partials.numel() < room:
            self._partials = torch.empty(room)
        failed = self._attend(
            qkv.data_ptr(),
            *layer_arguments(kv),
            out.data_ptr(),
            self._lengths.data_ptr(),
            self._tables.data_ptr(),
            self._partials.data_ptr(),
            *self._tables.shape,
            self._block_size,
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
