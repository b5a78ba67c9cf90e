"""The real engine, of which each step takes ``SLOW_STEP_MS`` longer."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from llorch_worker.engine import Engine
from llorch_worker.model.batch import RaggedBatch
from llorch_worker.model.transformer import Transformer

STEP_S = float(os.environ["SLOW_STEP_MS"]) / 1e3

_forward = Transformer.forward


def slow_forward(self: Transformer, batch: RaggedBatch, *args: Any, **options: Any) -> torch.Tensor:
    time.sleep(STEP_S)
    return _forward(self, batch, *args, **options)


Transformer.forward = slow_forward  # type: ignore[method-assign]
__all__ = ["Engine"]
