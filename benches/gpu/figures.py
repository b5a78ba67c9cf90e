"""The figures of the report, with their names, units and lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

WARM_UP_STEPS = 4
STEPS = 25
"""Steps timed one by one, then again under the profiler. Odd, so that there is a middle one."""
LEAD_TOKENS = WARM_UP_STEPS + (STEPS + 1) // 2
"""Tokens from the prompt to the context of the middle timed step."""
NEW_TOKENS = 2 * (WARM_UP_STEPS + STEPS) + 4
"""More tokens than a sequence gets while it is measured, so that none ends."""


@dataclass(frozen=True)
class Case:
    """``batch`` sequences, each with ``context`` tokens in the middle of the timed steps."""

    batch: int
    context: int

    def blocks(self, block_size: int) -> int:
        """KV blocks that it needs, including new tokens and the scheduler's reserve."""
        return self.batch * (-(-(self.context + NEW_TOKENS) // block_size) + 1)


@dataclass(frozen=True)
class Rates:
    """The device's own rates, measured in the same run."""

    kind: ClassVar[str] = "device"

    copy_bytes_per_s: float
    """Bytes read and written."""
    read_bytes_per_s: float | None
    matrix_flops_per_s: float

    @property
    def line(self) -> str:
        read = self.read_bytes_per_s
        return (
            f"copy {self.copy_bytes_per_s / 1e12:.2f} TB/s, "
            f"read {'not measured' if read is None else f'{read / 1e12:.2f} TB/s'}, "
            f"matrices {self.matrix_flops_per_s / 1e12:.0f} TFLOP/s"
        )


@dataclass(frozen=True)
class DecodeFigures:
    kind: ClassVar[str] = "decode"

    weights: str
    batch: int
    context_tokens: int
    graphs: bool
    step_ms: float
    """Median time from one step's tokens on the host to the next step's."""
    tokens_per_s: float
    copy_bandwidth_share: float
    """Bytes of weights and KV that the middle step must read, per ``step_ms``, as a share of the
    copy rate."""
    roofline_share: float
    idle_share: float | None
    """Share of the profiled steps, from first to last kernel, in which the card is idle. None if
    the profiler saw no kernel. The profiler slows launches, so this is an upper bound."""
    times_bf16: float | None = None
    """``tokens_per_s`` divided by that of dense weights."""

    @property
    def line(self) -> str:
        idle = "unknown" if self.idle_share is None else f"{self.idle_share:6.1%}"
        return (
            f"decode {self.weights:6} {self.batch:4} x {self.context_tokens:5} "
            f"{'graphs' if self.graphs else 'eager ':6} {self.step_ms:8.2f} ms "
            f"{self.tokens_per_s:9.0f} tokens/s  copy {self.copy_bandwidth_share:6.1%}  "
            f"roofline {self.roofline_share:6.1%}  idle {idle}"
            + ("" if self.times_bf16 is None else f"  {self.times_bf16:.2f} times bf16")
        )


@dataclass(frozen=True)
class PrefillFigures:
    """One prompt in one step."""

    kind: ClassVar[str] = "prefill"

    weights: str
    tokens: int
    step_ms: float
    tokens_per_s: float
    matrix_rate_share: float

    @property
    def line(self) -> str:
        return (
            f"prefill {self.weights:6} {self.tokens:5} {self.step_ms:8.2f} ms "
            f"{self.tokens_per_s:9.0f} tokens/s  matrix rate {self.matrix_rate_share:6.1%}"
        )
