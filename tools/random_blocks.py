"""Random blocks of types that ``gguf`` can dequantise but not quantise (the K and IQ types).

Their bits are drawn, not computed from weights: every byte is random except the block's scales,
which are set so that the values have mean 0 and the requested spread. Such a tensor costs an engine
as much as a real one, but its weights differ from those of the same seed in other types.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as BlockType

SAMPLE_BLOCKS = 4096
"""Blocks from which the scales are calibrated."""


@dataclass(frozen=True)
class _Scales:
    """Byte offsets of a block's float16 factors: of the values and of the subtracted minimum."""

    scale: int
    minimum: int | None = None


_SCALES = {
    BlockType.Q2_K: _Scales(80, 82),
    BlockType.Q3_K: _Scales(108),
    BlockType.Q4_K: _Scales(0, 2),
    BlockType.Q5_K: _Scales(0, 2),
    BlockType.Q6_K: _Scales(208),
    BlockType.IQ4_NL: _Scales(0),
    BlockType.IQ4_XS: _Scales(0),
    BlockType.IQ3_XXS: _Scales(0),
    BlockType.IQ3_S: _Scales(0),
    BlockType.IQ2_XXS: _Scales(0),
    BlockType.IQ2_XS: _Scales(0),
    BlockType.IQ2_S: _Scales(0),
}
BLOCK_TYPES = frozenset(_SCALES)


class RandomBlocks:
    """Draws rows of one block type."""

    def __init__(self, kind: BlockType) -> None:
        self._kind = kind
        self._block_elements, self._block_bytes = GGML_QUANT_SIZES[kind]
        self._at = _SCALES[kind]
        self._unit, self._minimum_share = self._calibrate()

    def rows(
        self, random: np.random.Generator, shape: tuple[int, int], spread: float
    ) -> npt.NDArray[np.uint8]:
        """[rows, row bytes] for ``shape`` in elements; ``spread``: the standard deviation."""
        blocks = shape[0] * shape[1] // self._block_elements
        drawn = self._drawn(random, blocks)
        scale = spread * self._unit
        self._set(drawn, scale, scale * self._minimum_share)
        return drawn.reshape(shape[0], -1)

    def _calibrate(self) -> tuple[float, float]:
        """The scale that gives standard deviation 1, and the minimum's share of it for mean 0."""
        drawn = self._drawn(np.random.default_rng(0), SAMPLE_BLOCKS)
        share = 0.0
        self._set(drawn, 1.0, 0.0)
        values = self._values(drawn)
        if self._at.minimum is not None:
            self._set(drawn, 0.0, 1.0)
            share = -float(values.mean() / self._values(drawn).mean())
            self._set(drawn, 1.0, share)
            values = self._values(drawn)
        return 1.0 / float(values.std()), share

    def _drawn(self, random: np.random.Generator, blocks: int) -> npt.NDArray[np.uint8]:
        raw = np.frombuffer(random.bytes(blocks * self._block_bytes), np.uint8)
        return raw.reshape(blocks, self._block_bytes).copy()

    def _set(self, blocks: npt.NDArray[np.uint8], scale: float, minimum: float) -> None:
        _put_half(blocks, self._at.scale, scale)
        if self._at.minimum is not None:
            _put_half(blocks, self._at.minimum, minimum)

    def _values(self, blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
        return gguf.dequantize(blocks, self._kind).astype(np.float64)


@cache
def random_blocks(kind: BlockType) -> RandomBlocks:
    """The generator for ``kind``, cached because calibrating its scales takes time."""
    return RandomBlocks(kind)


def _put_half(blocks: npt.NDArray[np.uint8], offset: int, value: float) -> None:
    blocks[:, offset : offset + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
