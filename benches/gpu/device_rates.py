"""The card's own rates, with which everything else is compared."""

from __future__ import annotations

import torch

from benches.gpu.figures import Rates
from llorch_worker.bench.instruments.ceilings import measure_ceilings


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measures the card's rates. Takes some seconds and 8 GiB, which it frees."""
    copy = _copy_bytes_per_s(device)
    torch.cuda.empty_cache()
    ceilings = measure_ceilings(device, dtype)
    # torch's allocator would keep the arrays' memory, and the KV cache would be planned without it.
    torch.cuda.empty_cache()
    return Rates(copy, ceilings.read_bytes_per_s, ceilings.flops_per_s)


def _copy_bytes_per_s(device: torch.device) -> float:
    """Bytes per second read and written by copies of 4 GiB within the card; the best of ten."""
    source = torch.ones(2**30, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    best_ms = float("inf")
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        best_ms = min(best_ms, begin.elapsed_time(end))
    return 2 * source.nbytes / (best_ms / 1e3)
