"""Chooses how a device keeps the model's matrices."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from llorch_worker.kernels import native_kernels_load
from llorch_worker.settings import KernelChoice
from llorch_worker.weights.linear import DenseLinears, Linears
from llorch_worker.weights.quantised_linear import QuantisedLinears


def select_linears(
    device: torch.device, dtype: torch.dtype, kernels: KernelChoice = "auto"
) -> Linears:
    """How to keep matrices for activations of ``dtype`` on ``device``.

    float32 is the exact reference, so everything is dequantised for it. When kernels are missing,
    ``choose_ops`` gives the reason.
    """
    quantised = kernels == "auto" and dtype is not torch.float32
    # Kernels are imported where they run: Triton reads the environment at import, and a card's
    # worker needs no C compiler.
    if quantised and device.type == "cuda" and find_spec("triton") is not None:
        from llorch_worker.kernels.triton.quantised_linear import quantised_linear

        return QuantisedLinears(device, dtype, quantised_linear)
    if quantised and device.type == "cpu" and dtype is torch.bfloat16 and native_kernels_load():
        from llorch_worker.weights.native_linear import NativeLinears

        return NativeLinears()
    return DenseLinears(device, dtype)
