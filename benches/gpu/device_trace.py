"""The times at which the card was busy, by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.profiler import ProfilerActivity, profile

Span = tuple[float, float]
"""Begin and end, on one clock."""


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
