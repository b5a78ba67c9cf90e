"""Which implementation of the operations a model gets."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Literal

import torch

from llorch_worker.kernels.ops import Ops
from llorch_worker.kernels.torch_ops import TorchOps

KernelChoice = Literal["auto", "torch"]
"""``auto``: the fastest that the device, the dtype and this machine allow; ``torch``: plain."""

_log = logging.getLogger(__name__)


def select_ops(device: torch.device, dtype: torch.dtype, kernels: KernelChoice = "auto") -> Ops:
    """The operations for a model in ``dtype`` on ``device``; logs which they are, and why."""
    ops: Ops = TorchOps()
    reason = "asked for" if kernels == "torch" else "there are no faster ones for these"
    if kernels == "auto" and device.type == "cuda":
        if find_spec("triton") is None:
            reason = "Triton is not installed"
        else:
            # Not at the top: it reads the environment when it is imported, and only CUDA needs it.
            from llorch_worker.kernels.triton import TritonOps

            ops, reason = TritonOps.of(device), "the fastest on CUDA"
    _log.info("kernels: %s for %s on %s (%s)", ops.name, dtype, device, reason)
    return ops
