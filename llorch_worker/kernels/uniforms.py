"""Randomness as a function of (seed, position) alone: no generator, no state, no neighbours.

A counter-based hash gives each (seed, position) one number in [0, 1), so a token depends neither
on the rest of the batch nor on how often the sequence was preempted or resumed. The mixer is
the finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators,
OOPSLA 2014).
"""

from __future__ import annotations

from hashlib import blake2b

import torch

_MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
FACTOR_1 = 0xBF58476D1CE4E5B9
FACTOR_2 = 0x94D049BB133111EB

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


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of ``n`` choices; the first keeps ``seed``, so n=1 equals choice 0 of n=4."""
    if choice == 0:
        return seed
    return mix64((mix64((seed + GAMMA) & _MASK) + choice * FACTOR_1) & _MASK) >> 1


def job_seed(job_id: str) -> int:
    """The seed of a job without one: 53 bits, the same in every attempt of the job.

    Readers that hold JSON numbers as doubles, such as JavaScript and jq, round larger ones.
    """
    digest = blake2b(job_id.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) >> 11


def mix64(value: int) -> int:
    """The finaliser of SplitMix64 on one plain 64-bit integer."""
    value = ((value ^ (value >> 30)) * FACTOR_1) & _MASK
    value = ((value ^ (value >> 27)) * FACTOR_2) & _MASK
    return value ^ (value >> 31)


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
