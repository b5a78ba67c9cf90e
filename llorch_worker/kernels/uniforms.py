"""Randomness as a function of (seed, position) alone: no generator, no state, no neighbours.

A counter-based hash gives each (seed, position) one number in [0, 1), so a token depends neither
on the rest of the batch nor on how often the sequence was preempted or resumed. The mixer is
the finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators,
OOPSLA 2014).
"""

from __future__ import annotations

import torch

from llorch_worker.contract.seeds import FACTOR_1, FACTOR_2, GAMMA

# 52 bits, not 53: u * total must stay below total after rounding, or the search falls off the end.
BITS = 52


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One number in [0, 1) for each pair.

    Args:
        seeds: [rows] int64, non-negative.
        positions: [rows] int64, index of the token within its choice.

    Returns:
        [rows] float64, on the device of ``seeds``.
    """
    stream = _mix(seeds + signed(GAMMA))
    bits = _mix(stream + (positions + 1) * signed(GAMMA))
    return _shift_right(bits, 64 - BITS).to(torch.float64) * 2.0**-BITS


def _mix(values: torch.Tensor) -> torch.Tensor:
    # [rows] int64: two's complement products wrap exactly as unsigned ones do.
    values = (values ^ _shift_right(values, 30)) * signed(FACTOR_1)
    values = (values ^ _shift_right(values, 27)) * signed(FACTOR_2)
    return values ^ _shift_right(values, 31)


def _shift_right(values: torch.Tensor, count: int) -> torch.Tensor:
    # torch shifts int64 arithmetically; the mask drops the copies of the sign.
    return (values >> count) & ((1 << (64 - count)) - 1)


def signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
