"""The card's own rates, with which all is compared, and the times at which it was busy."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.profiler import ProfilerActivity, profile

from benches.gpu.figures import Rates
from llorch_worker.bench.instruments.ceilings import fastest_s, measure_ceilings

Span = tuple[float, float]
"""Begin and end, on one clock."""


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


def device_spans(work: Callable[[], None], device: torch.device) -> list[Span]:
    """The spans of every kernel, copy and fill on the card while ``work`` runs, in microseconds.

    Empty if torch cannot profile the card or another tool does. The card should be idle before."""
    if device.type != "cuda":
        return []
    try:
        trace = profile(activities=[ProfilerActivity.CUDA])
        trace.start()
    except (AssertionError, RuntimeError):
        return []
    try:
        work()
        torch.cuda.synchronize(device)
    finally:
        trace.stop()
    return [
        (event.time_range.start, event.time_range.end)
        for event in trace.events() or ()
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]


def idle_share(spans: Iterable[Span]) -> float | None:
    """The share of time from the first begin to the last end that no span covers; None if empty."""
    ordered = sorted(spans)
    if not ordered:
        return None
    first = until = ordered[0][0]
    idle = 0.0
    for begin, end in ordered:
        idle += max(0.0, begin - until)
        until = max(until, end)
    return idle / (until - first) if until > first else None
