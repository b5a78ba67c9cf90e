"""The operations as Triton kernels, one file each, for CUDA or Triton's interpreter."""

from llorch_worker.kernels.triton.triton_ops import TritonOps

__all__ = ["TritonOps"]
