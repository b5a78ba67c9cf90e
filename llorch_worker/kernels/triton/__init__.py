"""The operations as Triton kernels, one file each; CUDA, or anywhere under Triton's interpreter."""

from llorch_worker.kernels.triton.triton_ops import TritonOps

__all__ = ["TritonOps"]
