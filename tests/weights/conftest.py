"""GGUF files of given tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from llorch_worker.weights.gguf import GgufCheckpoint


@pytest.fixture
def weight_file(tmp_path: Path, write_gguf: Callable[..., Path]) -> Callable[..., GgufCheckpoint]:
    def write(**tensors: tuple[np.ndarray, GGMLQuantizationType]) -> GgufCheckpoint:
        return GgufCheckpoint(write_gguf(tmp_path / "weights.gguf", tensors=tensors))

    return write
