"""Chooses how a device keeps the model's matrices."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

import torch
import torch.nn.functional as F

from llorch_worker.engine_options import KernelChoice
from llorch_worker.kernels import find_native_kernels
from llorch_worker.kernels.fixed_linear import fixed_linear
from llorch_worker.weights.linear import DenseLinears, Linears
from llorch_worker.weights.native_linear import NativeLinears
from llorch_worker.weights.quantised_linear import QuantisedLinears


def select_linears(
    device: torch.device,
    dtype: torch.dtype,
    kernels: KernelChoice = "auto",
    *,
    batch_invariant: bool = False,
) -> Linears:
    """How to keep matrices for activations of ``dtype`` on ``device``.

    float32 is the exact reference, so everything is dequantised for it. When kernels are missing,
    ``choose_ops`` gives the reason. With ``batch_invariant`` a row's result has the same bits in
    every batch; native products always have it.
    """
    product = fixed_linear if batch_invariant else F.linear
    quantised = kernels != "torch" and dtype is not torch.float32
    # Imported where it runs: Triton reads the environment at import.
    if quantised and device.type == "cuda" and find_spec("triton") is not None:
        from llorch_worker.kernels.triton.quantised_linear import quantised_linear

        multiply = partial(quantised_linear, batch_invariant=batch_invariant)
        return QuantisedLinears(device, dtype, multiply, product)
    if device.type == "cpu" and dtype is torch.bfloat16:
        native = find_native_kernels(kernels)
        if native is not None:
            return NativeLinears(native)
    return DenseLinears(device, dtype, product)
