"""The real engine, whose device fails after ``LOST_AFTER_STEPS`` steps."""

from __future__ import annotations

import itertools
import os
from typing import Any

import torch

from llorch_worker.engine import Engine
from llorch_worker.model.batch import RaggedBatch
from llorch_worker.model.transformer import Transformer

LAST_STEP = int(os.environ["LOST_AFTER_STEPS"])

_forward = Transformer.forward
_steps = itertools.count(1)


def failing_forward(
    self: Transformer, batch: RaggedBatch, *args: Any, **options: Any
) -> torch.Tensor:
    if next(_steps) > LAST_STEP:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure\nmore lines")
    return _forward(self, batch, *args, **options)


Transformer.forward = failing_forward  # type: ignore[method-assign]
__all__ = ["Engine"]
