"""min_p, top_k and top_p through the compiled kernel."""

from __future__ import annotations

import torch

from llorch_worker.kernels.native.library import Int, Long, NativeLibrary, Pointer


class NativeTruncateRows:
    """See ``TruncateRows``. Tensors are contiguous, and on the CPU."""

    def __init__(self, library: NativeLibrary) -> None:
        self._truncate_rows = library.function(
            "llorch_truncate_rows", *[Pointer] * 7, Long, Long, Int
        )
        self._work_bytes = library.function(
            "llorch_truncate_rows_work_bytes", Long, Int, result=Long
        )

    def __call__(
        self,
        weights: torch.Tensor,
        scaled: torch.Tensor,
        rows: torch.Tensor | None,
        log_min_p: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
    ) -> None:
        threads = torch.get_num_threads()
        vocab = weights.shape[-1]
        work = torch.empty(self._work_bytes(vocab, threads), dtype=torch.uint8)
        self._truncate_rows(
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
