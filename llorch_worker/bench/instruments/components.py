"""The parts that a step's time is shared out to, and the rule that judges their shares."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Literal


class Component(StrEnum):
    """A part of the engine, by the name that tables show."""

    QKV = "QKV projection"
    ROPE_AND_WRITE = "RoPE and KV write"
    ATTENTION = "attention"
    ATTENTION_OUTPUT = "attention's output projection"
    NORM = "RMS norm and residual"
    GATE_UP = "gate and up projection"
    SILU_AND_MUL = "SiLU and product"
    DOWN = "down projection"
    EMBEDDING = "embedding"
    OUTPUT_MATRIX = "output matrix"
    PREPARATION = "angles, indices and masks"
    BETWEEN = "between the model's parts"
    """Python from part to part, and what the forward pass does itself."""
    BATCH = "laying out the batch"
    SAMPLER = "sampler"
    SCHEDULER = "scheduler"
    DELIVERY = "detokeniser and events"
    REST = "rest"
    """What of a step is in no other component."""


MATRICES_AND_ATTENTION: Final = frozenset(
    {
        Component.QKV,
        Component.ATTENTION,
        Component.ATTENTION_OUTPUT,
        Component.GATE_UP,
        Component.DOWN,
        Component.OUTPUT_MATRIX,
    }
)
"""What no other arrangement of the same code makes faster."""

CRITICAL_SHARE: Final = 0.10
MODERATE_SHARE: Final = 0.05

Verdict = Literal["critical", "moderate", "minor"]


def verdict(share: float) -> Verdict:
    """By the one decision rule: above 10% of the time optimise, below leave it."""
    if share > CRITICAL_SHARE:
        return "critical"
    return "moderate" if share >= MODERATE_SHARE else "minor"
