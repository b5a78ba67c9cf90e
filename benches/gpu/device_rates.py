"""The card's own rates, with which everything else is compared."""

from __future__ import annotations

import torch

from benches.gpu.figures import Rates
from llorch_worker.bench.instruments.ceilings import fastest_s, measure_ceilings


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measures the card's rates. Takes some seconds and 8 GiB, which it frees."""
    copy = _copy_bytes_per_s(device)
    torch.cuda.empty_cache()
    ceilings = measure_ceilings(device, dtype)
    # torch's allocator would keep the arrays' memory, and the KV cache would be planned without it.
    torch.cuda.empty_cache()
    return Rates(copy, ceilings.read_bytes_per_s, ceilings.flops_per_s)


def _copy_bytes_per_s(device: torch.device) -> float:
    """Bytes per second read and written by the fastest copy of 4 GiB within the card."""
    source = torch.ones(2**30, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / fastest_s(lambda: target.copy_(source), device)
