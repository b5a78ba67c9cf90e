"""min_p, top_k and top_p through the compiled kernel."""

from __future__ import annotations

import torch

from llorch_worker.kernels.native.library import NativeKernels


def truncate_rows(
    kernels: NativeKernels,
    weights: torch.Tensor,
    scaled: torch.Tensor,
    rows: torch.Tensor | None,
    log_min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> None:
    """See ``TruncateRows``, after the first argument. Tensors are contiguous and on the CPU."""
    threads = torch.get_num_threads()
    vocab = weights.shape[-1]
    work = torch.empty(kernels.truncate_rows_work_bytes(vocab, threads), dtype=torch.uint8)
    kernels.truncate_rows(
        weights.data_ptr(),
        scaled.data_ptr(),
        None if rows is None else rows.data_ptr(),
        log_min_p.data_ptr(),
        top_k.data_ptr(),
        top_p.data_ptr(),
        work.data_ptr(),
        len(top_k),
        vocab,
        threads,
    )
