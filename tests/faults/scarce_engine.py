"""The real engine, on a device with memory for ``SCARCE_TOKENS`` tokens.

A step whose sequences hold more tokens in total runs out of memory.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from llorch_worker.engine import Engine
from llorch_worker.model.batch import RaggedBatch
from llorch_worker.model.transformer import Transformer

LIMIT_TOKENS = int(os.environ["SCARCE_TOKENS"])

_forward = Transformer.forward


def scarce_forward(
    self: Transformer, batch: RaggedBatch, *args: Any, **options: Any
) -> torch.Tensor:
    if sum(batch.context_lengths) > LIMIT_TOKENS:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    return _forward(self, batch, *args, **options)


Transformer.forward = scarce_forward  # type: ignore[method-assign]
__all__ = ["Engine"]
