"""Random rows of quantised block types."""

from __future__ import annotations

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from llorch_worker.weights.groups import group_form

QUANTISED = [type_ for type_ in GGMLQuantizationType if group_form(type_) is not None]

_HALF_FLOATS = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}
_HALF_FLOATS |= {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}
"""Byte offsets of the float16 numbers in a block; (0,) for all other types."""


def random_rows(
    type_: GGMLQuantizationType, rows: int, columns: int = 512, seed: int = 0
) -> np.ndarray:
    """Raw blocks with scales as trained models have them: [rows, row bytes]."""
    block, block_bytes = GGML_QUANT_SIZES[type_]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows * columns // block, block_bytes), np.uint8)
    for start in _HALF_FLOATS.get(type_.name, (0,)):
        halves = rng.uniform(1e-4, 1e-2, (len(raw), 1)).astype(np.float16)
        raw[:, start : start + 2] = halves.view(np.uint8)
    return raw.reshape(rows, -1)
