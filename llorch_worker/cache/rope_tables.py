"""Cosines and sines of rotary position embeddings, computed once for every position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class RopeScaling:
    """How a model extends its context beyond the one it was first trained for.

    ``linear`` divides all frequencies by ``factor``. ``llama3`` divides the low ones, with a smooth
    transition. ``yarn`` blends by rotations within the original context and sharpens attention.
    ``factors`` divides each frequency by its own number (``rope_freqs`` in a GGUF file) and by
    ``factor``. ``longrope`` divides each by one of two numbers: of ``long_factors`` if sequences
    may be longer than ``original_max_context``, else of ``factors``.
    """

    kind: Literal["linear", "llama3", "yarn", "factors", "longrope"]
    factor: float = 1.0
    original_max_context: int = 0
    extended_context: int = 0
    """``factor`` times the original context, where a file with ``yarn`` names that."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Multiplies cosines and sines (``yarn``, ``longrope``)."""
    truncate: bool = True
    """Round the ends of ``yarn``'s blend to whole pairs."""
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def describe(self) -> str:
        """For people: ``linear x4``."""
        return f"{self.kind} x{self.factor:g}" if self.factor != 1.0 else self.kind


@dataclass(frozen=True)
class Rope:
    """One kind of rotation. ``dim`` numbers of each head rotate, in pairs; None for all of them."""

    theta: float
    scaling: RopeScaling | None = None
    dim: int | None = None


class RopeTables:
    """``cos`` and ``sin``: [kinds, max_context, head_dim / 2] float32, of each kind of rotation.

    A pair that does not rotate has the angle 0 at every position.
    """

    def __init__(
        self, ropes: Sequence[Rope], *, head_dim: int, max_context: int, device: torch.device
    ) -> None:
        shape = (len(ropes), max_context, head_dim // 2)
        self.cos, self.sin = torch.ones(shape), torch.zeros(shape)
        for rope, cos, sin in zip(ropes, self.cos, self.sin, strict=True):
            frequencies = inverse_frequencies(rope, head_dim, max_context)
            angles = torch.arange(max_context, dtype=torch.float32)[:, None] * frequencies
            strength = rope.scaling.attention_factor if rope.scaling is not None else 1.0
            cos[:, : len(frequencies)] = angles.cos() * strength
            sin[:, : len(frequencies)] = angles.sin() * strength
        self.cos, self.sin = self.cos.to(device), self.sin.to(device)

    def at(self, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each kind's cosines and sines, [tokens, head_dim / 2], at ``positions``: [tokens]."""
        return [
            (cos.index_select(0, positions), sin.index_select(0, positions))
            for cos, sin in zip(self.cos, self.sin, strict=True)
        ]


def inverse_frequencies(rope: Rope, head_dim: int, max_context: int) -> torch.Tensor:
    """Radians per position for each pair that rotates: [dim / 2] float32.

    RoFormer (arXiv 2104.09864) with the scalings of position interpolation (2306.15595), Llama 3.1,
    YaRN (2309.00071) and LongRoPE (2402.13753), each as transformers computes it.
    """
    theta, scaling = rope.theta, rope.scaling
    dim = head_dim if rope.dim is None else rope.dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / max(1, dim)
    periods = theta**exponents
    frequencies = 1.0 / periods
    if scaling is None:
        return frequencies
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling)
    if scaling.kind == "yarn":
        return _yarn(periods, theta, scaling)
    if scaling.kind == "longrope":
        is_long = max_context > scaling.original_max_context
        factors = scaling.long_factors if is_long else scaling.factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * periods)
    if scaling.kind == "factors":
        frequencies = frequencies / torch.tensor(scaling.factors, dtype=torch.float32)
    return frequencies / scaling.factor


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    wavelengths = 2 * math.pi / frequencies
    smooth = (scaling.original_max_context / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


def _yarn(periods: torch.Tensor, theta: float, scaling: RopeScaling) -> torch.Tensor:
    head_dim = 2 * len(periods)

    def pair_that_makes(rotations: float) -> float:
        """The (fractional) pair that makes this many rotations within the original context."""
        wavelength = scaling.original_max_context / (rotations * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = pair_that_makes(scaling.beta_fast), pair_that_makes(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as transformers, against division by zero
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    # Keep this order: far into a context, one bit of a frequency is many bits of an angle.
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept
