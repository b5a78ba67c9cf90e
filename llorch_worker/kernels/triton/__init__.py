"""The operations as Triton kernels, one file each, for CUDA or Triton's interpreter."""

from __future__ import annotations

import os

# Triton 3.10 turns fusion off, which would round sums otherwise and be slower.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

from llorch_worker.kernels.triton.triton_ops import TritonOps

__all__ = ["TritonOps"]
