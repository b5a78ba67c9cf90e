"""Cosines and sines of rotary position embeddings, computed once for every position."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class RopeScaling:
    """How a model extends its context beyond the one it was first trained for.

    ``linear`` divides all frequencies by ``factor``. ``llama3`` divides the low ones, with a smooth
    transition. ``yarn`` blends by rotations within the original context and sharpens attention.
    ``factors`` divides each frequency by its own number (``rope_freqs`` in a GGUF file) and by
    ``factor``.
    """

    kind: Literal["linear", "llama3", "yarn", "factors"]
    factor: float = 1.0
    original_max_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Multiplies cosines and sines (``yarn``)."""
    truncate: bool = True
    """Round the ends of ``yarn``'s blend to whole pairs."""
    factors: tuple[float, ...] = ()


class RopeTables:
    """``cos`` and ``sin``: [max_context, head_dim / 2] float32."""

    def __init__(
        self,
        *,
        head_dim: int,
        theta: float,
        scaling: RopeScaling | None,
        max_context: int,
        device: torch.device,
    ) -> None:
        frequencies = inverse_frequencies(head_dim, theta, scaling)
        angles = torch.arange(max_context, dtype=torch.float32)[:, None] * frequencies
        strength = scaling.attention_factor if scaling is not None else 1.0
        self.cos = (angles.cos() * strength).to(device)
        self.sin = (angles.sin() * strength).to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines at ``positions``: [tokens], each [tokens, head_dim / 2]."""
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)

    @property
    def nbytes(self) -> int:
        return self.cos.nbytes + self.sin.nbytes


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """Radians per position for each pair of a head: [head_dim / 2] float32.

    RoFormer (arXiv 2104.09864) with the scalings of position interpolation (2306.15595), Llama 3.1
    and YaRN (2309.00071), each as transformers computes it.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    periods = theta**exponents
    frequencies = 1.0 / periods
    if scaling is None:
        return frequencies
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling)
    if scaling.kind == "yarn":
        return _yarn(periods, theta, scaling)
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

    def pair_that_turns(rotations: float) -> float:
        """The (fractional) pair that makes this many rotations within the original context."""
        wavelength = scaling.original_max_context / (rotations * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as transformers, against division by zero
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    # Keep this order: far into a context, one bit of a frequency is many bits of an angle.
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept
